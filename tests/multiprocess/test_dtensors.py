"""DTensors on real ranks: layouts, sources and lazies of what FSDP2, tensor parallelism and their nestings make."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fdsd
from fdsd.algebra.apply import defer_leaf
from fdsd.comms.dtensors import (
    DTensorSource,
    layout_of_dtensor,
    lazy_dtensor,
    local_of_dtensor,
    make_dtensor,
)
from fdsd.data.errors import FdsdError, SpecMismatch, Unsupported
from fdsd.data.region import Region, Span
from fdsd.data.spec import TensorSpec
from fdsd.layout.layout import Layout
from fdsd.layout.local import assemble, local_of
from fdsd.layout.mesh import Mesh
from fdsd.layout.placed import PlacedSource
from fdsd.layout.placement import Replicate, Shard
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded_models import dtensor, fsdp2, fsdp2_over_tp, hsdp, mesh_of, on_dim_1, tp, wrapped
from tests.helpers.tensors import same_bytes

Shape = tuple[int, ...]


def grid_points(size: int) -> list[Span]:
    """Spans of a dim of every kind: all of it, runs, steps, one index, none."""
    found = [Span(0, ((size, 1),)), Span(0, ((0, 1),))]
    found += [Span(a, ((b - a, 1),)) for a, b in itertools.combinations(range(0, size + 1, max(2, size // 4)), 2)]
    found += [Span(at) for at in range(0, size, 4)]
    if size > 4:
        found += [Span(1, ((2, 2),)), Span(0, ((2, 3), (2, 1)))]
    return found


def expected_of(whole: torch.Tensor, region: Region) -> torch.Tensor:
    strides, offset = region.strides(whole.stride())
    return whole.as_strided(region.shape, strides, offset)


def indices(region: Region) -> set[tuple[int, ...]]:
    return set(itertools.product(*[span.indices() for span in region.spans]))


def check_reads(source: PlacedSource, whole: torch.Tensor, rank: int) -> tuple[int, int]:
    """Read regions of all kinds: right if this rank holds all of the elements, refused if not. Count both."""
    fqn = next(iter(source.specs()))
    placement = source.placement(fqn)
    assert isinstance(placement, Layout)
    held = {i for region in placement.regions(whole.shape, rank) for i in indices(region)}
    good = bad = 0
    for spans in itertools.product(*[grid_points(size) for size in whole.shape]):
        region = Region(spans)
        out = torch.full(region.shape, -1.0)
        if indices(region) <= held:
            source.read(fqn, region, out)
            assert torch.equal(out, expected_of(whole, region))
            good += 1
        else:
            with pytest.raises(FdsdError, match=r"is held by ranks? .*; give group=\."):
                source.read(fqn, region, out)
            bad += 1
    return good, bad


def examine(rank: int, wrap: Callable[[nn.Module], None]) -> dict[str, Any]:
    """Wrap a model; check each parameter's source, and give what it says for all ranks to be compared."""
    model, values = wrapped(wrap)
    told: dict[str, Any] = {}
    for name, param in model.named_parameters():
        whole = values[name]
        if type(param) is nn.Parameter:
            continue
        layout = layout_of_dtensor(param)
        local = local_of_dtensor(param)
        assert layout_of_dtensor(param.detach()) is layout, "known by its mesh, placements and shape"
        assert local.data_ptr() == param.to_local().data_ptr() and not local.requires_grad  # type: ignore[attr-defined]
        assert same_bytes(local, local_of(whole, layout, rank)), (name, layout)
        source = DTensorSource.of(param)
        assert isinstance(source, PlacedSource)
        assert source.placement(source.fqn) is layout
        assert source.specs() == {source.fqn: TensorSpec(whole.shape, whole.dtype)}
        mine = source.local(source.fqn)
        assert mine is not None and same_bytes(mine, local)
        reads = check_reads(source, whole, rank)
        lazy = defer_leaf(param)
        assert lazy.spec == TensorSpec(whole.shape, whole.dtype)
        boxes = [(piece.region, piece.owner) for piece in source.pieces(source.fqn)]
        assert {i for region, _ in boxes for i in indices(region)} == indices(Region.whole(whole.shape))
        told[name] = layout, local.clone(), reads, whole
    return told


@pytest.mark.parametrize(
    "wrap, n",
    [
        (fsdp2, 2),
        (fsdp2, 3),
        (fsdp2, 4),
        (on_dim_1, 1),
        (tp, 2),
        (tp, 3),
        (fsdp2_over_tp, 4),
        (hsdp, 4),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_parameters(wrap: Callable[[nn.Module], None], n: int) -> None:
    found = run_ranks(examine, n, wrap, timeout=120)
    assert set(found[0]) >= {"up.weight", "up.bias", "down.weight"}
    refused = 0
    for name in found[0]:
        layouts = [told[name][0] for told in found]
        is_partial = wrap is fsdp2_over_tp and name == "scale"  # tensor parallelism knows nothing of it
        assert len(set(layouts)) == (2 if is_partial else 1)
        for layout in set(layouts):
            shards = {i: found[i][name][1] for i in layout.mesh.ranks}
            assert all(layouts[i] == layout for i in shards)
            whole = found[0][name][3]
            assert same_bytes(assemble(shards, layout, whole.shape), whole)
        assert all(told[name][2][0] for told in found), "every rank can read something, if only nothing"
        refused += sum(told[name][2][1] for told in found)
    assert (refused > 0) == (n > 1)


def test_the_layouts_of_parameters() -> None:
    def layouts(rank: int) -> list[Layout]:
        models = [wrapped(wrap)[0] for wrap in (fsdp2, tp, fsdp2_over_tp, hsdp)]
        return [layout_of_dtensor(model.up.weight) for model in models]

    for found in run_ranks(layouts, 4, timeout=120):
        assert found == [
            Layout(Mesh({"dp": 4}), [Shard(0)]),
            Layout(Mesh({"tp": 4}), [Shard(0)]),
            Layout(Mesh({"dp": 2, "tp": 2}), [Shard(0), Shard(0)], order=["tp", "dp"]),
            Layout(Mesh({"replicas": 2, "dp": 2}), [Replicate(), Shard(0)]),
        ]


def test_meshes_of_any_ranks_and_parts_of_meshes() -> None:
    """Axes without names; ranks in the order of the groups; a part of a mesh has the ranks of this rank's part."""
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> list[Layout]:
        from torch.distributed.device_mesh import DeviceMesh

        unnamed = DeviceMesh("cpu", [[2, 3], [0, 1]])
        part = mesh_of((2, 2), ("pp", "tp"))["tp"]
        whole = torch.arange(35.0).reshape(7, 5)
        first = dtensor(whole, unnamed, [TorchShard(1), TorchShard(-2)])
        second = dtensor(whole, part, [TorchReplicate()])
        third = dtensor(whole, part, [TorchShard(0)])
        return [layout_of_dtensor(x) for x in (first, second, third)]

    for rank, found in enumerate(run_ranks(fn, 4)):
        part = Mesh({"tp": 2}, [rank // 2 * 2, rank // 2 * 2 + 1])
        assert found == [
            Layout(Mesh({"dim0": 2, "dim1": 2}), [Shard(1), Shard(0)]),
            Layout(part, [Replicate()]),
            Layout(part, [Shard(0)]),
        ]


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor

        mesh = DeviceMesh("cpu", [2, 0])
        whole = torch.arange(6.0)
        if rank == 1:
            x: Any = DTensor.from_local(torch.empty(0), mesh, [TorchShard(0)], shape=whole.shape, stride=(1,))
        else:
            x = dtensor(whole, mesh, [TorchShard(0)])
        source = DTensorSource.of(x)
        assert source.placement(source.fqn) == Layout(Mesh({"dim0": 2}, [0, 2]), [Shard(0)])
        local = source.local(source.fqn)
        assert (local is None) == (rank == 1)
        out = torch.zeros(2)
        if rank == 1:
            with pytest.raises(FdsdError, match=r"held by ranks 0, 2; give group="):
                source.read(source.fqn, Region.box((2,), (2,)), out)
            with pytest.raises(FdsdError, match=r"held by rank 2; give group="):
                source.read(source.fqn, Region.box((4,), (2,)), out)
        if rank == 2:
            source.read(source.fqn, Region.box((4,), (2,)), out)
            assert out.tolist() == [4, 5]

    run_ranks(fn, 3)


def test_materialize_without_a_group() -> None:
    """What is replicated here can be read here; what is not raises, and names group=."""
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> None:
        mesh = mesh_of((2,), ("dp",))
        whole = torch.arange(6.0).reshape(3, 2)
        here = fdsd.transpose("w", 0, 1)({"w": dtensor(whole, mesh, [TorchReplicate()])})
        assert torch.equal(fdsd.materialize(here)["w"], whole.t())
        there = fdsd.transpose("w", 0, 1)({"w": dtensor(whole, mesh, [TorchShard(0)])})
        with pytest.raises(FdsdError, match=r"group="):
            fdsd.materialize(there)

    run_ranks(fn, 2)


def test_local_tensors_of_several_blocks() -> None:
    """A factor that no axis explains: two runs on each rank, and regions that go over both."""
    from torch.distributed.tensor.placement_types import _StridedShard

    def fn(rank: int) -> tuple[int, int]:
        mesh = mesh_of((2,), ("tp",))
        whole = torch.arange(24.0).reshape(8, 3)
        x = dtensor(whole, mesh, [_StridedShard(0, split_factor=2)])
        assert layout_of_dtensor(x) == Layout(Mesh({"tp": 2}), [Shard(0, parts=2)])
        assert len(layout_of_dtensor(x).blocks((8, 3), rank)) == 2
        return check_reads(DTensorSource.of(x), whole, rank)

    for good, bad in run_ranks(fn, 2):
        assert good > 20 and bad > 20


def test_partial_and_false_shapes_are_refused() -> None:
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor import Shard as TorchShard

    def fn(rank: int) -> None:
        mesh = mesh_of((2,), ("dp",))
        partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        for make in (layout_of_dtensor, lazy_dtensor, DTensorSource.of):
            with pytest.raises(Unsupported, match=r"the placement of 'dp' is Partial.*Redistribute"):
                make(partial)
        false = DTensor.from_local(torch.ones(3 - rank), mesh, [TorchShard(0)], shape=torch.Size([6]), stride=(1,))
        if rank == 1:
            for make in (layout_of_dtensor, lazy_dtensor, DTensorSource.of):
                with pytest.raises(SpecMismatch, match=r"holds a local tensor of shape \(2,\) on rank 1.*say \(3,\)"):
                    make(false)
            with pytest.raises(SpecMismatch, match=r"shape \(2,\)"):
                make_dtensor(torch.ones(2), mesh, [TorchShard(0)], TensorSpec((6,), torch.float32))
        else:
            layout_of_dtensor(false)

    run_ranks(fn, 2)
