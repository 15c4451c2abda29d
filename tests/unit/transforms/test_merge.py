"""average and lerp: exact arithmetic, what must be equal, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd import OptimState, StateDict, TrainState, average, defer, lerp, materialize, specs
from fdsd.errors import FdsdError, NameConflict, SpecMismatch
from fdsd.testing import assert_same


def one(value: Any, dtype: torch.dtype = torch.float32) -> StateDict[Any]:
    return StateDict({"w": torch.tensor([value], dtype=torch.float64).to(dtype)})


@pytest.mark.parametrize("form", [lambda x: x, defer])
class TestValues:
    @pytest.mark.parametrize(
        ("dtype", "values", "weights", "expected"),
        [
            (torch.float32, [1.0, 3.0], None, 2.0),
            (torch.float32, [1.0, 3.0], [0.25, 0.5], 1.75),
            (torch.float32, [1.0, 3.0], [1, -1], -2.0),
            (torch.float32, [5.0], None, 5.0),
            (torch.bfloat16, [1.0, 1.0078125, 1.0078125], [1.0, 1.0, 1.0], 3.015625),
            (torch.bfloat16, [256.0, 1.0, 1.0], [1.0, 1.0, 1.0], 258.0),
            (torch.float16, [60000.0, 60000.0], None, 60000.0),
            (torch.float8_e4m3fn, [1.0, 2.0], None, 1.5),
            (torch.float64, [1e-17, 1.0], [1.0, 1.0], 1.0 + 1e-17),
        ],
        ids=str,
    )
    def test_average_is_summed_in_float32_in_order_and_rounded_once(
        self, form: Any, dtype: torch.dtype, values: list[float], weights: Any, expected: float
    ) -> None:
        made = materialize(average([form(one(value, dtype)) for value in values], weights))
        assert made["w"].dtype == dtype and made["w"].tolist() == [expected]

    @pytest.mark.parametrize(
        ("weight", "expected"), [(0, 1.0), (1, 3.0), (0.25, 1.5), (0.75, 2.5), (-1, -1.0), (2, 5.0), (0.5, 2.0)]
    )
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
    def test_lerp(self, form: Any, weight: float, expected: float, dtype: torch.dtype) -> None:
        made = materialize(lerp(form(one(1.0, dtype)), form(one(3.0, dtype)), weight))
        assert made["w"].dtype == dtype and made["w"].tolist() == [expected]

    def test_ends_are_exact(self, form: Any) -> None:
        a, b = one(1e-8), one(1e8)
        assert_same(materialize(lerp(form(a), form(b), 0)), a)
        assert_same(materialize(lerp(form(a), form(b), 1)), b)
        nan = one(float("nan"))
        assert_same(materialize(lerp(form(a), form(nan), 0)), a)

    def test_what_is_no_float_must_be_equal(self, form: Any) -> None:
        states = [StateDict({"n": torch.tensor(3), "b": torch.tensor([True]), "o": "text"}) for _ in range(2)]
        made = materialize(average(list(map(form, states))))
        assert_same(made, states[0])
        other = StateDict({**states[1], "n": torch.tensor(4)})
        with pytest.raises(SpecMismatch, match="n"):
            materialize(average([form(states[0]), form(other)]))

    def test_one_element_of_a_wider_memory(self, form: Any) -> None:
        x = StateDict({"n": torch.arange(4)[1::4]})
        assert_same(materialize(average([form(x), form(x)]))["n"], torch.tensor([1]))

    def test_ties_stay_tied(self, form: Any) -> None:
        w, v = torch.tensor([1.0]), torch.tensor([2.0])
        made = average([form({"a": w, "b": w}), form({"a": v, "b": v})])
        assert made["a"] is made["b"]


def test_specs_give_specs() -> None:
    assert average([specs(one(1.0)), specs(one(2.0))]) == specs(one(1.5))


def test_order_is_that_of_the_first() -> None:
    a, b = {"x": torch.ones(1), "y": torch.ones(1)}, {"y": torch.ones(1), "x": torch.ones(1)}
    assert list(average([a, b])) == ["x", "y"]


def test_metadata_of_the_first_is_kept() -> None:
    bn = torch.nn.BatchNorm1d(2).state_dict()
    assert dict(average([bn, bn]).metadata or {}) == {"": {"version": 2}}


@pytest.mark.parametrize(
    ("a", "b", "error", "texts"),
    [
        ({"x": 1.0, "y": 1.0}, {"x": 1.0}, NameConflict, ["state 2 lacks 'y'", "select()"]),
        ({"x": 1.0}, {"x": 1.0, "z": 1.0}, NameConflict, ["state 2 has 'z'"]),
        ({"x": 1.0}, {"x": [1.0]}, SpecMismatch, ["'x'", "float32[]", "float32[1]"]),
        ({"x": 1.0}, {"x": 1}, SpecMismatch, ["'x'", "float32", "int64"]),
    ],
    ids=str,
)
def test_states_that_do_not_fit(a: dict[str, Any], b: dict[str, Any], error: Any, texts: list[str]) -> None:
    states = [{name: torch.tensor(value) for name, value in state.items()} for state in (a, b)]
    for made in (lambda: average(states), lambda: lerp(states[0], states[1], 0.5)):
        with pytest.raises(error) as caught:
            made()
        assert all(text in str(caught.value) for text in texts)


def test_unequal_objects_and_a_tensor_beside_an_object() -> None:
    with pytest.raises(SpecMismatch, match="'o'"):
        average([{"o": 1}, {"o": 2}])
    with pytest.raises(SpecMismatch, match="'o'"):
        average([{"o": 1}, {"o": torch.ones(1)}])


@pytest.mark.parametrize("value", [float("nan"), (1, float("nan"))])
def test_objects_are_compared_as_values(value: Any) -> None:
    again = (1, float("nan")) if isinstance(value, tuple) else float("nan")
    assert list(average([{"o": value}, {"o": again}])) == ["o"]


def test_numbers_of_states_and_weights() -> None:
    with pytest.raises(SpecMismatch, match="no states"):
        average([])
    with pytest.raises(SpecMismatch, match="1 weight for 2 states"):
        average([one(1.0), one(2.0)], [1.0])


@pytest.mark.parametrize(
    "states",
    [[OptimState(), OptimState()], [TrainState({})], [3, 4], {"w": torch.ones(1)}],
    ids=lambda s: type(s).__name__,
)
def test_what_is_no_state_dict_is_refused_in_words(states: Any) -> None:
    with pytest.raises(FdsdError, match="average"):
        average(states)


def test_nothing_changes_and_nothing_grows() -> None:
    """An EMA of tensors gives tensors, not a growing graph."""
    ema, model = one(0.0), one(1.0)
    for _ in range(10):
        ema = lerp(ema, model, 0.5)
    assert type(ema["w"]) is torch.Tensor and ema["w"].tolist() == [1 - 2.0**-10]
    assert model["w"].tolist() == [1.0]
    grown = torch.nn.Parameter(torch.ones(1))
    assert not average([{"w": grown}, {"w": grown}])["w"].requires_grad
