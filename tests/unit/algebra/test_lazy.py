"""``Lazy``: it shows its spec, refuses to be used as data and names the remedy, and copies and pickles."""

from __future__ import annotations

import copy
import operator
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import AddScalar, Call, Cast, Permute
from fdsd.data.errors import FdsdError, LazyError
from tests.helpers.checks import spec
from tests.helpers.functions import halves
from tests.helpers.tensors import same_bytes

X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def lazy() -> Lazy:
    made = apply(Permute((1, 0)), defer_leaf(X))
    assert isinstance(made, Lazy)
    return made


def test_it_shows_its_spec(lazy: Lazy) -> None:
    assert lazy.spec == spec(3, 2)
    assert (lazy.shape, lazy.dtype, lazy.ndim, lazy.numel()) == ((3, 2), torch.float32, 2, 6)
    assert repr(lazy) == str(lazy) == "Lazy(Permute, float32[3, 2])"


REFUSED: dict[str, Callable[[Any], object]] = {
    "truth": bool,
    "not": operator.not_,
    "len": len,
    "iter": iter,
    "list": list,
    "unpacking": lambda x: [*x],
    "index": lambda x: x[0],
    "slice": lambda x: x[:, 1],
    "mask": lambda x: x[x],
    "in": lambda x: 1 in x,
    "attribute": lambda x: x.T,
    "method": lambda x: x.to(torch.float16),
    "data_ptr": lambda x: x.data_ptr(),
    "torch function": torch.relu,
    "torch function of two": lambda x: torch.add(x, 1),
    "torch function of a list": lambda x: torch.cat([x, x]),
    "functional": torch.nn.functional.softmax,
    "tensor first": lambda x: torch.matmul(X, x),
    "tensor method": X.add,
    "tensor operator": lambda x: X + x,
}


@pytest.mark.parametrize("name", REFUSED)
def test_using_it_as_data_names_materialize(lazy: Lazy, name: str) -> None:
    with pytest.raises(LazyError, match=r"lazy.*materialize") as caught:
        REFUSED[name](lazy)
    assert isinstance(caught.value, FdsdError | TypeError | AttributeError)


ARITHMETIC: dict[str, Callable[[Any], object]] = {
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "sub": lambda x: x - 1,
    "rsub": lambda x: 1 - x,
    "mul": lambda x: x * 2,
    "rmul": lambda x: 2 * x,
    "truediv": lambda x: x / 2,
    "matmul": lambda x: x @ X,
    "pow": lambda x: x**2,
    "neg": lambda x: -x,
    "lazy and tensor": lambda x: x + X,
    "float": float,
    "int": int,
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_names_materialize(lazy: Lazy, name: str) -> None:
    with pytest.raises(LazyError, match=r"lazy.*materialize"):
        ARITHMETIC[name](lazy)


def test_it_compares_by_identity(lazy: Lazy) -> None:
    other = apply(Permute((1, 0)), defer_leaf(X))
    assert lazy == lazy and lazy != other and lazy != 3
    assert len({lazy, lazy, other}) == 2
    assert weakref.ref(lazy)() is lazy


def test_questions_about_it_are_answered(lazy: Lazy) -> None:
    assert not hasattr(lazy, "data_ptr") and not hasattr(lazy, "__array__")
    assert getattr(lazy, "grad", None) is None
    assert hasattr(lazy, "shape") and hasattr(lazy, "op")
    assert not isinstance(lazy, torch.Tensor)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_and_pickles(lazy: Lazy, duplicate: Callable[[Lazy], Lazy]) -> None:
    node = apply(AddScalar(1.0), apply(Cast(torch.float64), lazy))
    made = duplicate(node)
    assert made is not node and made.spec == node.spec and made.op == node.op
    assert same_bytes(evaluate([made])[0], evaluate([node])[0])


def test_a_shallow_copy_shares_its_inputs(lazy: Lazy) -> None:
    assert copy.copy(lazy).inputs is lazy.inputs


def test_an_unfinished_one_has_no_attributes() -> None:
    """Copying and unpickling make one first and fill it then; a debugger may look in between."""
    with pytest.raises(AttributeError):
        repr(Lazy.__new__(Lazy))


def test_the_spec_is_inferred_if_not_given() -> None:
    x = defer_leaf(X)
    assert Lazy(Permute((1, 0)), [x]).spec == spec(3, 2)
    assert Lazy(Call(halves, (spec(3), spec(3))), [x]).outputs == (spec(3), spec(3))


def test_several_results_are_no_single_tensor() -> None:
    node = Lazy(Call(halves, (spec(3), spec(3))), [defer_leaf(X)])
    for ask in (lambda: node.shape, lambda: node.dtype, lambda: node.ndim, node.numel):
        with pytest.raises(FdsdError, match="2 tensors"):
            ask()
    assert repr(node) == "Lazy(Call, float32[3], float32[3])"


def test_long_chains_are_freed_without_recursion() -> None:
    node = defer_leaf(X)
    for _ in range(100_000):
        node = apply(AddScalar(1.0), node)
    del node
