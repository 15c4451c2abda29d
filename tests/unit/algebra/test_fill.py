"""The driver: budget, scratch, depth, faults, and what it hands to an executor."""

from __future__ import annotations

import threading
from random import Random

import pytest
import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.fill import Session
from fdsd.algebra.lazy import Lazy, Op
from fdsd.algebra.memory import MemorySource
from fdsd.algebra.ops import (
    AddScalar,
    Average,
    Call,
    Cast,
    Concat,
    Distinct,
    IndexSelect,
    Origin,
    Permute,
    Same,
    Slice,
    Stack,
)
from fdsd.data.errors import OverBudget, SpecMismatch
from fdsd.data.region import Region, Span
from tests.helpers.checks import spec
from tests.helpers.functions import backwards
from tests.helpers.running import CountingSource, Watcher, floor, run_whole
from tests.helpers.tensors import as_bytes, same_bytes

BIG = torch.arange(1 << 13, dtype=torch.float32)
BUDGET = 1 << 12


def chain(x: Lazy, *ops: Op) -> Lazy:
    for op in ops:
        x = apply(op, x)
    return x


def test_a_structural_chain_takes_no_scratch() -> None:
    x = torch.arange(24).reshape(2, 3, 4)
    node = chain(defer_leaf(x), Permute((2, 0, 1)), Slice(0, 1, 3), Cast(torch.float16))
    node = apply(Stack(1), apply(Concat(0), node, node), apply(Concat(0), node, apply(Distinct("a"), node)))
    ran = run_whole(node)
    assert ran.session.peak == 0 and ran.watcher.peak == 0


CHAINS: dict[str, list[Op]] = {
    "one cast and a half": [Cast(torch.float16), Cast(torch.float32)],
    "casts": [Cast(torch.float64), Cast(torch.float32)] * 8,
    "additions": [AddScalar(1.0)] * 16,
    "casts and additions": [Cast(torch.float64), AddScalar(0.5), Cast(torch.float16), AddScalar(0.5)] * 4,
    "gathers": [IndexSelect(0, tuple((i * 7919) % (1 << 13) for i in range(1 << 13))), Cast(torch.float64)] * 2,
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("budget", [BUDGET, 8 * BUDGET])
def test_scratch_that_is_really_alive_stays_within_the_budget(name: str, budget: int) -> None:
    node = chain(defer_leaf(BIG), *CHAINS[name], Permute((0,)))
    with floor(1):
        ran = run_whole(node, budget=budget)
    assert ran.watcher.peak <= budget
    assert ran.session.peak <= budget
    assert ran.session.in_use == 0 and ran.watcher.alive == 0
    assert same_bytes(ran.results[0], evaluate([node])[0])


@pytest.mark.parametrize("name", CHAINS)
def test_nothing_is_alive_that_is_not_counted(name: str) -> None:
    node = chain(defer_leaf(BIG), *CHAINS[name], Permute((0,)))
    for budget in (None, BUDGET):
        with floor(1):
            ran = run_whole(node, budget=budget)
        assert ran.watcher.peak <= ran.session.peak


def test_averages_within_the_budget() -> None:
    node = defer_leaf(BIG)
    for i in range(10):
        node = apply(Average((0.5, 0.5)), node, defer_leaf(BIG + i))
    with floor(1):
        ran = run_whole(node, budget=BUDGET)
    assert ran.watcher.peak <= ran.session.peak <= BUDGET
    assert same_bytes(ran.results[0], evaluate([node])[0])


def test_the_floor_is_granted_however_little_is_left() -> None:
    node = chain(defer_leaf(BIG), *[AddScalar(1.0)] * 3)
    ran = run_whole(node, budget=1)
    assert ran.session.peak <= 3 * (1 << 16)
    assert ran.watcher.counts["AddScalar"] < 200


def test_kept_results_count_in_the_budget_or_are_not_kept() -> None:
    shared = apply(AddScalar(1.0), defer_leaf(BIG))
    node = apply(Concat(0), apply(Slice(0, 0, 1 << 12), shared), apply(Slice(0, 1 << 12, 1 << 12), shared))
    with floor(1):
        kept = run_whole(node, budget=4 * BIG.nbytes)
        not_kept = run_whole(node, budget=BUDGET)
    assert kept.watcher.counts["elements"] == BIG.numel() and kept.session.peak >= BIG.nbytes
    assert not_kept.session.peak <= BUDGET and not_kept.session.in_use == 0
    assert same_bytes(kept.results[0], BIG + 1) and same_bytes(not_kept.results[0], BIG + 1)


DEEP: dict[str, list[Op]] = {
    "permutations": [Permute((1, 0))],
    "casts": [Cast(torch.float64), Cast(torch.float32)],
    "additions": [AddScalar(1.0)],
    "calls": [Call(backwards, (spec(2, 2),))],
    "gathers and casts": [IndexSelect(0, (1, 0)), Cast(torch.float64), IndexSelect(1, (1, 0)), Cast(torch.float32)],
}


@pytest.mark.parametrize("name", DEEP)
def test_5000_operations_do_not_overflow_the_stack(name: str) -> None:
    x = torch.arange(4.0).reshape(2, 2)
    ops = (DEEP[name] * 5000)[:5000]
    node, want = defer_leaf(x), x
    for op in ops:
        node, want = apply(op, node), apply(op, want)
    for budget in (None, 1 << 20):
        assert same_bytes(evaluate([node], budget=budget)[0], want)


def test_deep_gathers_do_not_overflow_the_stack() -> None:
    index = tuple(Random(1).sample(range(300), 300))
    node, want = defer_leaf(torch.arange(300)), torch.arange(300)
    for i in range(999):
        op = (Cast(torch.int32), IndexSelect(0, index), Cast(torch.int64))[i % 3]
        node, want = apply(op, node), apply(op, want)
    assert IndexSelect(0, index).gathers(Region.whole((300,)))
    assert same_bytes(evaluate([node])[0], want)


def test_memory_of_a_wrong_shape_is_refused() -> None:
    session = Session([defer_leaf(torch.arange(6).reshape(2, 3))])
    with pytest.raises(SpecMismatch, match=r"memory of shape \(3, 2\) does not fit"):
        session.fill(session.roots[0], Region.whole((2, 3)), torch.empty(3, 2, dtype=torch.int64))
    with pytest.raises(SpecMismatch, match=r"\(2, 1\)"):
        session.fill(session.roots[0], Region((Span(0, ((2, 1),)), Span(0))), torch.empty(2, 1, dtype=torch.int64))


@pytest.mark.parametrize("op", [Concat(0), Stack(0), Average((1.0,)), Same(("a",), "r")])
def test_a_region_outside_is_refused(op: Op) -> None:
    node = apply(op, defer_leaf(torch.arange(4.0)))
    session = Session([node])
    region = Region.box((1,) * node.ndim, tuple(node.shape))
    with pytest.raises(SpecMismatch, match="does not lie within the shape"):
        session.fill(session.roots[0], region, torch.empty(region.shape))


class Failing(MemorySource):
    """A source whose third read fails."""

    reads = 0

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        self.reads += 1
        if self.reads == 3:
            raise OSError("the disk is gone")
        super().read(fqn, region, out)


@pytest.mark.parametrize("ops", CHAINS.values(), ids=CHAINS)
def test_a_fault_leaves_nothing_in_use(ops: list[Op]) -> None:
    source = Failing({"x": BIG})
    node = chain(Lazy(Origin(source, "x", source.specs()["x"])), *ops, Permute((0,)))
    node = apply(Concat(0), node, node, node)
    session = Session([node], budget=1 << 16)
    with floor(1), pytest.raises(OSError, match="the disk is gone"):
        session.fill(session.roots[0], Region.whole(node.shape), torch.empty(node.shape))
    session.finish(0)
    assert session.in_use == 0


def test_a_strict_session_raises_at_once_a_lax_one_tells_at_the_end() -> None:
    node = apply(Call(backwards, (spec(100),)), defer_leaf(torch.arange(100.0)))
    with pytest.raises(OverBudget, match="800"):
        run_whole(node, budget=799)
    ran = run_whole(node, budget=799, strict=False)
    assert ran.session.required == 800 and ran.results[0][0] == 99
    assert run_whole(node, budget=800).session.required == 0


def test_fills_may_follow_each_other_within_one_session() -> None:
    source = CountingSource({"x": torch.arange(100.0)})
    node = chain(source.lazy("x"), AddScalar(1.0))
    session = Session([node], executor=Watcher())
    out = torch.empty(100)
    for i in range(0, 100, 25):
        session.fill(session.roots[0], Region.box((i,), (25,)), out[i : i + 25])
    assert same_bytes(out, torch.arange(1.0, 101.0)) and source.elements == 100


@pytest.mark.parametrize("ops", [[Cast(torch.float16), Cast(torch.float64)], [AddScalar(1.0)]], ids=repr)
def test_parts_are_read_in_the_order_of_the_memory(ops: list[Op]) -> None:
    source = CountingSource({"a": torch.arange(1000.0), "b": torch.arange(1000.0)})
    joined = apply(Concat(0), source.lazy("a"), source.lazy("b"))
    with floor(1):
        run_whole(chain(joined, *ops), budget=200)
    starts = [(fqn, region.spans[0].start) for fqn, region in source.reads]
    assert len(starts) > 10 and starts == sorted(starts)


def test_sessions_in_threads_do_not_disturb_each_other() -> None:
    x = torch.arange(10_000.0)
    node = chain(defer_leaf(x), Cast(torch.float64), AddScalar(1.0), Cast(torch.float32))
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.extend(run_whole(node, budget=4096).results)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(same_bytes(y, x + 1) for y in found)


def test_inputs_stay_as_they_were() -> None:
    x = torch.nn.Parameter(torch.arange(24.0).reshape(4, 6))
    before, version = as_bytes(x), x._version
    call = Call(backwards, (spec(6, 4, dtype=torch.float16),))
    node = chain(defer_leaf(x), Permute((1, 0)), AddScalar(1.0), Cast(torch.float16), call)
    for budget in (None, 1 << 20):
        (found,) = run_whole(node, budget=budget).results
        assert not found.requires_grad
    assert torch.equal(as_bytes(x), before) and x._version == version and x.requires_grad


def test_pointwise_scratch_counts_what_the_arithmetic_takes() -> None:
    """An average of bfloat16 works in float32: the halves must be chosen so that its own temporaries fit as well."""
    x = defer_leaf(torch.ones(1 << 20, dtype=torch.bfloat16))
    sizes: list[int] = []

    class Sizes(Watcher):
        def compute(self, op: object, parts: object, region: Region, out: torch.Tensor) -> None:
            sizes.append(region.numel)
            super().compute(op, parts, region, out)  # type: ignore[arg-type]

    node = apply(Permute((0,)), apply(Average((0.5, 0.5)), x, x))
    session = Session([node], budget=1 << 20, executor=Sizes())
    session.fill(session.roots[0], Region.whole((1 << 20,)), torch.empty(1 << 20, dtype=torch.bfloat16))
    # two parts of 2 bytes, and at least three float32 at one time
    assert max(sizes) * (2 * 2 + 3 * 4) <= 1 << 20
