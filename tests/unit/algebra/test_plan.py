"""Plans: what they list, that they cost no data, and the budgets that they name."""

from __future__ import annotations

import pytest
import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.memory import SpecSource
from fdsd.algebra.ops import (
    AddScalar,
    Average,
    Call,
    Cast,
    Concat,
    Constant,
    IndexSelect,
    Item,
    Origin,
    Permute,
    Same,
    Slice,
    Stack,
)
from fdsd.algebra.plan import Copy, Fill, Plan, Read, Run, check_budget, plan_of
from fdsd.data.errors import OverBudget
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from tests.helpers.checks import spec
from tests.helpers.functions import backwards, halves
from tests.helpers.running import CountingSource, floor, replay
from tests.helpers.tensors import same_bytes

X = torch.arange(24.0).reshape(4, 6)


def kinds(plan: Plan) -> list[str]:
    return [type(step).__name__ for step in plan.steps]


def test_a_structural_plan_is_reads_only_and_says_where() -> None:
    source = CountingSource({"x": X, "y": X + 100})
    x, y = source.lazy("x"), source.lazy("y")
    joined = apply(Concat(1), apply(Cast(torch.float16), x), apply(Cast(torch.float16), y))
    plan = plan_of([joined, apply(Permute((1, 0)), x)])
    assert plan.is_reads_only and plan.peak == plan.required == 0
    assert plan.results == (TensorSpec((4, 12), torch.float16), TensorSpec((6, 4), torch.float32))
    assert [(r.origin.fqn, r.region, r.out.buffer, r.out.offset, r.out.shape, r.out.strides) for r in plan.reads] == [
        ("x", Region.whole((4, 6)), 0, 0, (4, 6), (12, 1)),
        ("y", Region.whole((4, 6)), 0, 6, (4, 6), (12, 1)),
        ("x", Region.whole((4, 6)), 1, 0, (4, 6), (1, 4)),
    ]
    assert plan.reads[0].out.dtype == torch.float16
    assert source.reads == []


@pytest.mark.parametrize(
    ("steps", "want"),
    [
        ([], ["Read"]),
        ([Cast(torch.float16)], ["Read"]),
        ([Cast(torch.float16), Cast(torch.float64)], ["Read", "Copy"]),
        ([AddScalar(1.0)], ["Read", "Run"]),
        ([AddScalar(1.0), Cast(torch.float16)], ["Read", "Run", "Copy"]),
        ([Call(backwards, (spec(4, 6),))], ["Read", "Run", "Copy"]),
        ([IndexSelect(0, (3, 1))], ["Read", "Read"]),
    ],
)
def test_steps_in_order(steps: list[Cast], want: list[str]) -> None:
    node = defer_leaf(X)
    for op in steps:
        node = apply(op, node)
    plan = plan_of([node])
    assert kinds(plan) == want
    assert plan.is_reads_only == (set(want) == {"Read"})
    assert same_bytes(replay(plan)[0], evaluate([node])[0])


def test_constants_and_several_results() -> None:
    first, second = apply(Call(halves, (spec(12), spec(12))), defer_leaf(X))
    padded = apply(Concat(0), second, Lazy(Constant(spec(3), 7.0)))
    plan = plan_of([padded, first])
    assert kinds(plan) == ["Read", "Run", "Copy", "Fill", "Copy"]
    run = plan.steps[1]
    assert isinstance(run, Run) and run.region is None and len(run.outs) == 2 and len(run.parts) == 1
    assert isinstance(plan.steps[2], Copy) and isinstance(plan.steps[3], Fill)
    assert [x.tolist() for x in replay(plan)] == [[*range(12, 24), 7, 7, 7], list(range(12))]


def test_a_plan_needs_specs_only() -> None:
    source = SpecSource({"w": TensorSpec((100_000, 100_000), torch.float32)})
    w = Lazy(Origin(source, "w", source.specs()["w"]))
    added = apply(Average((0.5, 0.5)), w, apply(Permute((1, 0)), w))
    plan = plan_of([added, apply(Stack(0), w, w)], budget=1 << 30)
    assert 0 < plan.peak <= 1 << 30 and plan.required == 0
    assert sum(read.region.numel for read in plan.reads) == 4 * 10**10


def test_a_plan_of_nothing() -> None:
    assert plan_of([]) == Plan((), (), 0, 0)
    assert plan_of([defer_leaf(torch.empty(0, 3))]).steps == ()
    check_budget([], 0)
    assert evaluate([]) == []


def test_repr_is_short() -> None:
    assert repr(plan_of([defer_leaf(X)])).startswith("Plan(steps=<1 steps>, results=(TensorSpec((4, 6)")


def test_the_peak_is_that_of_the_budget() -> None:
    node = defer_leaf(torch.ones(1000))
    for dtype in (torch.float16, torch.float64, torch.float32):
        node = apply(Cast(dtype), node)
    assert plan_of([node]).peak == 8000 + 2000
    with floor(1):
        tight = plan_of([node], budget=1000)
    assert tight.peak <= 1000 and len(tight.steps) > 20


def test_check_budget_is_free_without_whole_operations() -> None:
    source = SpecSource({"w": TensorSpec((10**6, 10**6), torch.float32)})
    w = Lazy(Origin(source, "w", source.specs()["w"]))
    check_budget([apply(Same(("a", "b"), "r"), apply(Cast(torch.float64), w), apply(Cast(torch.float64), w))], 10)
    check_budget([apply(Call(backwards, (w.spec,)), w)], None)


@pytest.mark.parametrize("budget", [0, 1, 100, 191])
def test_over_the_budget(budget: int) -> None:
    node = apply(Slice(0, 0, 1), apply(Call(backwards, (spec(4, 6),)), defer_leaf(X)))
    assert plan_of([node], budget).required == 192
    with pytest.raises(OverBudget, match=rf"backwards.*192 bytes.*is {budget} bytes.*at least 192\."):
        check_budget([node], budget)
    check_budget([node], 192)


def test_the_named_budget_counts_all_that_is_kept_beside() -> None:
    """One call's result is kept while the next runs; a smaller budget keeps less of what need not be kept."""
    x = defer_leaf(torch.arange(1000.0))
    shared = apply(AddScalar(1.0), x)
    both = apply(Concat(0), shared, apply(Slice(0, 0, 1000), shared))
    one = apply(Call(backwards, (spec(2000),)), both)
    two = apply(Call(torch.neg, (spec(1000),)), apply(Slice(0, 0, 1000), apply(AddScalar(2.0), one)))
    roots = [both, two, one]
    for budget in (1, 5000, 20_000, 25_000):
        with floor(1):
            try:
                check_budget(roots, budget)
            except OverBudget as error:
                enough = int(str(error).split("at least ")[1].rstrip("."))
                assert budget < enough <= 40_000
                check_budget(roots, enough)


def test_several_calls_are_told_as_a_step() -> None:
    x = defer_leaf(X)
    node = apply(Call(backwards, (spec(4, 6),)), apply(Call(torch.neg, (spec(4, 6),)), x))
    with pytest.raises(OverBudget, match="needs its whole input"):
        check_budget([node], 10)


def test_items_are_planned_with_their_call() -> None:
    first, _ = apply(Call(halves, (spec(12), spec(12))), defer_leaf(X))
    assert isinstance(first.op, Item)
    with pytest.raises(OverBudget, match="192"):
        check_budget([first], 100)


def test_reads_are_the_reads_of_a_run() -> None:
    source = CountingSource({"x": X})
    node = apply(Concat(0), apply(AddScalar(1.0), source.lazy("x")), apply(IndexSelect(0, (2, 0)), source.lazy("x")))
    plan = plan_of([node])
    evaluate([node])
    assert [(read.origin.fqn, read.region) for read in plan.reads] == source.reads
    assert all(isinstance(read, Read) for read in plan.reads)
