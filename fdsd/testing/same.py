"""Whether two states are the same, with a message that shows all differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fdsd.algebra.dtypes import movable
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.lazy import Lazy
from fdsd.data.errors import FdsdError
from fdsd.data.optim import OptimState
from fdsd.data.spec import TensorSpec, is_exact, spec_of
from fdsd.data.statedict import StateDict
from fdsd.data.ties import ties
from fdsd.data.train import TrainState
from fdsd.data.values import is_dict, is_sequence, same_value
from fdsd.engine.diffing import diff
from fdsd.layout.sharded import Sharded

__all__ = ["assert_same", "same_tensors", "tied_names"]


def assert_same(
    actual: Any, expected: Any, *, order: bool = False, tied: bool = True, nans_equal: bool = False
) -> None:
    """Assert that two states, or two tensors, are the same: names, shapes, dtypes and bytes.

    Args:
        actual: What came out: a tensor, a mapping of names to leaves, an ``OptimState`` or a ``TrainState``. Lazy
            tensors are read; sharded ones must have the same layout, and are compared as a whole.
        expected: What should have come out, of the same kind (any mapping will do for a state dict).
        order: Whether names must stand in the same order, those in parameter groups too.
        tied: Whether the same names must be tied. (Tensors without elements are not looked at.)
        nans_equal: Whether NaNs are equal whatever their bits, as after a cast.

    Raises:
        AssertionError: Anything differs; the message lists all that does.

    >>> import torch
    >>> assert_same({"w": torch.ones(2)}, {"w": torch.ones(2)})
    >>> assert_same({"w": torch.ones(2)}, {"w": torch.zeros(2), "b": torch.ones(1)})
    Traceback (most recent call last):
        ...
    AssertionError: The states differ (a is actual, b is expected):
    + b: only in b
    ~ w: 2 of 2 elements differ, max abs 1, max rel inf
    """
    if _kind(actual) != _kind(expected):
        raise AssertionError(f"A {_kind(expected)} was expected, not a {_kind(actual)}.")
    left, right = _flat(actual, order), _flat(expected, order)
    wrong = [name for name in left if name in right and not _same_leaf(left[name], right[name], nans_equal)]
    faults: list[str] = []
    if wrong or left.keys() != right.keys():
        faults.append(_differences(left, right, wrong))
    if order and not faults and list(left) != list(right):
        faults.append(f"the order of names differs:\n  actual   {list(left)}\n  expected {list(right)}")
    if tied and (a := tied_names(left)) != (b := tied_names(right)):
        faults += [f"tied in actual only: {', '.join(sorted(group))}" for group in sorted(map(sorted, a - b))]
        faults += [f"tied in expected only: {', '.join(sorted(group))}" for group in sorted(map(sorted, b - a))]
    if faults:
        raise AssertionError("\n".join(["The states differ (a is actual, b is expected):", *faults]))


def _kind(state: Any) -> str:
    if isinstance(state, OptimState | TrainState):
        return type(state).__name__
    if isinstance(state, Mapping):
        return "mapping of names to leaves"
    return "tensor" if spec_of(state) is not None else type(state).__name__


def _flat(state: Any, order: bool) -> dict[str, Any]:
    """Give all leaves by a path, with lazy tensors read."""
    made = dict(_paths(state, order))
    lazy = {path: leaf for path, leaf in made.items() if isinstance(leaf, Lazy)}
    return {**made, **dict(zip(lazy, evaluate(list(lazy.values())), strict=True))}


def _paths(state: Any, order: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(state, TrainState):
        yield from state.model.items()
        if state.optim is not None:
            yield from [(f"optim.{path}", leaf) for path, leaf in _paths(state.optim, order)]
        yield from [(f"extra.{key}", value) for key, value in state.extra.items()]
    elif isinstance(state, OptimState):
        for slot, column in state.slots.items():
            yield from [(f"slots[{slot!r}].{fqn}", leaf) for fqn, leaf in column.items()]
        for number, group in enumerate(state.groups):
            yield f"groups[{number}].fqns", (group.fqns if order else tuple(sorted(group.fqns)), group.named)
            yield from [(f"groups[{number}].{key}", value) for key, value in group.options.items()]
        yield from [(f"extra.{key}", value) for key, value in state.extra.items()]
    elif isinstance(state, Mapping):
        yield from state.items()
    else:
        yield "tensor", state


def _same_leaf(a: Any, b: Any, nans_equal: bool) -> bool:
    if a is b:
        return True
    if isinstance(a, Sharded) and isinstance(b, Sharded):
        return a.layout == b.layout and _same_leaf(_whole(a), _whole(b), nans_equal)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_tensors(a, b, nans_equal=nans_equal)
    if is_sequence(a) and is_sequence(b):
        items = list(zip(a, b, strict=False))
        return type(a) is type(b) and len(a) == len(b) and all(_same_leaf(x, y, nans_equal) for x, y in items)
    if is_dict(a) and is_dict(b):
        return a.keys() == b.keys() and all(_same_leaf(value, b[key], nans_equal) for key, value in a.items())
    return same_value(a, b)


def _whole(leaf: Sharded) -> Any:
    whole = leaf.whole()
    return evaluate([whole])[0] if isinstance(whole, Lazy) else whole


def same_tensors(a: torch.Tensor, b: torch.Tensor, *, nans_equal: bool = False) -> bool:
    """Tell whether two tensors have one shape, one dtype and the same bytes.

    >>> same_tensors(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    if a.shape != b.shape or a.dtype != b.dtype or not (is_exact(a) and is_exact(b)):
        return False
    if a.is_meta or b.is_meta:
        return a.is_meta and b.is_meta
    x, y = _bytes(a), _bytes(b)
    if torch.equal(x, y):
        return True
    if not nans_equal or not (a.dtype.is_floating_point or a.dtype.is_complex) or not a.numel():
        return False
    both = _is_nan(a) & _is_nan(b)
    return torch.equal(x.view(-1, a.dtype.itemsize)[~both], y.view(-1, a.dtype.itemsize)[~both])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg()
        # a copy, since one element of any stride is contiguous in the eyes of torch, but no view of bytes
        return movable(plain).clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).cpu()


def _is_nan(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
    return tensor.detach().reshape(-1).to(wide).isnan().cpu()


def _differences(left: Mapping[str, Any], right: Mapping[str, Any], wrong: list[str]) -> str:
    names = [*left, *[name for name in right if name not in left]]
    concerned = {name for name in names if name in wrong or name not in left or name not in right}
    try:
        found = diff(_only(left, concerned), _only(right, concerned))
    except FdsdError as error:  # leaves that fdsd cannot read
        return f"{', '.join(sorted(concerned))}: {error}"
    told = {*found.only_a, *found.only_b, *found.specs, *found.values, *found.objects}
    rest = [f"~ {name}: {_text(left[name])} became {_text(right[name])}" for name in wrong if name not in told]
    return "\n".join([*([] if found.same else [str(found)]), *rest])


def _only(state: Mapping[str, Any], names: set[str]) -> StateDict[Any]:
    return StateDict({name: leaf for name, leaf in state.items() if name in names})


def _text(leaf: Any) -> str:
    if isinstance(leaf, TensorSpec):
        return f"the spec {leaf}"
    if isinstance(leaf, Sharded):
        return str(leaf)
    spec = spec_of(leaf)
    return repr(leaf) if spec is None else f"a tensor {spec}"


def tied_names(state: Mapping[str, Any]) -> set[frozenset[str]]:
    """Give the sets of names that hold one tensor; tensors without elements are left out."""
    filled = {name: leaf for name, leaf in state.items() if (spec := spec_of(leaf)) is not None and spec.numel}
    return {frozenset(group) for group in ties(filled)}
