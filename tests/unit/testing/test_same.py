"""assert_same: what it takes for equal, and what it says where it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd import OptimState, ParamGroup, StateDict, TensorSpec, TrainState, defer, specs, transpose
from fdsd.testing import assert_same

W = torch.arange(6.0).reshape(2, 3)
NAN = float("nan")


def optim(value: float = 1.0, lr: Any = 0.1, fqns: tuple[str, ...] = ("a", "b")) -> OptimState:
    return OptimState({"m": {"a": torch.tensor([value])}}, (ParamGroup(fqns, {"lr": lr}),))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({}, {}),
        ({"w": W}, StateDict({"w": W.clone()})),
        ({"w": W.t()}, {"w": W.t().contiguous()}),
        ({"w": W}, defer({"w": W})),
        (transpose("w")(defer({"w": W})), {"w": W.t()}),
        ({"w": W}, {"w": torch.nn.Parameter(W)}),
        ({"w": torch.tensor([NAN])}, {"w": torch.tensor([NAN])}),
        ({"w": W, "v": W + 1}, {"v": W + 1, "w": W}),
        ({"w": W, "v": W}, {"w": W * 1, "v": W * 1} | dict.fromkeys(["w", "v"], W * 1)),
        ({"o": [1, {"x": W}]}, {"o": [1, {"x": W.clone()}]}),
        ({"o": NAN}, {"o": float("nan")}),
        ({"z": torch.tensor([1 + 1j]).conj()}, {"z": torch.tensor([1 - 1j])}),
        ({"e": torch.empty(0, 2)}, {"e": torch.empty(0, 2)}),
        ({"e": torch.tensor([1, 2]).expand(3, 2)}, {"e": torch.tensor([[1, 2]] * 3)}),
        ({"m": torch.ones(2, device="meta")}, {"m": torch.ones(2, device="meta")}),
        (specs({"w": W}), specs({"w": W + 1})),
        (W, W.clone()),
        (W, defer({"w": W})["w"]),
        (optim(), optim()),
        (optim(lr=torch.tensor(0.1)), optim(lr=torch.tensor(0.1))),
        (optim(), optim(fqns=("b", "a"))),
        (TrainState({"w": W}, optim(), {"x": W + 1}), TrainState({"w": W * 1}, optim(), {"x": W + 1})),
    ],
)
def test_same(a: Any, b: Any) -> None:
    assert_same(a, b)
    assert_same(b, a)


@pytest.mark.parametrize(
    ("a", "b", "texts"),
    [
        ({"w": W}, {}, ["- w: only in a"]),
        ({}, {"w": W}, ["+ w: only in b"]),
        ({"w": W}, {"w": W + 1}, ["~ w: 6 of 6 elements differ"]),
        ({"w": W}, {"w": W.double()}, ["float32[2, 3] became float64[2, 3]"]),
        ({"w": W}, {"w": W.t()}, ["float32[2, 3] became float32[3, 2]"]),
        ({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])}, ["1 of 1 element"]),
        ({"w": torch.tensor([NAN])}, {"w": -torch.tensor([NAN])}, ["1 of 1 element"]),
        ({"w": W}, {"w": TensorSpec((2, 3), torch.float32)}, ["w", "a tensor float32[2, 3] became the spec"]),
        ({"w": W}, {"w": W.to("meta")}, ["w"]),
        ({"o": 1}, {"o": 1.0}, ["o"]),
        ({"o": None}, {"o": W}, ["o"]),
        ({"o": [W]}, {"o": [W + 1]}, ["o"]),
        ({"w": W, "v": W}, {"w": W * 1, "v": W * 1}, ["tied in actual only: v, w"]),
        ({"w": W * 1, "v": W * 1}, {"w": W, "v": W}, ["tied in expected only: v, w"]),
        (W, W + 1, ["tensor: 6 of 6"]),
        (W, {"w": W}, ["mapping of names to leaves was expected, not a tensor"]),
        (optim(), {"m.a": W}, ["not a OptimState"]),
        (optim(), optim(2.0), ["slots['m'].a"]),
        (optim(), optim(lr=0.2), ["groups[0].lr"]),
        (optim(), optim(fqns=("a", "c")), ["groups[0].fqns"]),
        (TrainState({"w": W}), TrainState({"w": W}, optim()), ["optim."]),
        (TrainState({"w": W}, extra={"e": 1}), TrainState({"w": W}, extra={"e": 2}), ["extra.e"]),
        ({f"l.{i}": W for i in range(9)}, {f"l.{i}": W.double() for i in range(9)}, ["l.{0..8}"]),
    ],
)
def test_different(a: Any, b: Any, texts: list[str]) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_same(a, b)
    for text in texts:
        assert text in str(caught.value)


def test_options() -> None:
    x, y = {"a": W, "b": W + 1}, {"b": W + 1, "a": W}
    with pytest.raises(AssertionError, match="order of names"):
        assert_same(x, y, order=True)
    with pytest.raises(AssertionError):
        assert_same(optim(), optim(fqns=("b", "a")), order=True)
    assert_same({"a": W, "b": W}, {"a": W * 1, "b": W * 1}, tied=False)
    nan = torch.tensor([NAN, 1.0])
    other = nan.view(torch.int32).clone()
    other[0] += 1
    assert_same(other.view(torch.float32), nan, nans_equal=True)
    with pytest.raises(AssertionError):
        assert_same(other.view(torch.float32), nan)
    with pytest.raises(AssertionError):
        assert_same(torch.tensor([NAN, 1.0]), torch.tensor([1.0, NAN]), nans_equal=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint64, torch.bool, torch.bfloat16, torch.complex128])
def test_every_dtype_is_compared_by_bytes(dtype: torch.dtype) -> None:
    a, b = torch.tensor([0, 1]).to(dtype), torch.tensor([1, 1]).to(dtype)
    assert_same({"w": a}, {"w": a.clone()})
    with pytest.raises(AssertionError):
        assert_same({"w": a}, {"w": b})


def test_ties_of_empty_tensors_are_no_matter() -> None:
    empty = torch.empty(0)
    assert_same({"a": empty, "b": empty}, {"a": torch.empty(0), "b": torch.empty(0)})


def test_subclasses_are_the_same_as_themselves_only() -> None:
    class Marked(torch.Tensor):
        pass

    leaf = W.as_subclass(Marked)
    assert_same({"s": leaf}, {"s": leaf})
    with pytest.raises(AssertionError):
        assert_same({"s": leaf}, {"s": W.clone().as_subclass(Marked)})
