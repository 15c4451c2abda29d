"""map_tensors and add_scalar: what a user's function may do, and exact arithmetic."""

from __future__ import annotations

from operator import invert
from typing import Any

import pytest
import torch
from attrs import define

from fdsd import Lazy, StateDict, TensorSpec, add_scalar, defer, map_tensors, materialize, specs
from fdsd.errors import FdsdError, NotInvertible, SpecMismatch
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_laws, assert_same

W = torch.arange(6.0).reshape(2, 3)
STATE = StateDict({"w": W, "n": torch.tensor([4, 5]), "extra": "text"})


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def first_rows(x: torch.Tensor) -> torch.Tensor:
    return x[:1]


def number(x: torch.Tensor) -> Any:
    return x.sum().item()


def write(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def write_later(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    x.zero_()
    return made


def write_a_view(x: torch.Tensor) -> torch.Tensor:
    x[0] = 0
    return x.sum()


def pair(x: torch.Tensor) -> Any:
    return x, x


def boom(x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("mine")


def looks_at_values(x: torch.Tensor) -> torch.Tensor:
    return x[x > 2]


class TestMapTensors:
    @pytest.mark.parametrize("fn", [double, torch.neg, first_rows, torch.clone])
    def test_values_and_laws(self, fn: Any) -> None:
        for form in (STATE, defer(STATE)):
            made = materialize(map_tensors(fn, "w")(form))
            assert_same(made["w"], fn(W))
            assert made["extra"] == "text"
        assert_laws(map_tensors(fn, "w"), STATE)

    def test_without_names_every_tensor_and_no_object(self) -> None:
        made = map_tensors(double)(STATE)
        assert made["n"].tolist() == [8, 10] and made["extra"] == "text"

    def test_the_function_gets_the_whole_tensor_contiguous_without_gradients(self) -> None:
        seen: list[Any] = []

        def look(x: torch.Tensor) -> torch.Tensor:
            seen.append((type(x), x.is_contiguous(), x.requires_grad, tuple(x.shape), torch.is_grad_enabled()))
            return x + 1

        x = {"w": torch.nn.Parameter(W).t()}
        made = map_tensors(look)(x)["w"]
        materialize(map_tensors(look, spec=TensorSpec((3, 2), torch.float32))(defer(x)))
        assert seen == [(torch.Tensor, True, False, (3, 2), False)] * 2
        assert not made.requires_grad

    @pytest.mark.parametrize("fn", [write, write_later, write_a_view])
    @pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[:, 1:]])
    def test_writing_into_the_input_reaches_nobody(self, fn: Any, view: Any) -> None:
        """The function has a copy of its own."""
        base = W.clone()
        wanted = fn(view(base).clone())
        for form in ({"w": view(base)}, defer({"w": view(base)})):
            assert_same(materialize(map_tensors(fn, spec=lambda s: specs({"w": wanted})["w"])(form))["w"], wanted)
        assert torch.equal(base, W)

    @pytest.mark.parametrize("fn", [number, pair])
    def test_what_is_no_tensor_is_refused(self, fn: Any) -> None:
        for form in (STATE, defer(STATE), specs(STATE)):
            with pytest.raises(SpecMismatch, match=r"map_tensors.*'w'"):
                materialize(map_tensors(fn, "w")(form))

    def test_an_error_of_the_function_is_passed_on(self) -> None:
        with pytest.raises(ZeroDivisionError, match="mine"):
            map_tensors(boom, "w")(STATE)
        lazy = map_tensors(boom, "w", spec=TensorSpec((2, 3), torch.float32))(defer(STATE))
        with pytest.raises(ZeroDivisionError, match="mine"):
            materialize(lazy)

    def test_several_wrong_results_are_told_at_once(self) -> None:
        with pytest.raises(SpecMismatch) as caught:
            map_tensors(number)(STATE)
        assert "'w'" in str(caught.value) and "'n'" in str(caught.value)

    def test_no_function(self) -> None:
        with pytest.raises(SpecMismatch, match="no function"):
            map_tensors("w")  # type: ignore[arg-type]


class TestSpecRules:
    def test_a_spec_a_rule_and_evaluation_agree(self) -> None:
        made = TensorSpec((1, 3), torch.float32)
        for spec in (made, lambda s: s.with_shape((1, *s.shape[1:])), None):
            p = map_tensors(first_rows, "w", spec=spec)
            assert p(specs(STATE))["w"] == made
            assert_same(materialize(p(defer(STATE)))["w"], W[:1])
            assert_laws(p, STATE)

    def test_a_wrong_spec_is_refused_with_both(self) -> None:
        p = map_tensors(first_rows, "w", spec=TensorSpec((2, 3), torch.float32))
        with pytest.raises(SpecMismatch) as caught:
            p(STATE)
        assert (
            "float32[1, 3]" in str(caught.value) and "float32[2, 3]" in str(caught.value) and "'w'" in str(caught.value)
        )
        with pytest.raises(SpecMismatch, match=r"first_rows gave float32\[1, 3\]"):
            materialize(p(defer(STATE)))

    def test_what_cannot_be_known_asks_for_spec(self) -> None:
        p = map_tensors(looks_at_values, "w")
        assert p(STATE)["w"].tolist() == [3.0, 4.0, 5.0]
        for form in (specs(STATE), defer(STATE)):
            with pytest.raises(SpecMismatch, match=r"looks_at_values on float32\[2, 3\].*spec="):
                p(form)
        assert "spec=" in str(p.check(STATE))
        told = map_tensors(looks_at_values, "w", spec=TensorSpec((3,), torch.float32))
        assert materialize(told(defer(STATE)))["w"].tolist() == [3.0, 4.0, 5.0]

    def test_a_function_is_evaluated_without_data_once_for_each_spec(self) -> None:
        calls: list[str] = []

        def count(x: torch.Tensor) -> torch.Tensor:
            calls.append(x.device.type)
            return x + 1

        map_tensors(count)(specs({f"{i}": W for i in range(50)}))
        assert calls == ["meta"]

    def test_a_rule_that_gives_no_spec(self) -> None:
        with pytest.raises(SpecMismatch, match=r"spec= gave tuple"):
            map_tensors(double, "w", spec=lambda s: s.shape)(STATE)  # type: ignore[arg-type, return-value]

    def test_nothing_runs_twice(self) -> None:
        calls: list[int] = []

        def count(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x * 2

        p = map_tensors(count, "a", "b", spec=lambda s: s)
        materialize(p(defer({"a": W, "b": W, "c": W})))
        p({"a": W, "b": W})
        assert len(calls) == 2


@define
class Unhashable:
    factor: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_a_function_object_without_a_hash_works() -> None:
    assert Unhashable.__hash__ is None
    for form in (STATE, defer(STATE)):
        assert_same(materialize(map_tensors(Unhashable(2.0), "w")(form))["w"], W * 2)


def test_modules_are_functions() -> None:
    linear = torch.nn.Linear(3, 2)
    assert_same(map_tensors(linear, "w")(STATE)["w"], linear(W).detach())


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t()])
def test_inference_mode(view: Any) -> None:
    with torch.inference_mode():
        inside = map_tensors(double, "w")({"w": view(W)})["w"]
        made = torch.arange(6.0).reshape(2, 3)
    assert_same(inside.clone(), double(view(W)))
    assert_same(map_tensors(double, "w")({"w": view(made)})["w"], double(view(W)))


class TestAddScalar:
    @pytest.mark.parametrize(
        ("dtype", "value", "before", "after"),
        [
            (torch.float32, 1.0, [0.5, -1.0], [1.5, 0.0]),
            (torch.float32, 1, [0.5, -1.0], [1.5, 0.0]),
            (torch.bfloat16, 1.0, [2.0**-9, 0.5], [1.0, 1.5]),
            (torch.bfloat16, 2.0**-9, [1.0, 0.25], [1.0, 0.251953125]),
            (torch.float16, 0.1, [1.0, 2.0], [1.099609375, 2.099609375]),
            (torch.float64, 0.1, [1.0, 2.0], [1.1, 2.1]),
            (torch.float8_e4m3fn, 1.0, [1.0, 1.5], [2.0, 2.5]),
            (torch.int64, 2, [3, -5], [5, -3]),
            (torch.int8, 2.0, [3, -5], [5, -3]),
            (torch.complex64, 1.0, [1j, 2.0], [1 + 1j, 3.0]),
        ],
        ids=str,
    )
    def test_rounded_once(self, dtype: torch.dtype, value: float, before: list[Any], after: list[Any]) -> None:
        state = {"w": torch.tensor(before, dtype=torch.complex64 if dtype.is_complex else torch.float64).to(dtype)}
        made = add_scalar("w", value)(state)["w"]
        assert made.dtype == dtype and made.tolist() == after
        assert_laws(add_scalar("w", value), state)

    @pytest.mark.parametrize(
        ("dtype", "value"), [(torch.int64, 1.5), (torch.bool, 1), (torch.uint16, 1), (torch.int8, float("inf"))]
    )
    def test_what_cannot_be_added(self, dtype: torch.dtype, value: float) -> None:
        with pytest.raises(FdsdError, match=r"'w'.*cast\(\)"):
            add_scalar("w", value)({"w": torch.ones(2).to(dtype)})

    @pytest.mark.parametrize(("dtype", "value"), [(torch.int8, 300), (torch.uint8, 256), (torch.uint8, -256)])
    def test_a_number_that_the_dtype_does_not_hold(self, dtype: torch.dtype, value: int) -> None:
        with pytest.raises(FdsdError, match=str(value)):
            add_scalar("w", value)({"w": torch.ones(2).to(dtype)})

    @pytest.mark.parametrize("value", ["1", None, True, [1.0], 1j])
    def test_no_number(self, value: Any) -> None:
        with pytest.raises(SpecMismatch, match="no number"):
            add_scalar("w", value)

    def test_no_inverse(self) -> None:
        assert add_scalar("w", 1.0).grade is map_tensors(double).grade is Grade.NONE
        with pytest.raises(NotInvertible, match=r"-1\.0"):
            invert(add_scalar("w", 1.0))
        with pytest.raises(NotInvertible, match="double"):
            invert(map_tensors(double))

    def test_norms_as_w_and_as_w_plus_one(self) -> None:
        """Not exact in bfloat16, so no inverse pair there."""
        w = torch.tensor([2.0**-9 + 1e-4], dtype=torch.bfloat16)
        back = (add_scalar("w", 1.0) >> add_scalar("w", -1.0))({"w": w})["w"]
        assert not torch.equal(back, w)


def test_lazy_stays_lazy() -> None:
    assert isinstance(map_tensors(double, "w")(defer(STATE))["w"], Lazy)
    assert isinstance(add_scalar("w", 1.0)(defer(STATE))["w"], Lazy)
