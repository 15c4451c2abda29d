"""Reading lazy tensors into memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar, overload

import torch
from attrs import evolve

from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.lazy import Lazy
from fdsd.comms.alone import world_for
from fdsd.data.devices import parse_device
from fdsd.data.errors import RankDisagreement, SpecMismatch, Unsupported, listing
from fdsd.data.optim import OptimState
from fdsd.data.protocols import World
from fdsd.data.sizes import parse_size
from fdsd.data.spec import TensorSpec, is_exact
from fdsd.data.statedict import StateDict
from fdsd.data.ties import tie_key
from fdsd.data.train import TrainState
from fdsd.data.values import is_mapping
from fdsd.engine.gathering import gather_leaves, gather_optim
from fdsd.engine.unions import everyone, together
from fdsd.layout.sharded import Sharded

__all__ = ["materialize"]

S = TypeVar("S", OptimState, TrainState)


@overload
def materialize(
    state: S, *, group: Any = None, device: torch.device | str | None = None, budget: int | str | None = None
) -> S: ...
@overload
def materialize(
    state: Mapping[str, Any],
    *,
    group: Any = None,
    device: torch.device | str | None = None,
    budget: int | str | None = None,
) -> StateDict[Any]: ...
def materialize(
    state: Any, *, group: Any = None, device: torch.device | str | None = None, budget: int | str | None = None
) -> Any:
    """Read every lazy tensor of a state into memory; what is here already stays as it is.

    Args:
        state: A mapping of names to leaves, an ``OptimState`` or a ``TrainState``.
        group: The process group that works together; all of its ranks call this. Then tensors of any kind, DTensors
            too, become whole tensors on every rank, names that only some ranks have included. What ``gather(to=rank)``
            was asked of is on that rank alone; what was laid out by ``reshard`` is ``Sharded``, with this rank's shard.
        device: Where the tensors go; by default lazy ones to the CPU, and others stay where they are.
        budget: Bytes for scratch beside the result, as a number or like ``"256MB"``; no limit by default. With a group
            the smallest of all ranks counts.

    Returns:
        The same kind of state; names that share a lazy tensor share the tensor. A ``Sharded`` leaf stays one, made of
        tensors.

    Raises:
        OverBudget: Before anything is read: an operation needs its whole input at once, and more than the budget.
        SpecMismatch: Some leaves are specs, which have no data.
        RankDisagreement: The ranks know different things of one name, or one of them failed; on all ranks.

    Law: ``materialize(f(defer(x)))`` equals ``f(x)``.

    >>> from fdsd.algebra.apply import defer
    >>> materialize(defer({"w": torch.ones(2)}))["w"]
    tensor([1., 1.])
    """
    if group is not None:
        return _materialize_over(state, world_for(group), device, budget)
    limit, device = _check(state, budget, device)
    if isinstance(state, TrainState):
        optim = None if state.optim is None else materialize(state.optim, device=device, budget=budget)
        return evolve(state, model=_materialize(state.model, device, limit), optim=optim)
    if isinstance(state, OptimState):
        slots = {slot: _materialize(column, device, limit) for slot, column in state.slots.items()}
        return state.replace(slots=slots)
    return _materialize(state, device, limit)


def _check(
    state: Any, budget: int | str | None, device: torch.device | str | None
) -> tuple[int | None, torch.device | None]:
    if not (isinstance(state, OptimState | TrainState) or is_mapping(state)):
        raise Unsupported(
            f"materialize: it reads states and mappings of names to leaves, not {type(state).__name__}. For a module, "
            "give capture(module); for a file, open(path)."
        )
    return None if budget is None else parse_size(budget, "budget"), parse_device("materialize", device)


def _materialize_over(state: Any, world: World, device: torch.device | str | None, budget: int | str | None) -> Any:
    """Bring a state together over a group; collective."""
    limit, where = together(world, "materialize", lambda: _check(state, budget, device))
    optim = state.optim if isinstance(state, TrainState) else state if isinstance(state, OptimState) else None
    kind = next((kind.__name__ for kind in (TrainState, OptimState) if isinstance(state, kind)), "mapping")
    told = everyone(world, (kind, optim is not None), "materialize")
    if len({kind for kind, _ in told}) > 1:
        shown = ", ".join([f"rank {rank}: a {kind}" for rank, (kind, _) in zip(world.ranks, told, strict=True)][:10])
        raise RankDisagreement(f"materialize: the ranks give states of different kinds ({shown}). Give one kind.")
    how: dict[str, Any] = {"device": where, "budget": limit, "keep": True}
    if any(has_optim for _, has_optim in told):
        optim = gather_optim(OptimState() if optim is None else optim, world, **how)
    if isinstance(state, OptimState):
        return optim
    model = state.model if isinstance(state, TrainState) else state
    made = gather_leaves(model, world, **how)
    whole = StateDict.trusted(made, getattr(model, "_metadata", None), getattr(model, "_history", ()))
    return evolve(state, model=whole, optim=optim) if isinstance(state, TrainState) else whole


def _materialize(state: Mapping[str, Any], device: torch.device | str | None, budget: int | None) -> StateDict[Any]:
    parts = {name: _parts(leaf) for name, leaf in state.items()}
    if hollow := [name for name, some in parts.items() if any(isinstance(part, TensorSpec) for part in some)]:
        raise SpecMismatch(f"materialize: {listing(hollow)} are specs and have no data. Open the checkpoint itself.")
    lazy = [(name, part) for name, some in parts.items() for part in some if isinstance(part, Lazy)]
    read = evaluate([part for _, part in lazy], budget=budget, names=[name for name, _ in lazy])
    tensors = {id(part): tensor for (_, part), tensor in zip(lazy, read, strict=True)}
    moved: dict[Hashable, torch.Tensor] = {}
    made: dict[str, Any] = {}
    laid: dict[int, Sharded] = {}
    for name, leaf in state.items():
        values = [_moved(tensors.get(id(part), part), device, moved) for part in parts[name]]
        if not isinstance(leaf, Sharded):
            made[name] = values[0]
        elif all(value is part for value, part in zip(values, parts[name], strict=True)):
            made[name] = leaf
        else:
            if id(leaf) not in laid:
                laid[id(leaf)] = leaf.with_parts(values)
            made[name] = laid[id(leaf)]
    return StateDict.trusted(made, getattr(state, "_metadata", None), getattr(state, "_history", ()))


def _parts(leaf: Any) -> tuple[Any, ...]:
    """Give what of a leaf is to be read: of a sharded one what it is made of."""
    return leaf.parts if isinstance(leaf, Sharded) else (leaf,)


def _moved(value: Any, device: torch.device | str | None, moved: dict[Hashable, torch.Tensor]) -> Any:
    if device is None or not is_exact(value):
        return value
    key = tie_key(value)
    if key not in moved:
        moved[key] = value.detach().to(device)
    return moved[key]
