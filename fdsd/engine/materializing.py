"""Reading lazy tensors into memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar, overload

import torch
from attrs import evolve

from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.lazy import Lazy
from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.data.optim import OptimState
from fdsd.data.sizes import parse_size
from fdsd.data.spec import TensorSpec, is_exact
from fdsd.data.statedict import StateDict
from fdsd.data.ties import tie_key
from fdsd.data.train import TrainState
from fdsd.data.values import is_mapping

__all__ = ["materialize"]

S = TypeVar("S", OptimState, TrainState)


@overload
def materialize(state: S, *, device: torch.device | str | None = None, budget: int | str | None = None) -> S: ...
@overload
def materialize(
    state: Mapping[str, Any], *, device: torch.device | str | None = None, budget: int | str | None = None
) -> StateDict[Any]: ...
def materialize(state: Any, *, device: torch.device | str | None = None, budget: int | str | None = None) -> Any:
    """Read every lazy tensor of a state into memory; what is here already stays as it is.

    Args:
        state: A mapping of names to leaves, an ``OptimState`` or a ``TrainState``.
        device: Where the tensors go; by default lazy ones to the CPU, and others stay where they are.
        budget: Bytes for scratch beside the result, as a number or like ``"256MB"``; no limit by default.

    Returns:
        The same kind of state; names that share a lazy tensor share the tensor.

    Raises:
        OverBudget: Before anything is read: an operation needs its whole input at once, and more than the budget.
        SpecMismatch: Some leaves are specs, which have no data.

    Law: ``materialize(f(defer(x)))`` equals ``f(x)``.

    >>> from fdsd.algebra.apply import defer
    >>> materialize(defer({"w": torch.ones(2)}))["w"]
    tensor([1., 1.])
    """
    limit = None if budget is None else parse_size(budget, "budget")
    if isinstance(state, TrainState):
        optim = None if state.optim is None else materialize(state.optim, device=device, budget=budget)
        return evolve(state, model=materialize(state.model, device=device, budget=budget), optim=optim)
    if isinstance(state, OptimState):
        slots = {slot: _materialize(column, device, limit) for slot, column in state.slots.items()}
        return state.replace(slots=slots)
    if not is_mapping(state):
        raise Unsupported(f"materialize: it reads states and mappings of names to leaves, not {type(state).__name__}.")
    return _materialize(state, device, limit)


def _materialize(state: Mapping[str, Any], device: torch.device | str | None, budget: int | None) -> StateDict[Any]:
    if hollow := [name for name, leaf in state.items() if isinstance(leaf, TensorSpec)]:
        raise SpecMismatch(f"materialize: {listing(hollow)} are specs and have no data. Open the checkpoint itself.")
    lazy = {name: leaf for name, leaf in state.items() if isinstance(leaf, Lazy)}
    tensors = dict(zip(lazy, evaluate(list(lazy.values()), budget=budget, names=list(lazy)), strict=True))
    moved: dict[Hashable, torch.Tensor] = {}
    made: dict[str, Any] = {}
    for name, leaf in state.items():
        value: Any = tensors.get(name, leaf)
        if device is not None and is_exact(value):
            key = tie_key(value)
            if key not in moved:
                moved[key] = value.detach().to(device)
            value = moved[key]
        made[name] = value
    return StateDict.trusted(made, getattr(state, "_metadata", None), getattr(state, "_history", ()))
