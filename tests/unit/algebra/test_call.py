"""Users' functions: run once, on data of their own, and checked for what they give and what they write to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import define

from fdsd.algebra.apply import Applier, apply, defer_leaf
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.fill import Session
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import Call, Cast, Concat, Item, Permute, Slice
from fdsd.data.errors import OverBudget, SpecMismatch, Unsupported
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from tests.helpers.checks import agree, spec
from tests.helpers.functions import FUNCTIONS, backwards, call_of, halves, itself, spread, turned
from tests.helpers.running import CountingSource, Watcher, run, run_whole
from tests.helpers.tensors import (
    LAYOUTS,
    MOVABLE,
    has_layout,
    lay_out,
    name_of,
    patterns,
    plain,
    same_bytes,
)

X = torch.arange(12.0).reshape(3, 4)


def several(lazy: Any) -> list[Lazy]:
    return list(lazy) if isinstance(lazy, tuple) else [lazy]


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_all_kinds_of_results(fn: Callable[..., object], kind: str) -> None:
    for dtype in (torch.float32, torch.complex64, torch.uint16):
        if has_layout(kind, (3, 4), dtype):
            x = lay_out(patterns((3, 4), dtype), kind)
            made = agree(call_of(fn, x), x)
            want = fn(plain(x).contiguous())
            for a, b in zip(several(made), several(want), strict=True):
                assert same_bytes(a, b)


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("dtype", MOVABLE, ids=name_of)
def test_every_dtype_goes_in_and_out(dtype: torch.dtype, kind: str) -> None:
    x = lay_out(patterns((3, 4), dtype), kind)
    for fn in (itself, halves, turned, spread):
        agree(call_of(fn, x), x)


@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_functions_see_no_conjugate_or_negative_bits(kind: str) -> None:
    """``view_as_real`` is one of many that fail on them."""
    fn = torch.view_as_real if kind == "conjugate" else as_bytes_of_memory
    x = lay_out(patterns((3, 4), torch.complex64 if kind == "conjugate" else torch.float32), kind)
    agree(call_of(fn, x), x)


def as_bytes_of_memory(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def test_64_regions_read_the_input_once_and_call_once() -> None:
    source = CountingSource({"x": torch.arange(64.0)})
    node = apply(Call(backwards, (spec(64),)), source.lazy("x"))
    ran = run([(node, Region.box((i,), (1,))) for i in range(64)])
    assert [int(x) for x in ran.results] == list(range(63, -1, -1))
    assert source.reads == [("x", Region.whole((64,)))]
    assert ran.watcher.counts["Call"] == 1 and ran.session.in_use == 0


def test_all_results_of_one_call_are_computed_once() -> None:
    source = CountingSource({"x": X})
    first, second = apply(Call(halves, (spec(6), spec(6))), source.lazy("x"))
    assert isinstance(first.op, Item)
    ran = run_whole(second, first, apply(Concat(0), first, second))
    assert [x.tolist() for x in ran.results] == [list(range(6, 12)), list(range(6)), list(range(12))]
    assert len(source.reads) == ran.watcher.counts["Call"] == 1


def test_equal_calls_are_one_call() -> None:
    source = CountingSource({"x": X})
    nodes = [apply(call_of(backwards, X), source.lazy("x")) for _ in range(3)]
    ran = run_whole(*nodes)
    assert ran.watcher.counts["Call"] == 1 == len(source.reads)
    other = run_whole(nodes[0], apply(call_of(itself, X), source.lazy("x")))
    assert other.watcher.counts["Call"] == 2


def test_a_kept_result_goes_after_its_last_root_and_counts_until_then() -> None:
    x = torch.arange(1000.0)
    kept = apply(Call(backwards, (spec(1000),)), defer_leaf(x))
    roots = [kept, apply(Slice(0, 0, 10), kept), defer_leaf(x), apply(Slice(0, 5, 5), defer_leaf(x))]
    session = Session(roots)
    in_use = []
    for position, root in enumerate(session.roots):
        session.fill(root, Region.whole(root.shape), torch.empty(root.shape))
        session.finish(position)
        in_use.append(session.in_use)
    assert in_use == [4000, 0, 0, 0]
    assert session.peak == 8000


def test_scratch_of_a_kept_view_is_not_kept_alive() -> None:
    """A small view of the input, or of a large tensor of the function's own, is copied."""
    x = torch.arange(100_000.0)
    for fn in (lambda t: t[:3], lambda t: (t * 2)[:3], lambda t: (t * 2)[3:6]):
        ran = run_whole(apply(Call(fn, (spec(3),)), defer_leaf(x)), defer_leaf(x))
        node = apply(Call(fn, (spec(3),)), defer_leaf(x))
        watcher = Watcher()
        session = Session([node, node], executor=watcher)
        session.fill(session.roots[0], Region.whole((3,)), torch.empty(3))
        gc.collect()
        assert session.in_use == 12 and watcher.alive <= 16, fn
        assert ran.session.in_use == 0


def test_over_the_budget_raises_before_reading_and_names_what_is_enough() -> None:
    source = CountingSource({"x": torch.arange(1000.0)})
    node = apply(Permute((0,)), apply(Call(backwards, (spec(1000),)), source.lazy("x")))
    with pytest.raises(OverBudget, match=r"backwards.*8,000 bytes.*budget is 7,999 bytes.*at least 8000"):
        evaluate([node], budget=7999)
    assert source.reads == []
    assert evaluate([node], budget=8000)[0][0] == 999


def test_the_budget_that_is_named_is_enough_with_scratch_above_the_call() -> None:
    """Scratch for casts takes its share of any budget; the figure must allow for that."""
    source = CountingSource({"x": torch.arange(100_000.0)})
    node = apply(Call(backwards, (spec(100_000),)), source.lazy("x"))
    for dtype in (torch.float64, torch.bfloat16, torch.float32, torch.float16):
        node = apply(Cast(dtype), node)
    with pytest.raises(OverBudget) as caught:
        evaluate([node], budget=1000)
    enough = int(str(caught.value).split("at least ")[1].rstrip("."))
    assert source.reads == []
    evaluate([node], budget=enough)
    assert enough < 800_000 * 3


def test_a_result_that_is_not_as_its_spec_says_is_told() -> None:
    wrong = Call(torch.neg, (spec(4, 3),))
    for run_it in (lambda: apply(wrong, X), lambda: evaluate([apply(wrong, defer_leaf(X))])):
        with pytest.raises(SpecMismatch, match=r"gave float32\[3, 4\].*says float32\[4, 3\].*spec="):
            run_it()
    with pytest.raises(SpecMismatch, match="gave"):
        apply(Call(halves, (spec(6),)), X)


@pytest.mark.parametrize("result", [None, 3, "text", [torch.ones(1)], (torch.ones(1), 2), {"a": torch.ones(1)}])
def test_a_result_that_is_no_tensor_is_told(result: object) -> None:
    for run_it in (
        lambda: apply(Call(lambda x: result, (spec(1),)), X),
        lambda: evaluate([apply(Call(lambda x: result, (spec(1),)), defer_leaf(X))]),
    ):
        with pytest.raises(SpecMismatch, match=r"returned (NoneType|int|str|list|dict)"):
            run_it()


class Odd(torch.Tensor):
    pass


def test_a_result_of_a_subclass_is_told() -> None:
    with pytest.raises(SpecMismatch, match="Odd"):
        apply(Call(lambda x: x.as_subclass(Odd), (spec(3, 4),)), X)


def test_functions_may_write_to_what_they_are_given() -> None:
    """It is a copy of their own, also when they write past torch's version counter."""

    def increased(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    def increased_by_numpy(x: torch.Tensor) -> torch.Tensor:
        view = x.numpy()
        view += 1
        return x

    x = X.clone()
    for fn in (increased, increased_by_numpy):
        assert same_bytes(agree(Call(fn, (spec(3, 4),)), x), X + 1)
    assert same_bytes(x, X) and x._version == 0


def test_functions_never_run_on_meta_when_their_spec_is_given() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        assert not x.is_meta
        return x * 2

    meta = torch.empty(3, 4, device="meta")
    made = apply(Call(picky, (spec(3, 4),)), meta)
    assert made.is_meta and made.shape == (3, 4)
    assert apply(Call(picky, (spec(3, 4),)), spec(3, 4)) == spec(3, 4)
    one, two = apply(Call(picky, (spec(2), spec(3))), meta)
    assert (one.shape, two.shape) == ((2,), (3,))


def test_without_a_spec_the_function_is_evaluated_abstractly_once() -> None:
    seen: list[bool] = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.is_meta)
        return torch.cat([x, x])

    run_op, op = Applier(), Call(doubled)
    assert run_op(op, spec(3, 4)) == spec(6, 4) == run_op(op, spec(3, 4))
    lazy = run_op(op, defer_leaf(X))
    assert lazy.spec == spec(6, 4) == run_op(op, defer_leaf(X + 1)).spec
    assert seen == [True]
    assert same_bytes(evaluate([lazy])[0], torch.cat([X, X]))
    assert seen == [True, False]


def test_a_function_of_values_asks_for_its_spec() -> None:
    op = Call(lambda x: x[x > 3])
    with pytest.raises(SpecMismatch, match=r"float32\[3, 4\] is not known before it runs.*spec="):
        apply(op, spec(3, 4))
    with pytest.raises(SpecMismatch, match="spec="):
        apply(op, defer_leaf(X))
    assert apply(op, X).tolist() == list(range(4, 12))


@define
class Scaled:
    """A callable object that compares by value, so that it has no hash."""

    factor: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_callable_objects_without_a_hash() -> None:
    with pytest.raises(TypeError):
        hash(Scaled(2.0))
    assert same_bytes(agree(Call(Scaled(2.0), (spec(3, 4),)), X), X * 2)
    assert same_bytes(agree(Call(Scaled(3.0)), X), X * 3)


def test_functions_may_run_in_inference_mode_and_on_inference_tensors() -> None:
    with torch.inference_mode():
        made = X + 1
        (found,) = evaluate([apply(call_of(backwards, X), defer_leaf(X))])
        assert same_bytes(found, backwards(X))
        assert same_bytes(apply(call_of(backwards, made), made), backwards(made))
    assert same_bytes(apply(call_of(backwards, made), made), backwards(made))


def test_results_carry_no_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))

    def scaled(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return x * weight

    assert not agree(Call(scaled, (spec(3, 4),)), X).requires_grad
    assert not run_whole(apply(Call(scaled, (spec(3, 4),)), defer_leaf(X))).results[0].requires_grad
    multiplied = Call(lambda x: x * weight, (spec(3, 4),))
    assert not run_whole(apply(multiplied, defer_leaf(X))).results[0].requires_grad


def test_an_error_of_the_users_function_comes_through_and_leaves_nothing_in_use() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    node = apply(Call(broken, (spec(3, 4),)), defer_leaf(X))
    session = Session([node])
    with pytest.raises(KeyError, match="mine"):
        session.fill(session.roots[0], Region.whole((3, 4)), torch.empty(3, 4))
    assert session.in_use == 0


def test_functions_are_not_held_for_ever() -> None:
    """A closure may hold a large tensor."""
    held = Scaled(2.0)

    def closure(x: torch.Tensor) -> torch.Tensor:
        return held(x)

    apply(Call(closure), spec(2))
    gone = weakref.ref(closure)
    del closure
    gc.collect()
    assert gone() is None


def test_items_alone_are_no_operations() -> None:
    with pytest.raises(SpecMismatch, match="Item"):
        apply(Item(0), X)


def test_an_undivided_call_refuses_to_be_one_tensor() -> None:
    node = Lazy(Call(halves, (spec(6), spec(6))), [defer_leaf(X)])
    with pytest.raises(Unsupported, match=r"2 tensors.*Item"):
        node.spec  # noqa: B018


def test_specs_are_checked_for_zero_sized_results_too() -> None:
    x = torch.ones(0, 3)
    assert agree(Call(backwards, (TensorSpec((0, 3), torch.float32),)), x).shape == (0, 3)
