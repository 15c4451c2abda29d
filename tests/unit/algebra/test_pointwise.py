"""Pointwise operations: the numbers, the roundings, and that slicing cannot change a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.lazy import Op
from fdsd.algebra.ops import AddScalar, Average, Lerp, Permute, Same, Stack
from fdsd.data.errors import FdsdError, SpecMismatch, Unsupported
from fdsd.data.spec import TensorSpec
from tests.helpers.checks import agree, spec
from tests.helpers.running import floor, run_whole
from tests.helpers.tensors import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    LAYOUTS,
    MOVABLE,
    has_layout,
    lay_out,
    name_of,
    numbers,
    patterns,
    plain,
    same_bytes,
)

X = torch.linspace(-3, 3, 24).reshape(4, 6)
Y = X.flip(0) * 0.7 + 0.123
ADDABLE = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=name_of)
@pytest.mark.parametrize("value", [1, 0.1, -2.5, 0])
def test_add_scalar_rounds_once(dtype: torch.dtype, value: float) -> None:
    x = numbers((4, 6), dtype, 1) if dtype is getattr(torch, "float8_e8m0fnu", None) else (X + 5).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if dtype in (torch.float64, torch.complex128):
        want = x + value
    elif dtype is torch.float32:
        want = x + torch.tensor(value, dtype=dtype)
    elif dtype is torch.complex64:
        want = x + torch.tensor(value, dtype=torch.float32)
    else:
        work = torch.complex64 if dtype.is_complex else torch.float32
        want = (x.to(wide) + torch.tensor(value, dtype=torch.float32)).to(work).to(dtype)
    assert same_bytes(agree(AddScalar(value), x), want)


@pytest.mark.parametrize("dtype", ADDABLE, ids=name_of)
def test_add_scalar_to_integers(dtype: torch.dtype) -> None:
    x = torch.arange(10, 16).to(dtype)
    for value in (1, 2.0, 0, -3):
        if value >= 0 or dtype is not torch.uint8:
            made = agree(AddScalar(value), x)
            assert made.dtype == dtype and made.tolist() == [i + value for i in range(10, 16)]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0.5, torch.int64),
        (float("nan"), torch.int32),
        (float("inf"), torch.int32),
        (300, torch.int8),
        (-1, torch.uint8),
        (1e300, torch.int64),
        (1, torch.bool),
        (1, torch.uint16),
        (1, torch.uint64),
        (1, torch.int4),
        (1, torch.uint4),
        (1, getattr(torch, "float4_e2m1fn_x2", torch.bits8)),
    ],
)
def test_add_scalar_refuses_what_the_dtype_has_not(value: float, dtype: torch.dtype) -> None:
    with pytest.raises(Unsupported, match=r"add_scalar.*" + name_of(dtype)):
        apply(AddScalar(value), TensorSpec((2,), dtype))


def test_signs_of_zero_are_not_mixed_up() -> None:
    """0.0 and -0.0 are equal as numbers; added to -0.0 they are not."""
    x = defer_leaf(torch.tensor([-0.0]))
    a, b = apply(AddScalar(0.0), x), apply(AddScalar(-0.0), x)
    assert str(evaluate([apply(Stack(0), a, b)])[0].tolist()) == "[[0.0], [-0.0]]"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, *COMPLEX], ids=name_of)
def test_average(dtype: torch.dtype) -> None:
    a, b, c = X.to(dtype), Y.to(dtype), (X * Y).to(dtype)
    made = agree(Average((0.5, 0.3, 0.2)), a, b, c)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = a.to(wide) * 0.5 + b.to(wide) * 0.3 + c.to(wide) * 0.2
    step = torch.finfo(dtype).eps
    assert bool(((made.to(wide) - exact).abs() <= (exact.abs() + 1) * step).all())
    assert same_bytes(agree(Average((1.0,)), a), a)
    assert same_bytes(agree(Average((0.5, 0.5)), a, a), a)


def test_average_adds_up_in_float32_and_rounds_once() -> None:
    """1 + 2**-9 three times, in bfloat16, would lose every step if each sum were rounded."""
    a, b = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0**-9], dtype=torch.bfloat16)
    made = agree(Average((1.0,) * 5), a, b, b, b, b)
    assert made.item() == 1 + 2**-7


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.5, 0.7, 1.0, 0, 1, -0.5, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=name_of)
def test_lerp(dtype: torch.dtype, weight: float) -> None:
    a, b = X.to(dtype), Y.to(dtype)
    made = agree(Lerp(weight), a, b)
    if weight in (0, 1):
        assert same_bytes(made, b if weight else a)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = a.to(wide) + weight * (b.to(wide) - a.to(wide))
    assert bool(((made.to(wide) - exact).abs() <= 8 * torch.finfo(dtype).eps).all())
    assert same_bytes(agree(Lerp(weight), a, a), a)


def test_lerp_at_the_ends_is_exact_where_arithmetic_is_not() -> None:
    a, b = torch.tensor([1e30, float("inf"), -0.0]), torch.tensor([1.0, float("nan"), 7.0])
    assert same_bytes(agree(Lerp(0.0), a, b), a)
    assert same_bytes(agree(Lerp(1.0), a, b), b)
    assert apply(Lerp(0.0), a, b).data_ptr() != a.data_ptr()


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex128], ids=name_of)
def test_the_layout_changes_nothing(dtype: torch.dtype, kind: str) -> None:
    if not has_layout(kind, (5, 7), dtype):
        return
    x = lay_out(numbers((5, 7), dtype, 1, signed=True), kind)
    y = lay_out(numbers((5, 7), dtype, 2, signed=True), kind)
    for op, inputs in (
        (AddScalar(0.1), (x,)),
        (Average((0.3, 0.7)), (x, y)),
        (Lerp(0.3), (x, y)),
        (Lerp(0.8), (x, y)),
        (Same(("a", "b"), "same"), (x, plain(x))),
    ):
        assert same_bytes(agree(op, *inputs), agree(op, *map(plain, inputs))), op


@pytest.mark.parametrize("budget", [1, 100, 1000])
def test_slicing_changes_nothing(budget: int) -> None:
    """Sizes around the vector registers, special values, and any cut."""
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40, -1e-45, 3e38, 1.0])
    for size in (1, 7, 8, 15, 16, 17, 31, 33, 64, 257):
        x = special.repeat(size // 8 + 1)[:size].clone()
        y = x.roll(3) * 0.3
        x[::3] += torch.rand(len(x[::3]), generator=torch.Generator().manual_seed(size))
        for op in (Average((0.3, 0.7)), Lerp(0.3), Lerp(0.6)):
            node = apply(Permute((0,)), apply(op, defer_leaf(x), defer_leaf(y)))
            with floor(1):
                (found,) = run_whole(node, budget=budget).results
            want = apply(op, x, y)
            both = found.isnan() & want.isnan()
            assert same_bytes(found.masked_fill(both, 0), want.masked_fill(both, 0)), (op, size)


@pytest.mark.parametrize("dtype", MOVABLE, ids=name_of)
def test_same_compares_bytes(dtype: torch.dtype) -> None:
    """NaNs are equal to themselves; any dtype and layout; one element of a stride as well."""
    x = patterns((3, 4), dtype)
    op = Same(("a", "b"), "state 'step'")
    for kind in LAYOUTS[:4]:
        assert same_bytes(agree(op, x, lay_out(x, kind)), x)
        one = lay_out(x, kind)[1:2, 2:3]
        assert same_bytes(agree(op, one, one), one)
    assert same_bytes(agree(op, x[0, 0], x[0, 0]), x[0, 0])
    assert same_bytes(agree(op, x[:0], x[:0]), x[:0])


def test_same_names_what_differs() -> None:
    a, b, zero, minus = torch.arange(3), torch.arange(3), torch.zeros(1), -torch.zeros(1)
    op = Same(("a", "b", "c"), "state 'step'")
    for run in (
        lambda: apply(op, a, b, a + 1),
        lambda: evaluate([apply(op, *map(defer_leaf, (a, b, a + 1)))]),
    ):
        with pytest.raises(SpecMismatch, match=r"state 'step': 'a' and 'c' hold unequal values. Drop"):
            run()
    with pytest.raises(SpecMismatch, match="unequal"):
        apply(Same(("a", "b"), "r"), zero, minus)
    names = tuple(f"n{i}" for i in range(30))
    with pytest.raises(SpecMismatch) as caught:
        apply(Same(names, "r"), a, *[a + 1] * 29)
    assert "'n10'" in str(caught.value) and "n11" not in str(caught.value)


def test_same_has_no_values_to_compare_on_meta() -> None:
    x = torch.empty(3, device="meta")
    assert apply(Same(("a", "b"), "r"), x, torch.empty(3, device="meta")).is_meta


@pytest.mark.parametrize(
    ("op", "given", "told"),
    [
        (Average((0.5, 0.5)), [spec(2), spec(3)], r"average.*float32\[2\].*float32\[3\]"),
        (Average((0.5, 0.5)), [spec(2), spec(2, dtype=torch.float16)], r"float16\[2\]"),
        (Average((1.0,)), [spec(2, dtype=torch.int64)], "int64 is no floating dtype"),
        (Average((1.0,)), [spec(2, dtype=torch.bool)], "bool is no floating dtype"),
        (Average((0.5,)), [spec(2), spec(2)], "2 tensors.*1 weight"),
        (Average((0.5, 0.5)), [spec(2)], "1 tensor.*2 weights"),
        (Average(()), [], "average"),
        (Lerp(0.5), [spec(2), spec(3)], r"lerp.*float32\[2\].*float32\[3\]"),
        (Lerp(0.5), [spec(2, dtype=torch.uint8)] * 2, "uint8 is no floating dtype"),
        (Same(("a", "b"), "the steps"), [spec(2), spec(3)], r"the steps.*float32\[2\].*float32\[3\]"),
        (Same(("a", "b"), "the steps"), [spec(2), spec(2, dtype=torch.int8)], r"int8\[2\]"),
    ],
)
def test_refusals_name_specs(op: Op, given: list[TensorSpec], told: str) -> None:
    with pytest.raises(FdsdError, match=told):
        apply(op, *given)


@pytest.mark.parametrize("op", [AddScalar(1.5), Average((1.0,)), Average((0.5, 0.5)), Lerp(0.3)])
def test_inputs_stay_as_they_were(op: Op) -> None:
    count = {AddScalar: 1, Lerp: 2}.get(type(op), len(getattr(op, "weights", ())))
    inputs: list[Any] = [torch.nn.Parameter(X + i) for i in range(count)]
    before = [x.detach().clone() for x in inputs]
    made = apply(op, *inputs)
    assert not made.requires_grad and all(made.data_ptr() != x.data_ptr() for x in inputs)
    assert all(x._version == 0 and same_bytes(x.detach(), y) for x, y in zip(inputs, before, strict=True))


def test_every_integer_dtype_is_either_added_to_or_refused() -> None:
    for dtype in INTEGERS:
        x = torch.arange(3).to(dtype)
        if dtype in ADDABLE:
            assert apply(AddScalar(1), x).tolist() == [1, 2, 3]
        else:
            with pytest.raises(Unsupported, match=name_of(dtype)):
                apply(AddScalar(1), x)
