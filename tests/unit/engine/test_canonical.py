"""What is written of values: equal for equal ones, whatever made them, and different for others."""

from __future__ import annotations

import math
import pickle
import threading
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fdsd.engine.canonical import canonical


class Scale:
    """A function with a state, as it is picklable."""

    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, x: Any) -> Any:
        return x * self.by

    def method(self, x: Any) -> Any:
        return x * self.by


class Slotted:
    """A function whose state is in slots."""

    __slots__ = ("by",)

    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, x: Any) -> Any:
        return x * self.by


class Silent(Scale):
    """One whose looks tell nothing."""

    def __repr__(self) -> str:
        return "Silent()"


class Locked(Scale):
    """One that cannot be pickled."""

    def __init__(self, by: Any) -> None:
        super().__init__(by)
        self.lock = threading.Lock()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle it")


def mul(x: Any, by: Any) -> Any:
    return x * by


def linear(by: float) -> nn.Linear:
    made = nn.Linear(1, 1)
    with torch.no_grad():
        for each in made.parameters():
            each.fill_(by)
    return made


MAKERS: dict[str, Callable[[float], Any]] = {
    "number": lambda k: k,
    "object": Scale,
    "object with slots": Slotted,
    "object with a repr": Silent,
    "object of objects": lambda k: Scale([{"deep": Scale(k)}]),
    "method": lambda k: Scale(k).method,
    "partial": lambda k: partial(mul, by=k),
    "partial of a tensor": lambda k: partial(mul, by=torch.tensor([0.0, k], dtype=torch.float64)),
    "tensor": lambda k: Scale(torch.tensor(k, dtype=torch.float64)),
    "parameter": lambda k: Scale(nn.Parameter(torch.tensor(k, dtype=torch.float64))),
    "sparse": lambda k: Scale(torch.tensor([0.0, k], dtype=torch.float64).to_sparse()),
    "module": lambda k: linear(1 + 2.0**-20 * (k != 1)),
    "set": lambda k: Scale({k, "a", "b"}),
    "array": lambda k: Scale(array("d", [k])),
    "bytes": lambda k: Scale(bytes(200) + str(k).encode()),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_states_tell_objects_apart(kind: str) -> None:
    """States that differ by a millionth, which looks the same in print; and copies that have travelled."""
    make = MAKERS[kind]
    assert canonical(make(1.0)) == canonical(make(1.0))
    assert canonical(make(1.0)) != canonical(make(1.0 + 1e-9))
    assert canonical(pickle.loads(pickle.dumps(make(1.0)))) == canonical(make(1.0))


def test_the_order_of_arguments_by_name_says_nothing() -> None:
    assert canonical(partial(mul, x=1, by=2)) == canonical(partial(mul, by=2, x=1))


def test_objects_that_contain_themselves() -> None:
    def made(by: float) -> Scale:
        one = Scale(by)
        one.own = [one]  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        return one

    assert canonical(made(1.0)) == canonical(made(1.0)) != canonical(made(2.0))


def test_what_cannot_be_pickled_is_of_its_class() -> None:
    assert canonical(Locked(1.0)) == canonical(Locked(2.0)) != canonical(Scale(1.0))


def test_functions_of_others() -> None:
    texts = [repr(canonical(f)) for f in (torch.relu, torch.sigmoid, math.sqrt, len, torch.Tensor.t, str.upper, mul)]
    assert len(set(texts)) == len(texts)
    assert not any(" at 0x" in text for text in texts)
