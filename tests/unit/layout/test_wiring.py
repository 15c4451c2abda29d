"""Regions cut along pieces, expressions as values, and the plans of expressions: what travels, once, and from whom."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from random import Random

import pytest
import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.ops import AddScalar, Cast, Concat, IndexSelect, Permute, Slice
from fdsd.data.errors import SpecMismatch, Unsupported
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.layout import Layout, Mesh, Pieces, Replicate, Shard
from fdsd.layout.cutting import Cutter, Spot, cells
from fdsd.layout.expression import Expression, expression_of
from fdsd.layout.pieces import Box
from fdsd.layout.structure import Limits
from fdsd.layout.wants import blocks_of, local_shape_of, wants_of
from fdsd.layout.wiring import plan_wiring
from tests.helpers.chains import grow
from tests.helpers.regions import random_region, slice_by

F32 = torch.float32


def boxes(rng: Random, shape: tuple[int, ...], *, is_grid: bool) -> list[Box]:
    """Boxes within a shape: a grid with holes, or any."""
    if is_grid:
        cuts = [sorted({0, size, *[rng.randint(0, size) for _ in range(2)]}) for size in shape]
        corners = itertools.product(*[list(itertools.pairwise(some)) for some in cuts])
        made = [(tuple([a for a, _ in some]), tuple([b - a for a, b in some])) for some in corners]
        return [box for box in made if rng.random() < 0.8]
    ends = [[sorted([rng.randint(0, size), rng.randint(0, size)]) for size in shape] for _ in range(4)]
    return [(tuple([a for a, _ in some]), tuple([b - a for a, b in some])) for some in ends]


def place(box: Box) -> tuple[slice, ...]:
    return tuple([slice(at, at + size) for at, size in zip(*box, strict=True)])


def test_cells_hold_what_the_pieces_hold() -> None:
    """Every element keeps all of its holders, and no two cells share one."""
    rng = Random(1)
    for n in range(300):
        shape = tuple([rng.randint(1, 6) for _ in range(rng.randint(0, 3))])
        rows = [(box, [rng.randrange(4), rng.randrange(4)]) for box in boxes(rng, shape, is_grid=n % 3 == 0)]
        pieces = Pieces.of(len(shape), rows)
        before, after = ([torch.zeros(shape, dtype=torch.int64) for _ in range(4)] for _ in range(2))
        times = torch.zeros(shape, dtype=torch.int64)
        for box, ranks in pieces:
            for rank in ranks:
                before[rank][place(box)] = 1
        for box, ranks in cells(pieces):
            times[place(box)] += 1
            for rank in ranks:
                after[rank][place(box)] = 1
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        assert not times.numel() or int(times.max()) <= 1


def test_a_region_is_cut_along_pieces() -> None:
    """All parts together are the region; each lies within its piece, and its spot is its place in the memory."""
    rng = Random(2)
    cut = 0
    for n in range(1000):
        shape = tuple([rng.randint(1, 8) for _ in range(rng.randint(0, 3))])
        pieces = cells(Pieces.of(len(shape), [(box, [0]) for box in boxes(rng, shape, is_grid=n % 2 == 0)]))
        region = random_region(rng, shape)
        if not region.numel:
            continue
        tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
        covered = torch.zeros(shape, dtype=torch.int64)
        for box, _ in pieces:
            covered[place(box)] = 1
        want = slice_by(tensor, region)
        got = torch.full_like(want, -1)
        spot = Spot(0, torch.int64, 0, tuple(want.shape), want.stride())
        missing = 0
        for piece, part, where in Cutter(pieces).cut(region, spot):
            if piece is None:
                missing += part.numel
                continue
            starts, sizes = pieces.box(piece)
            for span, start, size in zip(part.spans, starts, sizes, strict=True):
                assert start <= span.start and span.start + span.extent < start + size
            view = got.as_strided(where.shape, where.strides, where.offset)
            assert bool((view == -1).all())
            view.copy_(slice_by(tensor, part))
            cut += 1
        assert missing == int((slice_by(covered, region) == 0).sum()) == int((got == -1).sum())
        assert torch.equal(got[got >= 0], want[got >= 0])
    assert cut > 1000


def test_expressions_are_values_that_build_again() -> None:
    """The same graph over other tensors is the same expression, and it survives pickling."""
    seen: dict[Expression, int] = {}
    for n in range(200):
        chain, again = (grow(("expression", n)) for _ in range(2))
        for x, y in zip(chain.pool, again.pool, strict=True):
            first, origins = expression_of(x.lazy)
            if all(type(step.op).__name__ != "Call" for step in first.steps):
                assert expression_of(y.lazy)[0] == first
            assert first.spec == x.lazy.spec
            assert [origin.spec for origin in origins] == list(first.origins)
            copy = pickle.loads(pickle.dumps(first))
            assert copy == first and hash(copy) == hash(first)
            built = first.build()
            assert expression_of(built)[0] == first
            seen[first] = n
    assert len(seen) > 200


def test_what_is_read_twice_is_one_source() -> None:
    x, y = defer_leaf(torch.ones(2)), defer_leaf(torch.ones(2))
    both = {apply(Concat(0), *pair): num for pair, num in (((x, x), 1), ((x, y), 2))}
    assert [len(expression_of(node)[1]) for node in both] == list(both.values())
    twice = apply(Concat(0), apply(Slice(0, 0, 1), x), apply(Slice(0, 0, 1), x))
    assert len(expression_of(twice)[0].steps) == 3
    assert expression_of(apply(AddScalar(0.0), x))[0] != expression_of(apply(AddScalar(-0.0), x))[0]
    assert not expression_of(apply(AddScalar(1.0), x))[0].is_structural
    assert expression_of(apply(Cast(torch.int8), x))[0].is_structural


def test_each_rank_reads_its_share_only() -> None:
    """A permutation of rows over ranks: every element comes once to each rank that wants it, from one that has it."""
    index = tuple(Random(3).sample(range(12), 12))
    node = apply(Permute((1, 0)), apply(IndexSelect(0, index), defer_leaf(torch.zeros(12, 5))))
    expression, _ = expression_of(node)
    rows, columns = Layout(Mesh({"a": 3}), [Shard(0)]), Layout(Mesh({"b": 4}), [Shard(1)])
    wants = wants_of((5, 12), F32, [(columns, range(4))])
    plan = plan_wiring(expression, [rows.holders((12, 5))], wants, limits=Limits(0, 64))
    got: Counter[tuple[int, int]] = Counter()
    tensor = torch.arange(60).reshape(12, 5)
    for kept, assigned in ((True, plan.keeps), (False, plan.receives)):
        for rank, overlaps in assigned.items():
            for overlap in overlaps:
                holders = plan.holders[plan.piece[overlap]]
                assert (rank in holders) == kept
                assert sum(plan.part_sizes(overlap)) == plan.nbytes(overlap)
                for element in slice_by(tensor, plan.regions[overlap]).flatten().tolist():
                    assert element // 20 in holders
                    got[rank, element] += 1
    whole = tensor[list(index)].t()
    want = Counter([(rank, e) for rank in range(4) for e in whole[:, 3 * rank : 3 * rank + 3].flatten().tolist()])
    assert got == want
    assert plan.load == 60


def test_elements_that_nobody_holds() -> None:
    half = Pieces.of(1, [(((0,), (3,)), [0])])
    wants = wants_of((6,), F32, [(None, [0, 1])])
    with pytest.raises(SpecMismatch, match="no rank of the group holds 3 elements of it that ranks 0, 1 need"):
        plan_wiring(Expression.of(TensorSpec((6,), F32)), [half], wants)


def test_wants_in_all_their_forms() -> None:
    shape = (4, 2)
    layout = Layout(Mesh({"dp": 2, "tp": 2}), [Shard(0), Replicate()])
    pieces = Pieces.of(2, [(((1, 0), (2, 2)), [1])])
    assert [(w.shape, w.ranks) for w in wants_of(shape, F32, [(layout, range(5))])] == [
        ((2, 2), (0, 1)),
        ((2, 2), (2, 3)),
    ]
    assert [(w.shape, w.ranks) for w in wants_of(shape, F32, [(pieces, range(5))])] == [((2, 2), (1,))]
    assert [(w.shape, w.ranks) for w in wants_of(shape, F32, [(None, (3, 1)), (pieces, [0])])] == [((4, 2), (1, 3))]
    assert local_shape_of(layout, shape, 9) is None and blocks_of(pieces, shape, 0) == ()
    empty = Layout(Mesh({"dp": 8}), [Shard(0)])
    assert [(w.shape, w.blocks) for w in wants_of(shape, F32, [(empty, [7])])] == [((0, 2), ())]
    with pytest.raises(Unsupported, match="rank 0 has 2 boxes"):
        blocks_of(Pieces.of(1, [(((0,), (1,)), [0]), (((2,), (1,)), [0])]), (4,), 0)
    with pytest.raises(SpecMismatch, match="pieces of 1 dims"):
        local_shape_of(Pieces.whole((4,), [0]), shape, 0)


def test_regions_of_the_whole() -> None:
    """What lies in one piece is not cut, whatever its steps."""
    region = Region.whole((3, 4))
    spot = Spot(0, F32, 0, (3, 4), (4, 1))
    assert list(Cutter(Pieces.whole((3, 4), [0])).cut(region, spot)) == [(0, region, spot)]
