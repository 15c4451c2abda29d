"""DTensors of one rank at a time, under torch's fake process group; real ranks are in ``tests/multiprocess``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdsd.comms.dtensors import DTensorSource, layout_of_dtensor, local_of_dtensor, make_dtensor, make_like
from fdsd.data.errors import FdsdError
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.ties import tie_key, ties
from fdsd.layout.layout import Layout
from fdsd.layout.local import local_of
from fdsd.layout.mesh import Mesh
from tests.helpers import dtensors as torchs
from tests.helpers.layouts import indices
from tests.helpers.tensors import same_bytes

Shape = tuple[int, ...]
NAMES = ("a", "b", "c")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Shape, list[Any], int]:
    """A shape, the sizes of a mesh, placements of any kind, and a rank."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    placements: list[Any] = []
    for _ in sizes:
        dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
        factor = draw(st.integers(1, 3))
        if dim is None:
            placements.append(torchs.Replicate())
        else:
            placements.append(torchs.Shard(dim) if factor == 1 else torchs.StridedShard(dim, factor))
    return shape, sizes, placements, draw(st.integers(0, torch.Size(sizes).numel() - 1))


@given(cases(), st.data())
@settings(max_examples=150)
def test_layouts_and_reads(case: tuple[Shape, Shape, list[Any], int], data: st.DataObject) -> None:
    """What a DTensor says is the layout of its placements; it gives what it holds, and nothing else."""
    from torch.distributed.device_mesh import init_device_mesh

    shape, sizes, placements, rank = case
    whole = indices(shape)
    layout = Layout(Mesh(list(zip(NAMES, sizes, strict=False))), placements)
    starts = [data.draw(st.integers(0, size)) for size in shape]
    region = Region.box(starts, [data.draw(st.integers(0, size - at)) for size, at in zip(shape, starts, strict=True)])
    with torchs.fake_ranks(rank, torch.Size(sizes).numel()):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[: len(sizes)])
        x = make_dtensor(local_of(whole, layout, rank).clone(), mesh, placements, TensorSpec(shape, whole.dtype))
        assert layout_of_dtensor(x) == layout
        assert tuple(x.shape) == shape and x.stride() == whole.stride()
        source = DTensorSource.of(x)
        copied = source.copied(torch.clone)
        held = {int(i) for i in local_of(whole, layout, rank).flatten()}
        expected = whole.as_strided(region.shape, *region.strides(whole.stride()))
        for each in (source, copied):
            out = torch.full(region.shape, -1)
            if {int(i) for i in expected.flatten()} <= held:
                each.read(each.fqn, region, out)
                assert torch.equal(out, expected)
            else:
                with pytest.raises(FdsdError, match=r"held by .*give group="):
                    each.read(each.fqn, region, out)


def test_copies_are_copies() -> None:
    with one_rank() as mesh:
        x = make_dtensor(torch.ones(3), mesh, [torchs.Replicate()], TensorSpec((3,), torch.float32))
        source, copied = DTensorSource.of(x), DTensorSource.of(x).copied(torch.clone)
        local_of_dtensor(x).fill_(7)
        out = torch.zeros(3)
        source.read(source.fqn, Region.whole((3,)), out)
        assert out.tolist() == [7, 7, 7]
        copied.read(copied.fqn, Region.whole((3,)), out)
        assert out.tolist() == [1, 1, 1]


def one_rank() -> Any:
    from contextlib import contextmanager

    from torch.distributed.device_mesh import init_device_mesh

    @contextmanager
    def made() -> Any:
        with torchs.fake_ranks(0, 1):
            yield init_device_mesh("cpu", (1,))

    return made()


def test_ties() -> None:
    """The same memory in the same way, of the same global shape."""
    with one_rank() as mesh:
        local = torch.arange(6.0)

        def wrapped(memory: torch.Tensor, shape: Shape = (6,), placement: Any = None) -> Any:
            spec = TensorSpec(shape, torch.float32)
            return make_dtensor(memory, mesh, [placement or torchs.Replicate()], spec)

        x = wrapped(local)
        state = {
            "x": x,
            "detached": x.detach(),
            "parameter": torch.nn.Parameter(x.detach()),
            "wrapped again": make_like(x, local),
            "clone": make_like(x, local.clone()),
            "plain": local,
            "view": wrapped(local.view(2, 3), (2, 3)),
            "other view": wrapped(local.view(3, 2), (3, 2)),
            "sharded": wrapped(local, placement=torchs.Shard(0)),
        }
        assert ties(state) == [("x", "detached", "parameter", "wrapped again")]
        keys = [tie_key(value) for value in state.values()]
        assert all((a == b) == (i < 4 and j < 4) for (i, a), (j, b) in itertools.combinations(enumerate(keys), 2))


def test_the_same_local_memory_of_different_tensors_is_no_tie() -> None:
    """One local shape, and two global ones: rows of 5, and rows of 6, of which rank 0 has 3 each."""
    from torch.distributed.device_mesh import init_device_mesh

    with torchs.fake_ranks(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.zeros(3)
        five, six = (make_dtensor(local, mesh, [torchs.Shard(0)], TensorSpec((n,), torch.float32)) for n in (5, 6))
        assert tie_key(five) != tie_key(six)
        assert tie_key(five) == tie_key(five.detach())


def test_empty_and_meta_tensors_are_tied_by_their_storage() -> None:
    with one_rank() as mesh:

        def wrapped(memory: torch.Tensor) -> Any:
            return make_dtensor(memory, mesh, [torchs.Replicate()], TensorSpec(tuple(memory.shape), torch.float32))

        for device, shape in (("meta", (3,)), ("cpu", (0,))):
            x, y = (wrapped(torch.empty(shape, device=device)) for _ in range(2))
            assert tie_key(x) != tie_key(y)
            assert tie_key(x) == tie_key(x.detach())


def test_made_like_keeps_strided_shards() -> None:
    """The order in which axes cut is no less known after a copy, or a cast."""
    from torch.distributed.device_mesh import init_device_mesh

    whole = torch.arange(26.0).reshape(13, 2)
    placements = [torchs.StridedShard(0, 2), torchs.Shard(0)]
    layout = Layout(Mesh({"dp": 2, "tp": 2}), placements)
    with torchs.fake_ranks(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = make_dtensor(local_of(whole, layout, 1).clone(), mesh, placements, TensorSpec((13, 2), torch.float32))
        for y in (x.detach(), make_like(x, local_of(whole, layout, 1).double()), torch.nn.Parameter(x.detach())):
            assert layout_of_dtensor(y) == layout
            assert same_bytes(local_of_dtensor(y).float(), local_of(whole, layout, 1).contiguous())


def test_nothing_heavy_is_loaded(fresh_python: Callable[[str], str]) -> None:
    """The modules wait for a DTensor to come; only then its classes are there anyway."""
    code = (
        "import fdsd.comms.dtensors, fdsd.comms.sharded_tensors, fdsd.comms.world, sys; "
        "print(*[name for name in sys.modules if name.startswith('torch.distributed')])"
    )
    loaded = fresh_python(code).split()
    assert "torch.distributed" in loaded
    heavy = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")
    assert [name for name in loaded if name.startswith((*heavy, "torch.distributed._shard"))] == []
