"""Laws 2, 3 and 10 on expressions: evaluating what was built lazily equals running eagerly; the abstract result has
the spec of the real one; and no input changes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from fdsd.algebra.apply import apply, defer
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.ops import Call, Constant, Item, Origin
from fdsd.algebra.plan import plan_of
from fdsd.data.errors import OverBudget
from fdsd.data.spec import TensorSpec, spec_of
from tests.helpers.chains import grow
from tests.helpers.running import floor, replay, run_whole
from tests.helpers.tensors import same_bytes

CHAINS = 1200


def test_lazy_equals_eager() -> None:
    """Law 2."""
    for n in range(CHAINS):
        chain = grow(("lazy", n), values="patterns" if n % 3 == 0 else "numbers")
        results = evaluate([x.lazy for x in chain.pool])
        for x, result in zip(chain.pool, results, strict=True):
            assert same_bytes(result, x.eager), f"{chain}\n{x.lazy}"
            assert not result.requires_grad
        assert not chain.inputs_changed(), str(chain)


def test_abstract_equals_the_spec_of_the_real() -> None:
    """Law 3: the spec that ``infer`` gives is that of the eager result, at every node."""
    for n in range(CHAINS // 2):
        chain = grow(("abstract", n))
        made: dict[int, Any] = {}
        for x in chain.pool:
            node = x.lazy
            if isinstance(node.op, Item):
                (owner,) = node.inputs
                given = [made[id(y)] for y in owner.inputs]
                made[id(node)] = apply(owner.op, *given)[node.op.index]
            elif isinstance(node.op, Origin | Constant):
                made[id(node)] = TensorSpec(tuple(x.eager.shape), x.eager.dtype)
            else:
                made[id(node)] = apply(node.op, *[made[id(y)] for y in node.inputs])
            assert made[id(node)] == spec_of(x.eager) == node.spec, f"{chain}\n{node}"


def test_eager_results_are_detached() -> None:
    """Law 10: nothing records a graph for gradients, and parameters stay as they were."""
    for n in range(200):
        chain = grow(("detached", n))
        assert not any(x.eager.requires_grad for x in chain.pool[len(chain.sources) :]), str(chain)
        assert not chain.inputs_changed(), str(chain)


def test_any_budget_gives_the_same_bytes_and_ends_with_nothing_in_use() -> None:
    for n in range(CHAINS // 2):
        chain = grow(("budget", n), calls=False)
        rng = Random(n)
        with floor(rng.choice((1, 64))):
            ran = run_whole(*[x.lazy for x in chain.pool], budget=rng.choice((1, 64, 1024, 8192)))
        assert ran.session.in_use == 0, str(chain)
        for x, result in zip(chain.pool, ran.results, strict=True):
            assert same_bytes(result, x.eager), str(chain)


def test_the_budget_that_an_error_names_is_enough() -> None:
    refused = 0
    for n in range(300):
        chain = grow(("enough", n))
        roots = [x.lazy for x in chain.pool]
        if not any(isinstance(x.lazy.op, Item | Call) for x in chain.pool):
            continue
        with floor(1):
            try:
                evaluate(roots, budget=10)
            except OverBudget as error:
                enough = int(str(error).split("at least ")[1].rstrip("."))
                refused += 1
                results = evaluate(roots, budget=enough)
                for x, result in zip(chain.pool, results, strict=True):
                    assert same_bytes(result, x.eager), str(chain)
    assert refused > 50


@pytest.mark.parametrize("budget", [None, 500])
def test_the_plan_is_what_happens(budget: int | None) -> None:
    """A plan replayed without the expressions gives the same bytes, and its peak is the peak of the run."""
    for n in range(CHAINS // 4):
        chain = grow(("plan", n))
        roots = [x.lazy for x in chain.pool]
        with floor(16):
            plan = plan_of(roots, budget)
            ran = run_whole(*roots, budget=budget, strict=False)
        assert plan.peak == ran.session.peak, str(chain)
        for x, result in zip(chain.pool, replay(plan), strict=True):
            assert same_bytes(result, x.eager), f"{chain}\n{x.lazy}"


def test_defer_keeps_names_order_ties_and_other_objects() -> None:
    w = torch.arange(6.0).reshape(2, 3)
    marker = object()
    state = {"b": w, "extra": marker, "a": torch.nn.Parameter(w), "t": w.t(), "none": None}
    lazy = defer(state)
    assert list(lazy) == ["b", "extra", "a", "t", "none"]
    assert lazy["extra"] is marker and lazy["none"] is None
    assert lazy["a"] is lazy["b"] and lazy["t"] is not lazy["b"]
    for name in ("b", "a", "t"):
        assert same_bytes(evaluate([lazy[name]])[0], state[name].detach())  # type: ignore[attr-defined]
