"""Applying operations to leaves of all kinds, deferring and evaluating."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fdsd.algebra.apply import HANDLERS, Applier, apply, defer, defer_leaf
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.lazy import Lazy, Op
from fdsd.algebra.ops import (
    AddScalar,
    Average,
    Call,
    Cast,
    Concat,
    Distinct,
    IndexSelect,
    Lerp,
    MergeDims,
    Permute,
    Same,
    Select,
    Slice,
    SplitDim,
    Stack,
)
from fdsd.data.errors import SpecMismatch, Unsupported
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict
from fdsd.data.ties import tie_key, ties
from tests.helpers.checks import spec
from tests.helpers.functions import backwards
from tests.helpers.running import CountingSource
from tests.helpers.tensors import same_bytes

X = torch.arange(12.0).reshape(3, 4)
STRUCTURAL: list[Op] = [
    Permute((1, 0)),
    Slice(0, 0, 2),
    Select(0, 1),
    SplitDim(1, (2, 2)),
    MergeDims(0, 2),
    IndexSelect(0, (2, 0)),
    Cast(torch.bfloat16),
    Distinct("a"),
    Concat(0),
    Stack(0),
]


class Odd(torch.Tensor):
    """A subclass that nobody knows."""


def test_the_leaf_decides() -> None:
    op = Select(0, 1)
    assert same_bytes(apply(op, X), X[1])
    assert same_bytes(apply(op, torch.nn.Parameter(X)), X[1])
    assert isinstance(apply(op, defer_leaf(X)), Lazy)
    assert apply(op, spec(3, 4)) == spec(4)
    assert isinstance(apply(Concat(0), X, defer_leaf(X)), Lazy)
    assert apply(Concat(0), X, spec(1, 4)) == spec(4, 4)
    assert apply(Concat(0), defer_leaf(X), spec(1, 4)) == spec(4, 4)
    mixed = apply(Concat(0), X, defer_leaf(X), torch.nn.Parameter(X))
    assert same_bytes(evaluate([mixed])[0], torch.cat([X, X, X]))


@pytest.mark.parametrize("op", [*STRUCTURAL, AddScalar(1.0), Average((1.0,)), Call(backwards, (spec(3, 4),))], ids=repr)
def test_parameters_are_detached_and_nothing_is_written(op: Op) -> None:
    x = torch.nn.Parameter(X.clone())
    made = apply(op, x)
    assert not made.requires_grad and made.grad_fn is None and type(made) is torch.Tensor
    assert x._version == 0 and x.requires_grad and same_bytes(x.detach(), X)
    (found,) = evaluate([apply(op, defer_leaf(x))])
    assert not found.requires_grad and same_bytes(found, made)


@pytest.mark.parametrize("op", STRUCTURAL, ids=repr)
def test_structural_operations_work_on_meta_tensors(op: Op) -> None:
    x = torch.empty(3, 4, device="meta")
    made, want = apply(op, x), apply(op, X)
    assert made.is_meta and made.shape == want.shape and made.dtype == want.dtype
    assert apply(AddScalar(1.0), x).is_meta


def test_reading_a_meta_tensor_is_told() -> None:
    lazy = defer({"block.w": torch.empty(3, 4, device="meta")})["block.w"]
    assert lazy.spec == spec(3, 4)
    with pytest.raises(SpecMismatch, match=r"'block\.w' is on the meta device and has no data.*to_empty"):
        evaluate([lazy])


def test_reading_a_spec_is_told() -> None:
    lazy = defer({"block.w": spec(3, 4)})["block.w"]
    with pytest.raises(Unsupported, match=r"'block\.w' is known by its spec only"):
        evaluate([apply(Permute((1, 0)), lazy)])


def test_devices_do_not_mix() -> None:
    with pytest.raises(SpecMismatch, match=r"several devices.*'cpu', 'meta'"):
        apply(Concat(0), X, torch.empty(3, 4, device="meta"))


@pytest.mark.parametrize("leaf", [3, "text", None, [1], {"a": 1}, object()])
def test_what_is_no_tensor_is_refused(leaf: object) -> None:
    with pytest.raises(Unsupported, match=rf"works on tensors, not on {type(leaf).__name__}"):
        apply(Concat(0), X, leaf)


def test_subclasses_that_nobody_knows_are_refused_by_name() -> None:
    x = X.as_subclass(Odd)
    for run in (lambda: apply(Select(0, 0), x), lambda: apply(Concat(0), X, x), lambda: defer({"w": x})):
        with pytest.raises(Unsupported, match=r"test_apply\.Odd can be renamed and chosen.*plain tensor first"):
            run()
    with pytest.raises(SpecMismatch, match="no index 9"):
        apply(Select(0, 9), x)


def test_subclasses_are_looked_up_by_qualified_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HANDLERS, f"{Odd.__module__}.Odd", lambda x: defer_leaf(x.as_subclass(torch.Tensor)))
    lazy = apply(Permute((1, 0)), X.as_subclass(Odd))
    assert isinstance(lazy, Lazy) and same_bytes(evaluate([lazy])[0], X.t())


class Derived(torch.nn.Parameter):
    """Exact leaves are of exactly two classes."""


def test_a_subclass_of_parameter_is_not_exact() -> None:
    with pytest.raises(Unsupported, match="Derived"):
        apply(Select(0, 0), Derived(X))


def test_a_buffer_is_a_plain_tensor() -> None:
    buffer = torch.nn.Buffer(X)
    assert same_bytes(apply(Select(0, 0), buffer), X[0])


def test_tensors_that_are_no_grid_of_elements_are_refused_by_kind() -> None:
    sparse = X.to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        csr = X.to_sparse_csr()
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    lazy = torch.nn.parameter.UninitializedParameter()
    kinds = {"sparse_coo.*to_dense": sparse, "sparse_csr": csr, "nested": nested, "lazy module|Uninitialized": lazy}
    for told, leaf in kinds.items():
        for run in (lambda leaf=leaf: apply(Select(0, 0), leaf), lambda leaf=leaf: defer({"w": leaf})):
            with pytest.raises(Unsupported, match=told):
                run()


def test_defer_is_shallow_and_in_order() -> None:
    x = defer_leaf(X)
    state = StateDict({"b": X, "a": x, "n": 3, "s": spec(2)}, metadata={"": {"version": 2}})
    lazy = defer(state)
    assert isinstance(lazy, StateDict) and list(lazy) == ["b", "a", "n", "s"]
    assert lazy["a"] is x and lazy["n"] == 3 and isinstance(lazy["s"], Lazy)
    assert getattr(lazy, "_metadata", None) == {"": {"version": 2}}
    assert isinstance(state["b"], torch.Tensor)
    assert len(defer({})) == 0


def test_defer_keeps_what_is_tied_tied_and_nothing_else() -> None:
    w = torch.arange(6.0)
    z = torch.complex(w, w + 10)
    state = {
        "a": w,
        "b": torch.nn.Parameter(w),
        "view": w.view(2, 3),
        "part": w[:3],
        "again": w.view(2, 3),
        "z": z,
        "conj": z.conj(),
        "imag": z.imag,
        "minus": z.conj().imag,
        "bits": w.view(torch.int32),
        "empty": torch.empty(0),
        "other": torch.empty(0),
    }
    groups = [("a", "b"), ("view", "again")]
    assert ties(state) == groups
    assert ties(defer(state)) == groups
    for found, (name, leaf) in zip(evaluate(list(defer(state).values())), state.items(), strict=True):
        assert same_bytes(found, leaf.detach()), name


def test_tied_leaves_stay_tied_through_an_applier() -> None:
    w = torch.arange(6.0)
    for a, b, other in (
        (w, torch.nn.Parameter(w), w.clone()),
        (defer_leaf(w), defer_leaf(w), defer_leaf(w.clone())),
        (TensorSpec((6,), torch.float32, tie="t"), TensorSpec((6,), torch.float32, tie="t"), spec(6)),
    ):
        run = Applier()
        first, second, third = (run(Cast(torch.float16), x) for x in (a, b, other))
        assert tie_key(first) == tie_key(second) != tie_key(third)
        assert tie_key(run(Cast(torch.bfloat16), a)) != tie_key(first)
        assert tie_key(run(AddScalar(0.0), a)) != tie_key(run(AddScalar(-0.0), a))


def test_an_applier_does_not_confuse_a_freed_tensor_with_a_new_one() -> None:
    run = Applier()
    seen: set[Any] = set()
    for i in range(50):
        made = run(AddScalar(1.0), torch.full((1000,), float(i)))
        assert made[0] == i + 1
        seen.add(tie_key(made))
    assert len(seen) == 50


def test_evaluate_gives_one_tensor_for_each_distinct_node() -> None:
    source = CountingSource({"x": X})
    x = source.lazy("x")
    a, b, again = evaluate([x, apply(Permute((1, 0)), x), x])
    assert a is again and a is not b
    assert len(source.reads) == 2
    assert a.is_contiguous() and b.is_contiguous()


def test_evaluate_does_not_alias_its_sources() -> None:
    x = X.clone()
    (found,) = evaluate([defer_leaf(x)])
    found.zero_()
    assert same_bytes(x, X)


def test_errors_of_shapes_come_before_any_data_is_touched() -> None:
    source = CountingSource({"x": X})
    with pytest.raises(SpecMismatch):
        apply(Concat(0), source.lazy("x"), spec_of_width_5())
    assert source.reads == []


def spec_of_width_5() -> Lazy:
    lazy = defer_leaf(spec(1, 5))
    assert isinstance(lazy, Lazy)
    return lazy


@pytest.mark.parametrize(
    "op", [AddScalar(3), Average(), Lerp(0.25), Same(("a", "b"), "t"), Cast(torch.int8), Distinct("a")], ids=str
)
def test_what_says_it_is_pointwise_commutes_with_slicing(op: Op) -> None:
    assert op.pointwise
    inputs = [X, X] if isinstance(op, Average | Lerp | Same) else [X]
    whole = apply(op, *inputs)
    for dim, size in enumerate(X.shape):
        for start in range(size):
            part = apply(op, *[x.narrow(dim, start, 1) for x in inputs])
            assert same_bytes(part, whole.narrow(dim, start, 1))


def test_what_moves_elements_is_not_pointwise() -> None:
    assert [op for op in STRUCTURAL if op.pointwise] == [Cast(torch.bfloat16), Distinct("a")]


def test_once_for_all_leaves_that_are_tied() -> None:
    applier, made = Applier(), list[object]()

    def make() -> object:
        made.append(object())
        return made[-1]

    other = X.clone()
    first = applier.once("key", X, make)
    assert applier.once("key", torch.nn.Parameter(X), make) is first
    assert applier.once("other key", X, make) is not first
    assert applier.once("key", other, make) is not first
    assert applier.once("key", "no tensor", make) is not applier.once("key", "no tensor", make)
    assert len(made) == 5
