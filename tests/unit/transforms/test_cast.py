"""cast: what it chooses by default, rounding, inverses, and casts that are refused."""

from __future__ import annotations

from operator import invert
from typing import Any

import pytest
import torch

from fdsd import Pipeline, cast, defer, materialize
from fdsd.errors import NotInvertible, SpecMismatch, Unsupported
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_laws, assert_same
from tests.helpers.refusing import assert_refused

STATE: dict[str, Any] = {
    "f32": torch.tensor([1.0, 1 + 2**-9, -0.0]),
    "bf16": torch.tensor([3.0, 4.0], dtype=torch.bfloat16),
    "i64": torch.tensor([5, 6]),
    "bool": torch.tensor([True, False]),
    "extra": {"a": 1},
}


def dtypes(state: Any) -> dict[str, str]:
    return {name: str(leaf.dtype).removeprefix("torch.") for name, leaf in state.items() if hasattr(leaf, "dtype")}


def test_without_names_floats_are_cast_as_module_to_does() -> None:
    module = torch.nn.BatchNorm1d(2)
    p = cast(torch.bfloat16)
    made = p(module.state_dict())
    assert dtypes(made) == dtypes(module.to(torch.bfloat16).state_dict())
    assert dtypes(p(STATE)) == {"f32": "bfloat16", "bf16": "bfloat16", "i64": "int64", "bool": "bool"}
    assert p(STATE)["extra"] is STATE["extra"]
    assert p(STATE)["bf16"] is STATE["bf16"]


def test_names_choose_what_is_cast() -> None:
    made = cast(torch.float64, "i64", lambda name, spec: spec.dtype is torch.bfloat16)(STATE)
    assert dtypes(made) == {"f32": "float32", "bf16": "float64", "i64": "float64", "bool": "bool"}


def test_each_cast_rounds_where_it_stands() -> None:
    x = torch.tensor([1 + 2**-9 + 2**-20])
    p = cast(torch.bfloat16) >> cast(torch.float32)
    for form in ({"x": x}, defer({"x": x})):
        assert materialize(p(form))["x"].tolist() == [1.0]
    assert cast(torch.bfloat16)({"x": torch.tensor([1 + 2**-8 + 2**-20])})["x"].tolist() == [1.0078125]
    q = cast(torch.float16) >> cast(torch.float8_e5m2) >> cast(torch.float64)
    assert materialize(q(defer({"x": torch.tensor([1.13, 70000.0])})))["x"].tolist() == [1.25, float("inf")]


@pytest.mark.parametrize(
    ("source", "target", "exact"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.float8_e4m3fn, torch.bfloat16, True),
        (torch.float8_e5m2, torch.float16, True),
        (torch.float8_e4m3fn, torch.float8_e5m2, False),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.float32, torch.bfloat16, False),
        (torch.float32, torch.float32, True),
        (torch.int8, torch.int64, True),
        (torch.uint8, torch.int8, False),
        (torch.uint8, torch.int16, True),
        (torch.int16, torch.float32, True),
        (torch.int32, torch.float32, False),
        (torch.int64, torch.float64, False),
        (torch.int32, torch.float64, True),
        (torch.uint16, torch.float32, True),
        (torch.bool, torch.int8, True),
        (torch.int8, torch.bool, False),
        (torch.complex64, torch.complex128, True),
        (torch.float64, torch.complex64, False),
    ],
    ids=str,
)
def test_only_widening_casts_have_an_inverse(source: torch.dtype, target: torch.dtype, exact: bool) -> None:
    p = cast(target, "x", from_dtype=source)
    assert p.grade is (Grade.EXACT if exact else Grade.NONE)
    state = {"x": torch.tensor([0, 1, 1, 0, 1]).to(source)}
    if exact:
        assert ~p == cast(source, "x", from_dtype=target)
    else:
        with pytest.raises(NotInvertible, match="cannot hold every"):
            invert(p)
    assert_laws(p, state)
    assert cast(target, "x").bind(state) == p


def test_a_cast_to_complex_keeps_its_word() -> None:
    """A cast back would drop imaginary parts and is refused; so there is no inverse, or one that runs."""
    p = cast(torch.complex64, "x", from_dtype=torch.float32)
    state = {"x": torch.tensor([1.0, -2.0])}
    if p.grade is not Grade.NONE:
        assert_same((~p)(p(state)), state)


def test_the_inverse_needs_the_dtype() -> None:
    with pytest.raises(NotInvertible, match=r"from_dtype=.*bind"):
        invert(cast(torch.float32))


def test_bind_makes_a_step_for_each_distinct_dtype() -> None:
    state = {
        "a": torch.tensor([1.5], dtype=torch.bfloat16),
        "b": torch.tensor([2.5], dtype=torch.float16),
        "c": torch.tensor([3.5], dtype=torch.bfloat16),
        "n": torch.tensor([4]),
    }
    p = cast(torch.float32)
    assert p.bind(state).grade is Grade.EXACT and len(p.bind(state).steps) == 2
    assert_laws(p, state)
    assert cast(torch.float32).bind({"n": torch.tensor([4])}) == p


def test_a_dtype_that_is_not_the_one_said() -> None:
    p = cast(torch.float64, "f32", from_dtype=torch.bfloat16)
    assert_refused(p, STATE, SpecMismatch, "'f32'", "float32", "from_dtype=torch.bfloat16")


@pytest.mark.parametrize(
    ("source", "target", "texts"),
    [
        (torch.complex64, torch.float32, ["imaginary part", "view_as_real"]),
        (torch.complex64, torch.int64, ["imaginary part"]),
        (torch.float32, torch.uint4, ["uint4", "moved but not cast"]),
        (torch.float32, torch.quint8, ["quint8"]),
    ],
    ids=str,
)
def test_casts_that_lose_or_mean_nothing_are_refused(
    source: torch.dtype, target: torch.dtype, texts: list[str]
) -> None:
    assert_refused(cast(target, "x"), {"x": torch.ones(2, dtype=source)}, Unsupported, "'x'", *texts)


def test_complex_tensors_are_chosen_by_default_and_refused() -> None:
    assert_refused(cast(torch.bfloat16), {"z": torch.ones(2, dtype=torch.complex64)}, Unsupported, "'z'")
    assert_laws(cast(torch.complex128), {"z": torch.tensor([1 + 2j, 3 - 4j]).conj(), "n": torch.tensor([1])})


def test_ties_stay_tied() -> None:
    w = torch.tensor([1.5, 2.5])
    for form in ({"a": w, "b": w, "c": w.clone()}, defer({"a": w, "b": w, "c": w.clone()})):
        made = cast(torch.bfloat16)(form)
        assert made["a"] is made["b"] is not made["c"]
        whole = materialize(made)
        assert whole["a"] is whole["b"] is not whole["c"]


def test_views_that_differ_in_a_bit_only_are_no_ties() -> None:
    """The imaginary part and that of the conjugate lie in the same memory, and mean opposite values."""
    z = torch.tensor([1 + 2j, 3 - 4j])
    made = cast(torch.float64)({"a": z.imag, "b": z.conj().imag})
    assert made["a"].tolist() == [2.0, -4.0] and made["b"].tolist() == [-2.0, 4.0]


def test_what_is_no_dtype() -> None:
    with pytest.raises(SpecMismatch, match=r"torch\.bfloat16"):
        cast("bfloat16")  # type: ignore[arg-type]
    with pytest.raises(SpecMismatch):
        cast(float)  # type: ignore[arg-type]


def test_parameters_and_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    made = cast(torch.float64)({"w": weight})["w"]
    assert not made.requires_grad and made.grad_fn is None
    p: Pipeline = cast(torch.float32)
    assert p({"w": weight})["w"] is weight
    assert_same(p({"w": weight}), {"w": weight})
