"""ShardedTensors on real ranks: made, read and made lazy; any number of shards a rank; groups of some ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fdsd
from fdsd.algebra.apply import defer, defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops.leaves import Origin
from fdsd.comms.sharded_tensors import lazy_sharded_tensor, make_sharded_tensor, pieces_of_sharded_tensor
from fdsd.data.errors import FdsdError, SpecMismatch, Unsupported
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.ties import ties
from fdsd.layout.layout import Layout
from fdsd.layout.mesh import Mesh
from fdsd.layout.pieces import Box, Pieces
from fdsd.layout.placed import PlacedSource
from fdsd.layout.placement import Replicate, Shard
from tests.helpers.ranks import run_ranks
from tests.helpers.tensors import same_bytes

WHOLE = torch.arange(35.0).reshape(7, 5)
SPEC = TensorSpec((7, 5), torch.float32)


def cut(box: Box) -> torch.Tensor:
    return WHOLE[tuple([slice(at, at + size) for at, size in zip(*box, strict=True)])].contiguous()


def source_of(lazy: Lazy) -> PlacedSource:
    assert isinstance(lazy.op, Origin) and isinstance(lazy.op.source, PlacedSource)
    return lazy.op.source


PLACEMENTS = {
    "rows": Layout(Mesh({"dp": 3}), [Shard(0)]),
    "columns, an empty one": Layout(Mesh({"dp": 3}, [1, 2, 0]), [Shard(1)]),
    "boxes": Pieces.of(2, [(((0, 0), (4, 2)), [2]), (((0, 2), (4, 3)), [0]), (((4, 0), (3, 5)), [1])]),
    "one rank": Pieces.whole((7, 5), [1]),
}


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_made_ones(placement: Layout | Pieces) -> None:
    pieces = placement.holders((7, 5)) if isinstance(placement, Layout) else placement

    def fn(rank: int) -> None:
        box = next((box for box, ranks in pieces if rank in ranks), None)
        local = None if box is None else cut(box)
        x = make_sharded_tensor(local, placement, SPEC)
        assert pieces_of_sharded_tensor(x) == pieces
        if local is not None:
            assert x.local_shards()[0].tensor.data_ptr() == local.data_ptr()
        out = torch.zeros(7, 5) if rank == 0 else None
        x.gather(0, out)
        if out is not None:
            assert same_bytes(out, WHOLE)
        check_source(defer_leaf(x), box, rank)

    def check_source(lazy: Lazy, box: Box | None, rank: int) -> None:
        assert lazy.spec == SPEC
        source = source_of(lazy)
        fqn = next(iter(source.specs()))
        assert source.placement(fqn) == pieces
        local = source.local(fqn)
        assert (local is None) == (box is None)
        for other, ranks in pieces:
            out = torch.full(other[1], -1.0)
            region = Region.box(*other)
            if box == other:
                assert local is not None and same_bytes(local, cut(other))
                source.read(fqn, region, out)
                assert same_bytes(out, cut(other))
            else:
                with pytest.raises(FdsdError, match=rf"held by ranks? {ranks[0]}.*give group="):
                    source.read(fqn, region, out)

    run_ranks(fn, 3)


def several(boxes: list[tuple[Box, int]]) -> Any:
    """Make a ShardedTensor with torch's own means, with any number of shards on this rank."""
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    mine = [
        LocalShard.from_tensor_and_offsets(cut(box), list(box[0]), rank)
        for box, rank in boxes
        if rank == dist.get_rank()
    ]
    return init_from_local_shards(mine, [7, 5])


GRID: list[tuple[Box, int]] = [
    (((0, 0), (3, 2)), 0),
    (((0, 2), (3, 3)), 1),
    (((3, 0), (4, 2)), 1),
    (((3, 2), (4, 3)), 0),
]
PINWHEEL: list[tuple[Box, int]] = [
    (((0, 0), (2, 3)), 0),
    (((0, 3), (5, 2)), 1),
    (((5, 1), (2, 4)), 0),
    (((2, 0), (5, 1)), 1),
    (((2, 1), (3, 2)), 0),
]


@pytest.mark.parametrize("boxes", [GRID, PINWHEEL], ids=["grid", "no grid"])
def test_several_shards_of_a_rank(boxes: list[tuple[Box, int]]) -> None:
    """Each shard is a source of its own; what is here can be read, across shards too."""

    def fn(rank: int) -> int:
        x = several(boxes)
        assert sorted(pieces_of_sharded_tensor(x)) == sorted([(box, (holder,)) for box, holder in boxes])
        lazy = lazy_sharded_tensor(x)
        assert lazy.spec == SPEC
        held = torch.zeros(7, 5, dtype=torch.bool)
        for box, holder in boxes:
            held[tuple([slice(at, at + size) for at, size in zip(*box, strict=True)])] = holder == rank
        read = 0
        for a, b in itertools.combinations(range(8), 2):
            for c, d in itertools.combinations(range(6), 2):
                read += check(lazy, (slice(a, b), slice(c, d)), held)
        return read

    def check(lazy: Lazy, place: tuple[slice, slice], held: torch.Tensor) -> int:
        from fdsd.algebra.fill import Session

        sizes = [s.stop - s.start for s in place]
        region = Region.box([s.start for s in place], sizes)
        out = torch.zeros(sizes)
        session = Session([lazy])
        if not held[place].all():
            with pytest.raises(FdsdError, match=r"held by ranks? \d.*give group="):
                session.fill(session.roots[0], region, out)
            return 0
        session.fill(session.roots[0], region, out)
        assert same_bytes(out, WHOLE[place].contiguous())
        return 1

    assert all(count > 10 for count in run_ranks(fn, 2))


def test_groups_of_some_ranks() -> None:
    """Shards of a group are on ranks of the default group: 1 and 3 of 4."""

    def fn(rank: int) -> None:
        group = dist.new_group([1, 3])
        if rank not in (1, 3):
            return
        layout = Layout(Mesh({"dp": 2}, [3, 1]), [Shard(0)])
        box = layout.blocks((7, 5), rank)[0]
        x = make_sharded_tensor(cut((box.starts, box.sizes)), layout, SPEC, group)
        assert pieces_of_sharded_tensor(x) == layout.holders((7, 5))
        lazy = lazy_sharded_tensor(x)
        mine = fdsd.materialize({"w": lazy_part(lazy, box.starts[0], box.sizes[0])})["w"]
        assert same_bytes(mine, cut((box.starts, box.sizes)))

    def lazy_part(lazy: Lazy, start: int, length: int) -> Any:
        from fdsd.algebra.apply import apply
        from fdsd.algebra.ops import Slice

        return apply(Slice(0, start, length), lazy)

    run_ranks(fn, 4)


def test_a_whole_shard_needs_no_group() -> None:
    def fn(rank: int) -> None:
        x = make_sharded_tensor(WHOLE.clone() if rank == 1 else None, Pieces.whole((7, 5), [1]), SPEC)
        if rank == 1:
            assert same_bytes(fdsd.materialize(defer({"w": x}))["w"], WHOLE)
        else:
            with pytest.raises(FdsdError, match=r"held by ranks? 1.*group="):
                fdsd.materialize(defer({"w": x}))

    run_ranks(fn, 2)


def test_ties() -> None:
    """Two wrappers over the same shards are one tensor; two empty-handed ones are not known to be."""

    def fn(rank: int) -> list[tuple[str, ...]]:
        pieces = Pieces.of(2, [(((0, 0), (4, 5)), [0]), (((4, 0), (3, 5)), [1])])
        local = cut(pieces.box(rank)) if rank < 2 else None
        state = {name: make_sharded_tensor(local, pieces, SPEC) for name in ("a", "b")}
        other = make_sharded_tensor(None if local is None else local.clone(), pieces, SPEC)
        return ties({**state, "c": other})

    assert run_ranks(fn, 3) == [[("a", "b")], [("a", "b")], []]


def test_what_cannot_be_made() -> None:
    def fn(rank: int) -> None:
        rows = Layout(Mesh({"dp": 2}), [Shard(0)])
        copies = Layout(Mesh({"dp": 2}), [Replicate()])
        twice = Pieces.of(2, [(((0, 0), (4, 5)), [0]), (((4, 0), (3, 5)), [0])])
        local = cut((rows.blocks((7, 5), rank)[0].starts, rows.blocks((7, 5), rank)[0].sizes))
        with pytest.raises(Unsupported, match=r"each box of a ShardedTensor lies on one rank.*ranks \(0, 1\)"):
            make_sharded_tensor(WHOLE, copies, SPEC)
        with pytest.raises(Unsupported, match=r"1 rank would have several boxes of a tensor float32\[7, 5\]: 0"):
            make_sharded_tensor(WHOLE, twice, SPEC)
        sizes = list(local.shape)
        for wrong in (None, local[1:], local.double(), torch.empty(0, 5)):
            with pytest.raises(SpecMismatch) as caught:
                make_sharded_tensor(wrong, rows, SPEC)
            assert f"rank {rank} holds " in str(caught.value)
            assert f"should hold float32{sizes}." in str(caught.value)
        with pytest.raises(SpecMismatch, match=rf"rank {rank} holds float32.* should hold nothing"):
            make_sharded_tensor(local, Pieces.of(2, []), SPEC)

    run_ranks(fn, 2)


def test_shards_of_other_classes_and_places_are_refused() -> None:
    class Odd(torch.Tensor):
        pass

    def fn(rank: int) -> None:
        x = make_sharded_tensor(WHOLE.clone(), Pieces.whole((7, 5), [0]), SPEC)
        x.local_shards()[0].tensor = WHOLE.as_subclass(Odd)
        with pytest.raises(Unsupported, match=r"A shard of a ShardedTensor is of class .*Odd"):
            lazy_sharded_tensor(x)
        x.metadata().shards_metadata[0].placement = None
        with pytest.raises(Unsupported, match=r"a shard on None, and not on a rank"):
            lazy_sharded_tensor(x)

    run_ranks(fn, 1)
