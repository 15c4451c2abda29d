"""Law 12: layouts agree with DTensor's own arithmetic, on every coordinate, wherever torch supports the case.

One thing is told twice in torch: ``_StridedShard``. What FSDP2 holds over tensor parallelism is the dim cut by the
tensor-parallel axis first; what DTensor's arithmetic says of its placements is that, but for some uneven sizes (7 or 19
rows over 3 x 2). A layout says what the ranks hold; ``Shard(dim, parts=...)`` says what the arithmetic says. That of
torch 2.9 says what the ranks hold too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdsd import local_shards, shard_with
from fdsd.data.errors import Unsupported
from fdsd.layout import Layout, Mesh, Shard
from fdsd.layout import Replicate as OurReplicate
from fdsd.layout.local import local_of
from tests.helpers import dtensors as torchs

Shape = tuple[int, ...]
needs_local_cuts = pytest.mark.skipif(not torchs.cuts_locally(), reason="this torch shards from a source rank only")
NAMES = ("a", "b", "c")


def mesh_of(sizes: Shape) -> Mesh:
    return Mesh(list(zip(NAMES, sizes, strict=False)))


def check_boxes(layout: Layout, shape: Shape, placements: Sequence[Any]) -> int:
    """Compare all coordinates with torch; give how many torch has an answer for."""
    answered = 0
    for coordinate in layout.mesh.coordinates():
        theirs = torchs.local_box(shape, layout.mesh.sizes, coordinate, placements)
        if theirs is None:
            continue
        answered += 1
        local, offset = theirs
        assert layout.local_shape(shape, coordinate) == local, (layout, shape, coordinate)
        blocks = layout.blocks(shape, coordinate)
        assert bool(blocks) == (0 not in local)
        if offset is not None:
            assert blocks[0].starts == offset, (layout, shape, coordinate)
    return answered


@st.composite
def plain_cases(draw: st.DrawFn) -> tuple[Shape, Shape, list[Any]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.none() if not shape else st.none() | st.integers(0, len(shape) - 1)
    chosen = [draw(dims) for _ in sizes]
    return shape, sizes, [torchs.Replicate() if dim is None else torchs.Shard(dim) for dim in chosen]


@given(plain_cases())
@settings(max_examples=300)
def test_shard_and_replicate(case: tuple[Shape, Shape, list[Any]]) -> None:
    shape, sizes, placements = case
    assert check_boxes(Layout(mesh_of(sizes), placements), shape, placements) == torch.Size(sizes).numel()


@needs_local_cuts
@pytest.mark.parametrize("sizes", [(3,), (2, 2), (2, 3), (2, 1, 3)], ids=str)
def test_the_elements_of_distribute_tensor(sizes: Shape) -> None:
    """What ``distribute_tensor`` cuts, element by element, on every rank."""
    tensor = torch.arange(7 * 5).reshape(7, 5)
    options = [torchs.Replicate(), torchs.Shard(0), torchs.Shard(1), torchs.Shard(-1)]
    for placements in itertools.product(options, repeat=len(sizes)):
        layout = Layout(mesh_of(sizes), placements)
        for rank in range(torch.Size(sizes).numel()):
            assert torch.equal(torchs.local_tensor(tensor, sizes, rank, placements), local_of(tensor, layout, rank))


@st.composite
def strided_cases(draw: st.DrawFn) -> tuple[int, Shape]:
    """A size, and the sizes of 2 axes, as FSDP over tensor parallelism has them."""
    return draw(st.integers(0, 40)), (draw(st.integers(1, 6)), draw(st.integers(2, 6)))


@given(strided_cases())
@settings(max_examples=300)
def test_strided_shards(case: tuple[int, Shape]) -> None:
    """The order of the axes agrees with torch's arithmetic wherever that tells what FSDP2 holds: always, if even."""
    size, sizes = case
    placements = [torchs.StridedShard(0, sizes[1]), torchs.Shard(0)]
    read = Layout(mesh_of(sizes), placements)
    literal = Layout(mesh_of(sizes), [Shard(0, parts=sizes[1]), Shard(0)])
    assert read == Layout(mesh_of(sizes), [Shard(0), Shard(0)], order=["b", "a"])
    check_boxes(read if torchs.reads_orders() else literal, (size, 2), placements)
    same = all(read.regions((size, 2), c) == literal.regions((size, 2), c) for c in read.mesh.coordinates())
    if same:
        check_boxes(read, (size, 2), placements)
    assert same or size % (sizes[0] * sizes[1])


def test_strided_shards_disagree_rarely() -> None:
    """The exceptions are few, so that the test above is none of nothing."""
    cases = [(size, (a, b)) for size in range(41) for a in range(1, 7) for b in range(2, 7)]
    odd = 0
    for size, sizes in cases:
        read = Layout(mesh_of(sizes), [Shard(0), Shard(0)], order=["b", "a"])
        literal = Layout(mesh_of(sizes), [Shard(0, parts=sizes[1]), Shard(0)])
        odd += any(read.regions((size,), c) != literal.regions((size,), c) for c in read.mesh.coordinates())
    assert 0 < odd < len(cases) / 10


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_factor_without_an_axis_is_parts(parts: int) -> None:
    """A strided shard that no axis explains is a fused tensor: that many parts, each sharded by itself.

    Where torch reads orders, it cuts uneven sizes in a way that is neither.
    """
    theirs = [torchs.StridedShard(0, parts)]
    layout = Layout(Mesh({"a": 4}), theirs)
    assert layout.placements == (Shard(0, parts=parts),)
    for size in range(20):
        check_boxes(layout, (size,), theirs)
        for rank in range(4):
            tensor = torch.arange(size)
            if not torchs.cuts_locally() or (torchs.reads_orders() and size % (4 * parts)):
                continue
            assert torch.equal(torchs.local_tensor(tensor, (4,), rank, theirs), local_of(tensor, layout, rank))


@pytest.mark.parametrize(
    "sizes, factors, order",
    [
        ((2, 2, 3), (3, None, 1), ["c", "a"]),
        ((2, 2, 3), (6, 3, 1), ["c", "b", "a"]),
        ((2, 2, 3), (6, 1, 1), ["b", "c", "a"]),
        ((4, 3, 2), (2, 2, 1), ["c", "a", "b"]),
        ((2, 2, 3), (None, 3, 1), ["c", "b"]),
        ((2, 4, 3), (1, 3, 1), ["a", "c", "b"]),
    ],
    ids=str,
)
def test_orders_over_three_axes(sizes: Shape, factors: tuple[int | None, ...], order: list[str]) -> None:
    """Even sizes, where the two readings are one, on every coordinate."""
    kinds = {None: torchs.Replicate(), 1: torchs.Shard(0)}
    placements = [kinds[f] if f in kinds else torchs.StridedShard(0, f or 0) for f in factors]
    layout = Layout(mesh_of(sizes), placements)
    ours = [OurReplicate() if factor is None else Shard(0) for factor in factors]
    assert layout == Layout(mesh_of(sizes), ours, order=order)
    assert check_boxes(layout, (torch.Size(sizes).numel() * 2, 3), placements) in (0, torch.Size(sizes).numel())


@needs_local_cuts
@pytest.mark.parametrize("size", [6, 7, 12, 13, 11, 1, 19])
@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (2, 2)], ids=str)
def test_what_fsdp_holds_over_tensor_parallelism(sizes: Shape, size: int) -> None:
    """The layout of the real parameter is what is in its memory, uneven and empty shards too."""
    weight = torch.arange(size * 2.0).reshape(size, 2)
    dp, tp = sizes
    for rank in range(dp * tp):
        try:
            local, placements = torchs.fsdp_over_tp(weight, dp, tp, rank)
        except NotImplementedError as error:  # uneven sizes, in older versions
            pytest.skip(f"torch {torch.__version__} cannot: {error}")
        layout = Layout(Mesh({"dp": dp, "tp": tp}), placements)
        assert torch.equal(local, local_of(weight, layout, rank))


def test_partial_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"the placement of 'a' is Partial\(.*summands.*Redistribute"):
        Layout(Mesh({"a": 2}), [torchs.Partial()])


@needs_local_cuts
@pytest.mark.parametrize(
    "sizes, ranks",
    [((3,), (2, 0, 1)), ((2, 2), (3, 1, 0, 2)), ((2, 3), (5, 3, 1, 4, 2, 0)), ((2, 1, 2), (1, 3, 2, 0))],
    ids=str,
)
def test_meshes_of_ranks_in_any_order(sizes: Shape, ranks: Shape) -> None:
    """A DeviceMesh of permuted ranks: what each rank cuts is the shard that a ``Sharded`` gives for its number."""
    tensor = torch.arange(5 * 7).reshape(5, 7)
    mesh = Mesh(list(zip(NAMES, sizes, strict=False)), ranks)
    options = [torchs.Replicate(), torchs.Shard(0), torchs.Shard(1)]
    for placements in itertools.product(options, repeat=len(sizes)):
        sharded = shard_with(Layout(mesh, placements))({"w": tensor})
        for rank in ranks:
            theirs = torchs.local_tensor(tensor, sizes, rank, placements, ranks=ranks)
            assert torch.equal(local_shards(sharded, rank)["w"], theirs)


@needs_local_cuts
@given(plain_cases(), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_the_shards_of_all_coordinates(case: tuple[Shape, Shape, list[Any]], rng: Random) -> None:
    """Tensors without dims or elements, uneven, empty and replicated shards, axes of one rank: on a few ranks each."""
    shape, sizes, placements = case
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    sharded = shard_with(Layout(mesh_of(sizes), placements))({"w": tensor})
    for rank in rng.sample(range(torch.Size(sizes).numel()), min(3, torch.Size(sizes).numel())):
        theirs = torchs.local_tensor(tensor, sizes, rank, placements)
        assert torch.equal(local_shards(sharded, rank)["w"], theirs)
