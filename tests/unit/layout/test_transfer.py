"""Plans: senders, packing, chunks, lookahead, sharing of structures, and what is refused."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from fdsd.data.errors import RankDisagreement, SpecMismatch, Unsupported
from fdsd.data.region import Region, Span
from fdsd.data.spec import TensorSpec
from fdsd.layout import Layout, Mesh, Move, Pieces, Replicate, Shard, plan_transfers
from fdsd.layout.pieces import finder_of, intersect, subtract
from fdsd.layout.program import Message, Program
from fdsd.layout.rehearsal import rehearse, run_programs
from fdsd.layout.structure import Limits, plan_structure

F32 = torch.float32
ONE = Layout(Mesh({}, [0]), [])


def spread(num: int, *, first: int = 0) -> Layout:
    return Layout(Mesh({"dp": num}, range(first, first + num)), [Shard(0)])


def messages(program: Program) -> list[Message]:
    return [program[i] for i in range(len(program))]


def test_holders_take_turns() -> None:
    """The sender is holder (instance + destination) mod n, so that load spreads over both."""
    same = Layout(Mesh({"dp": 3}), [Replicate()])
    wide = Layout(Mesh({"dp": 5}), [Replicate()])
    plan = plan_transfers({f"t{i}": Move(TensorSpec((1,), F32), same, wide) for i in range(3)})
    senders = {
        (item.instance, rank): message.peer
        for rank in (3, 4)
        for message in messages(plan.program(rank))
        for item in message.items
    }
    assert senders == {(i, rank): (i + rank) % 3 for i in range(3) for rank in (3, 4)}
    assert plan.traffic().sent == {0: 8, 1: 8, 2: 8}
    assert len(plan.structures) == 1


def test_small_items_travel_packed_in_the_place_of_the_first() -> None:
    small, big = TensorSpec((2,), torch.int8), TensorSpec((64,), F32)
    there = Layout(Mesh({}, [1]), [])
    moves = {"a": Move(small, ONE, there), "b": Move(big, ONE, there), "c": Move(small, ONE, there)}
    found = messages(plan_transfers(moves, limits=Limits(small=16, bucket=1000)).program(1))
    assert [[(item.instance, item.offset) for item in message.items] for message in found] == [
        [(0, 0), (2, 16)],
        [(1, 0)],
    ]
    assert [message.nbytes for message in found] == [18, 256]


def test_a_packed_message_is_no_bigger_than_a_bucket() -> None:
    moves = {f"t{i}": Move(TensorSpec((7,), F32), ONE, Layout(Mesh({}, [1]), [])) for i in range(20)}
    found = messages(plan_transfers(moves, limits=Limits(small=32, bucket=128)).program(0))
    assert [len(message.items) for message in found] == [3] * 6 + [2]
    assert all(message.nbytes <= 128 for message in found)


def test_big_items_travel_in_chunks_that_interleave() -> None:
    """Chunk before destination: no receiver waits for all of another's tensor."""
    two = Layout(Mesh({"dp": 2}, [1, 2]), [Replicate()])
    plan = plan_transfers({"t": Move(TensorSpec((6, 4), F32), ONE, two)}, limits=Limits(small=0, bucket=32))
    found = [(message.peer, message.items[0].part, message.nbytes) for message in messages(plan.program(0))]
    assert found == [(peer, part, 32) for part in range(3) for peer in (1, 2)]
    parts = plan.structures[0].parts(0)
    assert [(region.spans[0].start, region.shape) for region in parts] == [(0, (2, 4)), (2, (2, 4)), (4, (2, 4))]


def test_lookahead_bounds_what_comes_early() -> None:
    """What is packed ahead for one rank is no more than was allowed, though many ranks send to it."""
    moves = {f"t{i}": Move(TensorSpec((16,), F32), spread(4, first=1), ONE) for i in range(12)}
    plan = plan_transfers(moves)
    assert len(plan.program(0)) == 4
    found = messages(plan.program(0, lookahead=3 * 64))
    assert len(found) == 16
    for message in found:
        assert max(item.instance for item in message.items) - message.items[0].instance < 3
    assert [m.items for m in found if m.peer == 2] == [m.items for m in messages(plan.program(2, lookahead=192))]


def test_the_narrower_dtype_travels() -> None:
    for source, target, wire in ((F32, torch.bfloat16, torch.bfloat16), (torch.bfloat16, F32, torch.bfloat16)):
        plan = plan_transfers({"t": Move(TensorSpec((10,), source), spread(2), ONE, target)})
        assert plan.moves[0].wire is wire
        assert plan.traffic().received == {0: 10}


def test_equal_boxes_for_one_rank_travel_once() -> None:
    box = (0,), (4,)
    wants = Pieces.of(1, [(box, [1]), (((4,), (2,)), [1]), (box, [1])])
    plan = plan_structure(Pieces.whole((6,), [0]), wants, itemsize=4)
    assert [row.nbytes for row in plan.rows(1, 0)] == [16, 8]


def test_what_is_held_is_kept() -> None:
    plan = plan_transfers({"t": Move(TensorSpec((6,), F32), spread(3), spread(2))})
    assert plan.traffic().received == {0: 4, 1: 8}
    assert [plan.structures[0].box(o) for o in plan.structures[0].keeps[0]] == [((0,), (2,))]


def test_a_reshard_to_itself_sends_nothing() -> None:
    plan = plan_transfers({"t": Move(TensorSpec((6, 3), F32), spread(3), spread(3))})
    assert plan.traffic() == ({}, {})
    assert [len(plan.program(rank)) for rank in range(3)] == [0, 0, 0]


def test_equal_moves_share_a_structure() -> None:
    moves = {f"t{i}": Move(TensorSpec((6, i % 2), F32), spread(3), spread(2)) for i in range(50)}
    plan = plan_transfers(moves)
    assert len(plan.structures) == 2
    assert repr(plan) == "<Transfers of 50 tensors in 2 structures>"


def test_an_empty_plan() -> None:
    plan = plan_transfers({})
    assert (len(plan.program(0)), plan.traffic()) == (0, ({}, {}))


def test_elements_that_nobody_holds() -> None:
    half = Pieces.of(1, [(((0,), (3,)), [0])])
    good = Move(TensorSpec((6,), F32), spread(2), ONE)
    with pytest.raises(SpecMismatch, match=r"1 problem\. 'b' \(float32\[6\]\): No rank holds 3 elements of the box"):
        plan_transfers({"a": good, "b": Move(TensorSpec((6,), F32), half, ONE)})


def test_all_problems_are_told_at_once() -> None:
    moves = {
        "a": Move(TensorSpec((), F32), spread(2), ONE),
        "b": Move(TensorSpec((6,), torch.complex64), spread(2), ONE, F32),
        "c": Move(TensorSpec((6,), F32), Pieces.whole((7,), [0]), ONE),
        "d": Move(TensorSpec((6,), F32), Pieces.whole((6, 1), [0]), ONE),
    }
    with pytest.raises(SpecMismatch) as caught:
        plan_transfers(moves)
    told = str(caught.value)
    assert told.startswith("plan_transfers: 4 problems.")
    for part in (
        "'a' (float32[])",
        "no dims",
        "'b'",
        "imaginary",
        "'c'",
        "do not lie within",
        "'d'",
        "pieces of 2 dims",
    ):
        assert part in told


@pytest.mark.parametrize("small, bucket", [(-1, 4), (5, 4), (0, 0)])
def test_what_are_no_limits(small: int, bucket: int) -> None:
    with pytest.raises(SpecMismatch, match="0 <= small <= bucket"):
        Limits(small, bucket)


def test_arguments_of_programs() -> None:
    plan = plan_transfers({"t": Move(TensorSpec((6,), F32), spread(2), ONE)})
    with pytest.raises(SpecMismatch, match="lookahead"):
        plan.program(0, lookahead=-1)
    with pytest.raises(IndexError, match="has 1 message, and no 1"):
        plan.program(0)[1]
    with pytest.raises(SpecMismatch, match="a window is at least 1"):
        rehearse(plan, {}, window=0)
    with pytest.raises(Unsupported, match="'t' moves between pieces"):
        rehearse(plan_transfers({"t": Move(TensorSpec((6,), F32), Pieces.whole((6,), [0]), ONE)}), {})


def test_a_rehearsal_sees_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs in two different orders: the check can fail."""
    spec = TensorSpec((100,), F32)
    swap = {"a": Move(spec, ONE, Layout(Mesh({}, [1]), [])), "b": Move(spec, Layout(Mesh({}, [1]), []), ONE)}
    plan = plan_transfers(swap, limits=Limits(small=0))
    original = type(plan).program

    def twisted(self: Any, rank: int, **options: Any) -> Any:
        found = messages(original(self, rank, **options))
        return found[::-1] if rank else found

    monkeypatch.setattr(type(plan), "program", twisted)
    memory = torch.zeros(100)
    with pytest.raises(RankDisagreement, match="the ranks 0, 1 wait for each other within 1"):
        run_programs(plan, [0, 1], lambda *_: memory, lambda *_: memory, window=1, rng=Random(0))
    run_programs(plan, [0, 1], lambda *_: memory, lambda *_: memory, window=2, rng=Random(0))


def test_pieces_are_values() -> None:
    rows = [(((0, 0), (2, 3)), [4, 1]), (((2, 0), (0, 3)), [2]), (((2, 0), (1, 3)), [2])]
    pieces = Pieces.of(2, rows)
    assert (len(pieces), pieces.ranks, pieces.region(1)) == (2, ((1, 4), (2,)), Region.box((2, 0), (1, 3)))
    assert eval(repr(pieces), {"Pieces": Pieces}) == pieces
    assert hash(Pieces.of(2, rows)) == hash(pieces)
    assert pieces != Pieces.of(2, rows[:1])
    assert pieces != 3
    with pytest.raises(SpecMismatch, match="none of a tensor of 1 dims"):
        Pieces.of(1, rows)
    with pytest.raises(SpecMismatch, match="is no box"):
        Pieces.of_regions(1, [(Region.box((0,), (3,)).replace(0, Span(1)), [0])])


def test_finding_is_the_same_by_grid_and_by_sorting() -> None:
    rng = Random(3)
    for _ in range(200):
        cuts = [sorted({0, 9, *[rng.randrange(1, 9) for _ in range(3)]}) for _ in range(2)]
        boxes = [
            ((a, c), (b - a, d - c))
            for a, b in zip(cuts[0], cuts[0][1:], strict=False)
            for c, d in zip(cuts[1], cuts[1][1:], strict=False)
            if rng.random() < 0.7
        ]
        loose = [((rng.randrange(5), rng.randrange(5)), (rng.randrange(1, 5), rng.randrange(1, 5))) for _ in range(6)]
        for some in (boxes, loose):
            pieces = Pieces.of(2, [(box, [0]) for box in some])
            finder = finder_of(pieces)
            box = (rng.randrange(9), rng.randrange(9)), (rng.randrange(1, 9), rng.randrange(1, 9))
            kept = [one for one, _ in pieces]
            assert finder.find(box) == [i for i, one in enumerate(kept) if intersect(one, box)]
            pairs = [(a, b) for i, a in enumerate(kept) for b in kept[:i]]
            assert finder.is_disjoint == (not any(intersect(a, b) for a, b in pairs))


def test_subtracting_leaves_the_rest() -> None:
    rng = Random(5)
    for _ in range(200):
        box = ((1, 2), (rng.randrange(1, 6), rng.randrange(1, 6)))
        hole = intersect(box, ((rng.randrange(5), rng.randrange(5)), (rng.randrange(1, 5), rng.randrange(1, 5))))
        if hole is None:
            continue
        seen = torch.zeros(9, 9, dtype=torch.int64)
        for starts, sizes in [hole, *subtract(box, hole)]:
            assert 0 not in sizes
            seen[starts[0] : starts[0] + sizes[0], starts[1] : starts[1] + sizes[1]] += 1
        assert int(seen.sum()) == box[1][0] * box[1][1] == int(seen[1 : 1 + box[1][0], 2 : 2 + box[1][1]].sum())
        assert int(seen.max()) == 1
