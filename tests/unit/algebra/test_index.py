"""Selecting by index: against plain torch, by runs and through a covering scratch, and its refusals."""

from __future__ import annotations

from random import Random

import pytest
import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.fill import Session
from fdsd.algebra.ops import Cast, IndexSelect, Select
from fdsd.algebra.ops.index import MAX_RUNS
from fdsd.algebra.plan import plan_of
from fdsd.data.errors import SpecMismatch
from fdsd.data.region import Region, Span
from tests.helpers.checks import agree, spec
from tests.helpers.regions import random_region, slice_by
from tests.helpers.running import CountingSource, floor, run, run_whole
from tests.helpers.tensors import LAYOUTS, MOVABLE, carried, has_layout, lay_out, name_of, patterns, same_bytes, slots

SHUFFLED = tuple(Random(3).sample(range(200), 200))


@pytest.mark.parametrize(
    "index",
    [(), (0,), (4, 0, 2), (0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (1, 1, 1), (0, 2, 4), (0, 0, 2, 4, 1)],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_against_torch(index: tuple[int, ...], dim: int) -> None:
    x = torch.arange(25).reshape(5, 5)
    want = x.index_select(dim, torch.tensor(index, dtype=torch.int64))
    assert same_bytes(agree(IndexSelect(dim, index), x), want)
    assert same_bytes(agree(IndexSelect(dim, index), lay_out(x, "transposed")), want)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", MOVABLE, ids=name_of)
def test_every_dtype(dtype: torch.dtype, kind: str) -> None:
    if not has_layout(kind, (200, 2), dtype):
        return
    x = lay_out(patterns((200, 2), dtype), kind)
    for index in ((3, 1, 2), SHUFFLED):  # by runs, and gathered
        want = slots(carried(x).index_select(0, torch.tensor(index)), dtype)
        assert same_bytes(agree(IndexSelect(0, index), x), want)


def test_even_runs_are_read_at_once() -> None:
    index = (*range(50), *range(100, 200, 2), 7, 5)
    plan = plan_of([apply(IndexSelect(0, index), defer_leaf(torch.empty(200, 3)))])
    assert [read.region.spans[0] for read in plan.reads] == [
        Span(0, ((50, 1),)),
        Span(100, ((50, 2),)),
        Span(7, ((1, 1),)),
        Span(5, ((1, 1),)),
    ]
    assert plan.is_reads_only


def test_more_runs_than_64_gather_once() -> None:
    x = torch.arange(400).reshape(200, 2)
    source = CountingSource({"x": x})
    ran = run_whole(apply(IndexSelect(0, SHUFFLED), source.lazy("x")))
    assert same_bytes(ran.results[0], x[list(SHUFFLED)])
    assert ran.watcher.counts["gather"] == 1
    assert source.reads == [("x", Region.whole((200, 2)))]
    assert ran.session.in_use == 0 and ran.session.peak == x.nbytes


@pytest.mark.parametrize(("runs", "gathered"), [(MAX_RUNS, 0), (MAX_RUNS + 1, 1)])
def test_exactly_64_runs_are_still_read_one_by_one(runs: int, gathered: int) -> None:
    source = CountingSource({"x": torch.arange(runs)})
    ran = run_whole(apply(IndexSelect(0, tuple(reversed(range(runs)))), source.lazy("x")))
    assert ran.watcher.counts["gather"] == gathered
    assert len(source.reads) == (1 if gathered else runs)
    assert ran.results[0].tolist() == list(reversed(range(runs)))


def test_what_lies_too_far_apart_is_not_covered() -> None:
    """100 of 100,000 rows: reading all between them would be a thousand times the bytes."""
    index = tuple(i * 1000 + (i * 7) % 5 for i in range(100))
    source = CountingSource({"x": torch.arange(100_000)})
    ran = run_whole(apply(IndexSelect(0, index), source.lazy("x")))
    assert ran.results[0].tolist() == list(index)
    assert source.elements == 100 and ran.watcher.counts["gather"] == 0


def test_a_gather_over_the_budget_reads_run_by_run() -> None:
    source = CountingSource({"x": torch.arange(200)})
    with floor(1):
        ran = run_whole(apply(IndexSelect(0, SHUFFLED), source.lazy("x")), budget=100)
    assert ran.results[0].tolist() == list(SHUFFLED)
    assert ran.watcher.counts["gather"] == 0 and ran.session.peak == 0


def test_a_region_reads_only_what_covers_it() -> None:
    index = (*Random(1).sample(range(300), 300), *Random(2).sample(range(300, 600), 300))
    x = torch.arange(600)
    source = CountingSource({"x": x})
    (found,) = run([(apply(IndexSelect(0, index), source.lazy("x")), Region.box((0,), (300,)))]).results
    assert found.tolist() == list(index[:300])
    assert source.reads == [("x", Region.box((0,), (300,)))]


def test_gathered_regions_into_another_dtype() -> None:
    x = torch.linspace(0, 1, 200, dtype=torch.float64)
    node = apply(IndexSelect(0, SHUFFLED), apply(Cast(torch.float16), defer_leaf(x)))
    session = Session([node])
    out = torch.empty(200, dtype=torch.float32)
    session.fill(session.roots[0], Region.whole((200,)), out)
    assert same_bytes(out, x.half()[list(SHUFFLED)].float())


def test_regions_of_several_pairs() -> None:
    x = torch.arange(300).reshape(100, 3)
    index = tuple(Random(5).choices(range(100), k=150))
    want, node = x[list(index)], apply(IndexSelect(0, index), defer_leaf(x))
    session = Session([node])
    for seed in range(100):
        region = random_region(Random(seed), (150, 3))
        out = torch.empty(region.shape, dtype=torch.int64)
        session.fill(session.roots[0], region, out)
        assert same_bytes(out, slice_by(want, region)), region


@pytest.mark.parametrize("length", [1, 3])
def test_a_step_of_zero(length: int) -> None:
    node = apply(IndexSelect(0, (2, 0, 1)), defer_leaf(torch.arange(10, 13)))
    session = Session([node])
    out = torch.empty(length, dtype=torch.int64)
    session.fill(session.roots[0], Region((Span(1, ((length, 0),)),)), out)
    assert out.tolist() == [10] * length


def test_a_selected_index_of_a_gather() -> None:
    x = torch.arange(200)
    node = apply(Select(0, 5), apply(IndexSelect(0, SHUFFLED), defer_leaf(x)))
    assert evaluate([node])[0].item() == SHUFFLED[5]


@pytest.mark.parametrize(
    ("op", "given", "told"),
    [
        (IndexSelect(2, (0,)), spec(2, 3), r"no dim 2 in shape \(2, 3\)"),
        (IndexSelect(-1, (0,)), spec(2, 3), "no dim -1"),
        (IndexSelect(0, ()), spec(), "no dim 0"),
        (IndexSelect(1, (0, 3, 7, 3)), spec(2, 3), r"dim 1 of shape \(2, 3\) has no index 3, 7"),
        (IndexSelect(1, (-1,)), spec(2, 3), "no index -1"),
        (IndexSelect(0, tuple(range(50))), spec(20), "and 20 more"),
        (IndexSelect(0, (0,)), spec(0, 3), "no index 0"),
    ],
)
def test_refusals_name_shape_and_indices(op: IndexSelect, given: object, told: str) -> None:
    with pytest.raises(SpecMismatch, match=told):
        apply(op, given)


def test_repr_is_short() -> None:
    assert repr(IndexSelect(0, SHUFFLED)) == "IndexSelect(dim=0, index=<200 indices>)"
