"""Origins and constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd.algebra.apply import apply, constant
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import Cast, Concat, Constant, Origin, Stack
from fdsd.algebra.plan import plan_of
from fdsd.data.errors import FdsdError, Unsupported
from fdsd.data.spec import TensorSpec
from tests.helpers.checks import spec
from tests.helpers.running import CountingSource, replay, run_whole
from tests.helpers.tensors import EIGHT_BIT_FLOATS, MOVABLE, NUMERIC, OPAQUE, as_bytes, is_signed, name_of, same_bytes


def lazy(value: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Lazy:
    return Lazy(Constant(TensorSpec(shape, dtype), value))


@pytest.mark.parametrize("value", [0, 1, False, True, 0.0, -0.0, 1.0, 2.7])
@pytest.mark.parametrize("dtype", NUMERIC, ids=name_of)
def test_a_constant_is_rounded_as_torch_does(dtype: torch.dtype, value: float) -> None:
    if isinstance(value, float) and not value.is_integer() and not (dtype.is_floating_point or dtype.is_complex):
        return
    node = lazy(value, 2, 3, dtype=dtype)
    want = torch.tensor(value, dtype=torch.float64).to(dtype).expand(2, 3)
    assert same_bytes(evaluate([node])[0], want)
    eager = node.op.eager()
    assert isinstance(eager, torch.Tensor) and same_bytes(eager, want)


@pytest.mark.parametrize("dtype", OPAQUE, ids=name_of)
def test_opaque_dtypes_have_one_constant(dtype: torch.dtype) -> None:
    assert not as_bytes(evaluate([lazy(0, 3, dtype=dtype)])[0]).any()
    with pytest.raises(Unsupported):
        evaluate([lazy(1, 3, dtype=dtype)])


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_shapes(shape: tuple[int, ...]) -> None:
    found = evaluate([lazy(5, *shape)])[0]
    assert tuple(found.shape) == shape and bool((found == 5).all())


@pytest.mark.parametrize("value", [0, 0.1, 1, -3.0, 3.3])
def test_a_constant_is_rounded_to_its_own_dtype_first(value: float) -> None:
    """Then to what else it is cast, in the run and in the plan."""
    for dtype in (torch.bfloat16, torch.float16, *EIGHT_BIT_FLOATS):
        if value < 0 and not is_signed(dtype):
            continue
        cast = apply(Cast(torch.float32), lazy(value, 2, dtype=dtype))
        want = torch.full((2,), value, dtype=dtype).float()
        assert same_bytes(evaluate([cast])[0], want), dtype
        assert same_bytes(replay(plan_of([cast]))[0], want), dtype


def test_constants_that_differ_in_a_bit_are_different_nodes() -> None:
    """0.0 and -0.0 are equal as numbers, and so are 1 and True."""
    stacked = apply(Stack(0), lazy(0.0, 1), lazy(-0.0, 1))
    assert str(evaluate([stacked])[0].tolist()) == "[[0.0], [-0.0]]"
    assert run_whole(lazy(0.0, 1), lazy(0.0, 1)).session.roots[0] is not None
    a, b = run_whole(lazy(7, 1), lazy(7, 1)).session.roots
    assert a is b


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (300, torch.int8),
        (-1, torch.uint8),
        (1.5, torch.int64),
        (10**30, torch.int64),
        (10**400, torch.float32),
        ("one", torch.float32),
        (None, torch.float32),
        (float("nan"), torch.int32),
        (1j, torch.float32),
    ],
)
def test_a_value_that_the_dtype_has_not_is_refused(value: Any, dtype: torch.dtype) -> None:
    with pytest.raises(FdsdError, match="constant"):
        evaluate([lazy(value, 2, dtype=dtype)])


def test_constant_stands_beside_what_it_is_like() -> None:
    assert constant(spec(2), 3, like=spec(5)) == spec(2)
    assert constant(spec(2), 3, like=torch.ones(1)).tolist() == [3, 3]
    assert isinstance(constant(spec(2), 3, like=lazy(0, 1)), Lazy)
    assert constant(spec(2), 3, like=torch.ones(1, device="meta")).is_meta


def test_a_pad_of_a_meta_tensor_stays_on_meta() -> None:
    x = torch.ones(2, device="meta")
    assert apply(Concat(0), x, constant(spec(2), 0, like=x)).is_meta


def test_origins_are_equal_by_source_and_name() -> None:
    a, b = (CountingSource({"x": torch.arange(3), "y": torch.arange(3)}) for _ in range(2))
    assert a.lazy("x").op == a.lazy("x").op != a.lazy("y").op
    assert a.lazy("x").op != b.lazy("x").op
    assert len({a.lazy("x").op, a.lazy("x").op, b.lazy("x").op}) == 2
    assert repr(a.lazy("x").op) == "Origin('x')"
    assert isinstance(a.lazy("x").op, Origin)


def test_every_dtype_has_a_zero_constant() -> None:
    for dtype in MOVABLE:
        want = torch.zeros(2, dtype=torch.float64).to(dtype) if dtype in NUMERIC else torch.empty(2, dtype=dtype)
        found = evaluate([lazy(0, 2, dtype=dtype)])[0]
        assert found.dtype == dtype
        if dtype in NUMERIC:
            assert same_bytes(found, want), dtype
