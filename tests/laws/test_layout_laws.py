"""Laws 6 and 8 on layouts and plans: what a layout cuts it puts together again; transfers compose and never repeat.

Meshes of up to 3 axes with any ranks, uneven and empty shards, 0-dim tensors, zero-size dims, orders, fused parts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fdsd.layout
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.layout import Layout, Mesh, Move, Pieces, Transfers, plan_transfers
from fdsd.layout.local import assemble, local_of
from fdsd.layout.rehearsal import rehearse, run_programs
from fdsd.layout.structure import Limits
from tests.helpers.layouts import by_hand, from_blocks, indices, layouts, meshes, shapes, states_of
from tests.helpers.tensors import NUMERIC, numbers, patterns, same_bytes

limits = st.sampled_from([Limits(), Limits(0, 24), Limits(16, 40), Limits(100, 100), Limits(1, 1)])
windows = st.integers(1, 5)


@st.composite
def shaped_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout]:
    shape = draw(shapes())
    return shape, draw(layouts(shape))


@st.composite
def shaped_moves(draw: st.DrawFn, num: int = 2) -> tuple[tuple[int, ...], list[Layout]]:
    shape = draw(shapes())
    return shape, [draw(layouts(shape)) for _ in range(num)]


def elements(pieces: Pieces, shape: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """List each element of each piece, with the ranks."""
    whole = indices(shape)
    return [
        (element, ranks)
        for (starts, sizes), ranks in pieces
        for element in whole[tuple([slice(a, a + n) for a, n in zip(starts, sizes, strict=True)])].flatten().tolist()
    ]


def crossings(plan: Transfers, ranks: list[int]) -> Counter[tuple[str, int, int, int]]:
    """Count how often each element of each tensor crosses to a rank: name, element, sender, receiver."""
    seen: Counter[tuple[str, int, int, int]] = Counter()
    for rank in ranks:
        program = plan.program(rank)
        for i in range(len(program)):
            message = program[i]
            for instance, overlap, part, _ in message.items if not message.is_send else ():
                kind = plan.kinds[instance]
                region = plan.structures[kind].parts(overlap)[part]
                place = tuple([slice(s.start, s.start + n) for s, n in zip(region.spans, region.shape, strict=True)])
                for element in indices(plan.moves[kind].spec.shape)[place].flatten().tolist():
                    seen[plan.names[instance], element, message.peer, rank] += 1
    return seen


@given(shaped_layouts())
def test_blocks_are_what_torch_cuts(case: tuple[tuple[int, ...], Layout]) -> None:
    """On every coordinate the boxes, in their places, are what chunk and cat make, and nothing is left out."""
    shape, layout = case
    tensor = indices(shape)
    for coordinate, rank in zip(layout.mesh.coordinates(), layout.mesh.ranks, strict=True):
        want = by_hand(tensor, layout, coordinate)
        assert layout.local_shape(shape, coordinate) == tuple(want.shape) == layout.local_shape(shape, rank)
        blocks = layout.blocks(shape, rank)
        assert torch.equal(from_blocks(tensor, blocks, tuple(want.shape)), want)
        assert all(0 not in block.sizes for block in blocks)
        assert layout.regions(shape, coordinate) == tuple([block.region for block in blocks])
        assert [block.offset for block in blocks] == sorted(block.offset for block in blocks)


@given(shaped_layouts())
def test_regions_tile_the_tensor(case: tuple[tuple[int, ...], Layout]) -> None:
    """Each element is held once for each coordinate of the axes that replicate."""
    shape, layout = case
    held = torch.zeros(shape, dtype=torch.int64)
    for rank in layout.mesh.ranks:
        for block in layout.blocks(shape, rank):
            held[tuple([slice(a, a + n) for a, n in zip(block.starts, block.sizes, strict=True)])] += 1
    sharding = set(layout.order)
    copies = torch.Size([size for name, size in layout.mesh.axes if name not in sharding]).numel()
    assert bool((held == copies).all())


@given(shaped_layouts())
def test_holders_are_the_regions_of_all_ranks(case: tuple[tuple[int, ...], Layout]) -> None:
    """Pieces are disjoint, cover the tensor, and name exactly the ranks that hold them."""
    shape, layout = case
    pieces = layout.holders(shape)
    assert sorted(element for element, _ in elements(pieces, shape)) == list(range(torch.Size(shape).numel()))
    mine = {
        rank: sorted((block.starts, block.sizes) for block in layout.blocks(shape, rank)) for rank in layout.mesh.ranks
    }
    named = {rank: sorted(box for box, ranks in pieces if rank in ranks) for rank in layout.mesh.ranks}
    assert mine == named


@given(shaped_layouts())
def test_a_layout_survives_text(case: tuple[tuple[int, ...], Layout]) -> None:
    """JSON and repr give an equal layout, with an equal hash."""
    _, layout = case
    for again in (Layout.from_json(layout.to_json()), eval(repr(layout), vars(fdsd.layout))):
        assert again == layout
        assert hash(again) == hash(layout)


@given(shaped_layouts(), st.sampled_from(NUMERIC))
def test_gather_undoes_sharding(case: tuple[tuple[int, ...], Layout], dtype: torch.dtype) -> None:
    """Law 6: the local tensors of all ranks make the whole one, byte for byte."""
    shape, layout = case
    tensor = patterns(shape, dtype)
    parts = {rank: local_of(tensor, layout, rank) for rank in layout.mesh.ranks}
    assert same_bytes(assemble(parts, layout, shape), tensor)


@given(shaped_moves(), st.sampled_from(NUMERIC), limits, windows, st.randoms(use_true_random=False))
def test_a_reshard_gives_the_shards_of_the_target(
    case: tuple[tuple[int, ...], list[Layout]], dtype: torch.dtype, limit: Limits, window: int, rng: Random
) -> None:
    """Every rank gets the exact bytes, whatever the window, the sizes of messages and the interleaving."""
    shape, (source, target) = case
    tensors = {f"t{i}": patterns(shape, dtype, seed=i) for i in range(3)}
    move = Move(TensorSpec(shape, dtype), source, target)
    plan = plan_transfers(dict.fromkeys(tensors, move), limits=limit)
    states = states_of(tensors, dict.fromkeys(tensors, source))
    lookahead = rng.choice([None, 0, 64])
    got = rehearse(plan, states, window=window, rng=rng, lookahead=lookahead)
    want = states_of(tensors, dict.fromkeys(tensors, target))
    assert got.keys() == want.keys()
    assert all(same_bytes(got[rank][name], want[rank][name]) for rank in want for name in tensors)


@given(shaped_moves(3), limits, windows, st.randoms(use_true_random=False))
def test_reshards_compose(case: tuple[tuple[int, ...], list[Layout]], limit: Limits, window: int, rng: Random) -> None:
    """Law 8: from a to b to c gives what from a to c gives."""
    shape, (a, b, c) = case
    spec = TensorSpec(shape, torch.int64)
    first = states_of({"t": indices(shape)}, {"t": a})

    def reshard(states: dict[int, dict[str, torch.Tensor]], x: Layout, y: Layout) -> dict[int, dict[str, torch.Tensor]]:
        return rehearse(plan_transfers({"t": Move(spec, x, y)}, limits=limit), states, window=window, rng=rng)

    there = reshard(reshard(first, a, b), b, c)
    directly = reshard(first, a, c)
    assert there.keys() == directly.keys()
    assert all(same_bytes(there[rank]["t"], directly[rank]["t"]) for rank in directly)


@given(shaped_moves(), limits)
def test_nothing_travels_twice_or_in_vain(case: tuple[tuple[int, ...], list[Layout]], limit: Limits) -> None:
    """Law 8: exactly what a rank wants and does not hold crosses to it, once, from a rank that holds it."""
    shape, (source, target) = case
    plan = plan_transfers(dict.fromkeys(["a", "b"], Move(TensorSpec(shape, torch.int16), source, target)), limits=limit)
    ranks = sorted({*source.mesh.ranks, *target.mesh.ranks})
    holders = dict(elements(source.holders(shape), shape))
    needs = [
        (name, element, rank)
        for element, wanting in elements(target.holders(shape), shape)
        for rank in wanting
        if rank not in holders[element]
        for name in ("a", "b")
    ]
    seen = crossings(plan, ranks)
    assert sorted((name, element, rank) for name, element, _, rank in seen.elements()) == sorted(needs)
    assert all(sender in holders[element] for _, element, sender, _ in seen)
    received, sent = plan.traffic()
    assert received == {rank: 2 * num for rank, num in Counter([rank for _, _, rank in needs]).items()}
    assert sum(sent.values()) == 2 * len(needs)


@given(shaped_moves(), limits, st.randoms(use_true_random=False))
def test_both_sides_of_a_pair_agree(case: tuple[tuple[int, ...], list[Layout]], limit: Limits, rng: Random) -> None:
    """What one rank sends to another is, message for message, what that one awaits; all messages have one order."""
    shape, (source, target) = case
    plan = plan_transfers(
        {f"t{i}": Move(TensorSpec(shape, torch.int64), source, target) for i in range(4)}, limits=limit
    )
    ranks = sorted({*source.mesh.ranks, *target.mesh.ranks})
    lookahead = rng.choice([None, 0, 100])
    programs = {rank: plan.program(rank, lookahead=lookahead) for rank in ranks}
    messages = {rank: [program[i] for i in range(len(program))] for rank, program in programs.items()}
    for a in ranks:
        for b in ranks:
            sent = [m[2:] for m in messages[a] if m.is_send and m.peer == b]
            awaited = [m[2:] for m in messages[b] if not m.is_send and m.peer == a]
            assert sent == awaited
    for some in messages.values():
        assert all(m.nbytes <= limit.bucket or len(m.items) == 1 for m in some)
        assert all(m.items[0].instance <= later.items[0].instance for m, later in itertools.pairwise(some))


@st.composite
def loose_pieces(
    draw: st.DrawFn, shape: tuple[int, ...]
) -> list[tuple[tuple[tuple[int, ...], tuple[int, ...]], list[int]]]:
    """Boxes that may overlap each other, with ranks."""
    rows = []
    for _ in range(draw(st.integers(0, 5))):
        ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
        box = tuple([a for a, _ in ends]), tuple([b - a for a, b in ends])
        rows.append((box, draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))))
    return rows


@given(st.data(), limits, windows, st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_any_pieces(data: st.DataObject, limit: Limits, window: int, rng: Random) -> None:
    """Pieces that overlap each other and form no grid: every wanted element arrives, none that is held travels."""
    shape = data.draw(shapes(max_ndim=2, max_size=6))
    whole = (tuple([0] * len(shape)), shape)
    sources = Pieces.of(len(shape), [*data.draw(loose_pieces(shape)), (whole, [7])])
    wants = Pieces.of(len(shape), data.draw(loose_pieces(shape)))
    plan = plan_transfers({"t": Move(TensorSpec(shape, torch.int32), sources, wants)}, limits=limit)
    tensor = indices(shape).to(torch.int32)
    blank = torch.full(shape, -1, dtype=torch.int32)
    held = {rank: blank.clone() for rank in range(8)}
    got = {rank: blank.clone() for rank in range(8)}
    want = {rank: blank.clone() for rank in range(8)}
    for pieces, states in ((sources, held), (wants, want)):
        for (starts, sizes), ranks in pieces:
            place = tuple([slice(a, a + n) for a, n in zip(starts, sizes, strict=True)])
            for rank in ranks:
                states[rank][place] = tensor[place]

    def at(states: dict[int, torch.Tensor], rank: int, region: Region) -> torch.Tensor:
        return states[rank][
            tuple([slice(s.start, s.start + n) for s, n in zip(region.spans, region.shape, strict=True)])
        ]

    run_programs(plan, range(8), lambda r, _, x: at(held, r, x), lambda r, _, x: at(got, r, x), window=window, rng=rng)
    assert all(torch.equal(got[rank], want[rank]) for rank in range(8))
    for _, element, sender, rank in crossings(plan, list(range(8))):
        assert held[rank].flatten()[element] < 0 <= held[sender].flatten()[element]


@given(shaped_moves(), st.sampled_from(NUMERIC), st.sampled_from(NUMERIC), windows, st.randoms(use_true_random=False))
def test_casts_are_made_once(
    case: tuple[tuple[int, ...], list[Layout]], dtype: torch.dtype, wanted: torch.dtype, window: int, rng: Random
) -> None:
    """A rank gets what one cast of its shard gives, whichever side of the wire casts."""
    shape, (source, target) = case
    if dtype.is_complex and not wanted.is_complex:
        return
    tensor = numbers(shape, dtype)
    move = Move(TensorSpec(shape, dtype), source, target, wanted)
    got = rehearse(plan_transfers({"t": move}), states_of({"t": tensor}, {"t": source}), window=window, rng=rng)
    want = states_of({"t": tensor.to(wanted)}, {"t": target})
    assert all(same_bytes(got[rank]["t"], want[rank]["t"]) for rank in want)
    assert move.wire.itemsize == min(dtype.itemsize, wanted.itemsize)


@given(meshes())
def test_a_mesh_is_a_bijection(mesh: Mesh) -> None:
    """Coordinates and ranks name each other, in row-major order."""
    assert [mesh.rank_of(coordinate) for coordinate in mesh.coordinates()] == list(mesh.ranks)
    assert [mesh.coordinate_of(rank) for rank in mesh.ranks] == list(mesh.coordinates())
    assert all(mesh.coordinate_of(rank) is None for rank in range(40) if rank not in mesh.ranks)
    assert Mesh.from_json(mesh.to_json()) == mesh == eval(repr(mesh), {"Mesh": Mesh})
