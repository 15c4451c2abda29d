"""Reading optimizers as a state dict, nested or flat, and bringing a given one into one form. Nothing is written
here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.optim import Optimizer

from fdsd.comms.live import Modules
from fdsd.comms.live_optimizers import LiveOptimizer, live_optimizers
from fdsd.comms.optimizer_templates import read_or_template
from fdsd.comms.optimizers import merged, read_optimizers
from fdsd.compat._errors import LoadError, NoMapping
from fdsd.compat._flats import shown, with_rows_from_elsewhere
from fdsd.compat._options import StateDictOptions
from fdsd.data.columns import as_path
from fdsd.data.errors import Unsupported, listing
from fdsd.data.flat_optim import flatten, unflatten
from fdsd.data.optim import OptimState
from fdsd.data.statedict import as_mapping

__all__ = ["as_osd", "as_state", "is_by_id", "listed", "own_methods", "read_state", "shown_state", "without_unused"]

_METHODS = ("state_dict", "load_state_dict")
_UNUSED = "_fdsd_unused"
"""Marks the momentum that a fresh SGD has not got yet, as memory to load into."""


def listed(optimizers: Any) -> tuple[Optimizer, ...]:
    """Give the optimizers, of which there may be one.

    Raises:
        NoMapping: Something else than optimizers was given.
    """
    if isinstance(optimizers, Optimizer):
        return (optimizers,)
    several: Any = optimizers
    is_one = isinstance(several, Mapping) or not isinstance(several, Iterable)
    given: list[Any] = [optimizers] if is_one else list(cast("Iterable[Any]", several))
    if odd := [type(one).__name__ for one in given if not isinstance(one, Optimizer)]:
        raise NoMapping(f"Optimizers are torch.optim.Optimizer, one or several; these are not: {listing(odd)}.")
    return tuple(given)


@contextmanager
def own_methods(optimizers: Sequence[Optimizer]) -> Generator[None]:
    """Let optimizers that were patched to call a getter or setter have their own methods, while that works."""
    hidden: list[tuple[Optimizer, str, Any]] = []
    for optimizer in optimizers:
        for name in _METHODS:
            method = vars(optimizer).get(name)
            if getattr(method, "__qualname__", "").startswith("_patch_optimizer_state_dict."):
                hidden.append((optimizer, name, vars(optimizer).pop(name)))
    try:
        yield
    finally:
        for optimizer, name, method in hidden:
            vars(optimizer)[name] = method


def shown_state(modules: Modules, optimizers: Sequence[Optimizer], options: StateDictOptions) -> OptimState:
    """Read the state of optimizers as torch shows it. Collective, if FSDP1 has flat parameters."""
    state = with_rows_from_elsewhere(read_state(modules, optimizers), modules)
    return state.replace(slots=shown(state.slots, modules, options))


def read_state(modules: Modules, optimizers: Sequence[Optimizer]) -> OptimState:
    """Read the state of optimizers by name; of a fresh one what it would start from, if that can be told.

    >>> import torch
    >>> from fdsd.comms.modules import read_modules
    >>> linear = torch.nn.Linear(1, 1)
    >>> read_state(read_modules(linear), [torch.optim.LBFGS(linear.parameters())]).slots
    mappingproxy({})
    """
    live_optimizers(modules, optimizers)  # for its checks of all of them together
    states: list[OptimState] = []
    for optimizer in optimizers:
        try:
            state = read_or_template(modules, [optimizer])
            if not optimizer.state:
                _mark_unused(state)
        except Unsupported:  # one that needs a closure, or real gradients, before it has any state
            state = read_optimizers(modules, [optimizer])
        states.append(state)
    return merged(states)


def _dampened(state: OptimState) -> Iterator[tuple[str, Any]]:
    column: Mapping[str, Any] = state.slots.get("momentum_buffer", {})
    for group in state.groups:
        if group.options.get("dampening"):
            yield from [(fqn, column[fqn]) for fqn in group.fqns if fqn in column]


def _mark_unused(state: OptimState) -> None:
    for _, value in _dampened(state):
        if isinstance(value, torch.Tensor):
            setattr(value, _UNUSED, _local(value)._version)


def _local(value: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(value, "_local_tensor", value)
    return found


def _is_unused(value: Any) -> bool:
    marked = getattr(value, _UNUSED, None)
    if marked is None or bool(_local(value).any()):
        return False
    # a shard may be all zeros where others are not, so ranks look whether it was written to
    return type(value) is torch.Tensor or _local(value)._version == marked


def without_unused(state: OptimState) -> OptimState:
    """Take back the momentum that a fresh SGD gave as memory to load into, and into which nothing has been loaded.

    With dampening, zeros are not where SGD starts from: its first gradient counts fully.
    """
    unused = {fqn: None for fqn, value in _dampened(state) if _is_unused(value)}
    if not unused:
        return state
    column = {**state.slots["momentum_buffer"], **unused}
    return state.replace(slots={**state.slots, "momentum_buffer": column})


def as_osd(state: OptimState, options: StateDictOptions) -> dict[str, Any]:
    """Give torch's dict, nested by parameter and group, or flat.

    >>> from fdsd.data.groups import ParamGroup
    >>> as_osd(OptimState({}, (ParamGroup(("w",), {"lr": 0.1}),)), StateDictOptions(flatten_optimizer_state_dict=True))
    {'param_groups.w.lr': 0.1}
    """
    if options.flatten_optimizer_state_dict:
        return flatten(state).to_dict()
    osd = state.to_torch()
    return {"state": osd["state"], "param_groups": osd["param_groups"]}


def as_state(osd: Any, modules: Modules, optimizers: Sequence[Optimizer], options: StateDictOptions) -> OptimState:
    """Read a state dict of optimizers: nested by name or by id, or flat.

    Args:
        osd: The state dict; it is not changed.
        modules: The model.
        optimizers: Those that are to have it.
        options: Only ``strict`` counts; both forms are always taken.

    Raises:
        LoadError: The flat form lacks hyper-parameters, and ``strict``.
        FdsdError: It is neither form.
    """
    given = as_mapping(osd)
    if given is None:
        raise NoMapping(f"Expected optim_state_dict to be dict-like, got {type(osd)}.")
    live = live_optimizers(modules, optimizers)
    if "state" not in given:
        return _from_flat(given, read_state(modules, optimizers), options)
    if is_by_id(given):
        return _by_id(given, live)
    return OptimState.from_torch({"state": given["state"], "param_groups": given.get("param_groups", [])})


def is_by_id(osd: Mapping[str, Any]) -> bool:
    """Tell whether a state dict lists parameters by id, as ``optimizer.state_dict()`` does.

    >>> is_by_id({"state": {}, "param_groups": [{"params": [0]}]}), is_by_id({"state.w.step": 3})
    (True, False)
    """
    groups = osd.get("param_groups", ())
    keys = [key for group in groups for key in (group.get("params", ()))]
    return bool(keys) and all(isinstance(key, int) for key in keys)


def _by_id(osd: Mapping[str, Any], live: Sequence[LiveOptimizer]) -> OptimState:
    """Name the parameters by their order: in all optimizers one after the other, or in the only one."""
    count = sum(len(group["params"]) for group in osd["param_groups"])
    names = [param.fqn for one in live for param in one.params]
    if len(names) != count:
        raise LoadError(
            f"The optimizer state dict lists {count} parameters by id, and the optimizers have {len(names)}. Give what "
            "get_optimizer_state_dict returned, which lists them by name."
        )
    packed = [{key: value for key, value in group.items() if key != "param_names"} for group in osd["param_groups"]]
    return OptimState.from_torch({"state": osd["state"], "param_groups": packed}, names)


def _from_flat(flat: Mapping[str, Any], like: OptimState, options: StateDictOptions) -> OptimState:
    """Read the flat form, whose keys say less than the live state does: slots, groups and their order come from
    that.
    """
    missing = [
        key
        for group in like.groups
        for name in group.fqns
        for option in group.options
        if (key := f"param_groups.{name}.{option}") not in flat
    ]
    found = unflatten(flat, like, strict=False)
    rows = {name for column in found.slots.values() for name in column}
    for slot, column in like.slots.items():
        path = ".".join(map(str, as_path(slot)))
        there: Mapping[str, Any] = found.slots.get(slot, {})
        missing += [f"state.{name}.{path}" for name in column if name in rows and name not in there]
    if missing and options.strict:
        raise LoadError(
            f"Missing key(s) in optimizer state_dict: {listing(missing)}. Files of older versions may lack "
            "hyper-parameters: "
            "StateDictOptions(strict=False) keeps the optimizer's own values."
        )
    return found if not missing else _completed(found, like)


def _completed(found: OptimState, like: OptimState) -> OptimState:
    """Fill in the slots that parameters with state lack."""
    rows = {name for column in found.slots.values() for name in column}
    slots: dict[Any, dict[str, Any]] = {slot: dict(column) for slot, column in found.slots.items()}
    for slot, column in like.slots.items():
        into = slots.setdefault(slot, {})
        into.update({name: value for name, value in column.items() if name in rows and name not in into})
    return found.replace(slots=slots)
