"""Reading live optimizers: their state by columns and FQN, the values by reference.

No optimizer is stepped and nothing of it changes. Writing, and the state of fresh optimizers, live beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from fdsd.comms.live import Modules
from fdsd.comms.live_optimizers import LiveOptimizer, LiveParam, live_optimizers
from fdsd.comms.optimizer_flats import spread
from fdsd.comms.optimizer_layouts import columns_as_laid
from fdsd.data.columns import Slot, as_slot, walk
from fdsd.data.errors import NameConflict, SpecMismatch, UnknownName, Unsupported, add_note, listing, plural
from fdsd.data.groups import ParamGroup
from fdsd.data.optim import OptimState
from fdsd.data.statedict import StateDict
from fdsd.data.values import is_mapping, is_sequence, same_value

__all__ = ["columns_of", "merged", "raw_state", "read_optimizers", "state_of"]

Columns = dict[Slot, dict[str, Any]]


def read_optimizers(modules: Modules, optimizers: Optimizer | Iterable[Optimizer]) -> OptimState:
    """Read the state of one or several optimizers, by the names that the parameters have in the model.

    Values are the live ones, not copies. An optimizer that has not stepped yet has no state; ``template_of`` tells
    what it will be. State dict hooks, and a ``state_dict`` method of the optimizer's own, run as they would for
    ``optimizer.state_dict()``; nothing else is called.

    Args:
        modules: The model, or its parts.
        optimizers: One optimizer or several; their groups follow each other.

    Returns:
        The merged state. A tied parameter goes by its first name. Parameters in FSDP1's flat parameters have
        expressions over the local shards; those of DTensors are DTensors as the optimizer keeps them.

    Raises:
        UnknownName: Parameters of an optimizer are not in the model.
        NameConflict: A parameter is in two optimizers, or they differ in entries that belong to no parameter.
        Unsupported: State that is keyed by neither parameters nor strings.

    Law: the optimizers are the same after, and ``write_optimizers(read_optimizers(m, o), m, o)`` changes nothing.

    >>> from fdsd.comms.modules import read_modules
    >>> model = torch.nn.Linear(2, 1)
    >>> adam = torch.optim.Adam(model.parameters(), lr=0.1)
    >>> model(torch.ones(2)).sum().backward()
    >>> adam.step()
    >>> state = read_optimizers(read_modules(model), adam)
    >>> list(state.slots), state.groups[0].fqns
    (['step', 'exp_avg', 'exp_avg_sq'], ('weight', 'bias'))
    >>> state.slots["exp_avg"]["bias"] is adam.state[model.bias]["exp_avg"]
    True
    """
    return merged([state_of(live, modules) for live in live_optimizers(modules, optimizers)])


def state_of(live: LiveOptimizer, modules: Modules) -> OptimState:
    """Read the state of one optimizer whose parameters are named."""
    return spread(raw_state(live, modules), live)


def raw_state(live: LiveOptimizer, modules: Modules) -> OptimState:
    """Read the state of one optimizer by parameter objects: a flat parameter goes by the first name in it."""
    if live.saves_its_own_way:
        return columns_as_laid(_state_of_dict(live, modules), {param.fqn: param.tensor for param in live.params})
    strays: list[Any] = []
    rows = {key: row for key, row in live.state.items() if not isinstance(key, torch.Tensor)}
    own = [param for param in live.params if param.tensor in live.state]
    if len(own) + len(rows) != len(live.state):
        known = {id(param.tensor) for param in own}
        strays = [key for key in live.state if isinstance(key, torch.Tensor) and id(key) not in known]
        raise UnknownName(
            f"{live.label} has state for {plural(len(strays), 'parameter')} in none of its groups, of shapes "
            f"{listing([tuple(key.shape) for key in strays])}. Remove it from optimizer.state, or add the parameters."
        )
    columns = columns_of([(param, live.row(param)) for param in own])
    _add_strays(columns, rows, live.label)
    groups = [_group(group.options, group.params) for group in live.groups]
    return OptimState(_trusted(columns), groups)


def columns_of(rows: Iterable[tuple[LiveParam, Any]]) -> Columns:
    """Sort the state of parameters into columns."""
    columns: Columns = {}
    for param, row in rows:
        _sort_in(columns, param.fqn, row)
    return columns


def _sort_in(columns: Columns, fqn: str, row: Any) -> None:
    if is_mapping(row) and row:
        for key, value in row.items():
            if type(key) is str and type(value) not in (dict, list, tuple):
                columns.setdefault(key, {})[fqn] = value
            else:
                for path, leaf in walk(value, (key,)):
                    columns.setdefault(as_slot(path), {})[fqn] = leaf
    else:
        columns.setdefault((), {})[fqn] = {} if is_mapping(row) else row


def _add_strays(columns: Columns, rows: Mapping[Any, Any], label: str) -> None:
    """Sort in state that belongs to no parameter."""
    if odd := [key for key in rows if not isinstance(key, str)]:
        raise Unsupported(f"{label} has state under {listing(odd)}: keys are parameters, or strings.")
    for key, row in rows.items():
        _sort_in(columns, key, row)


def _trusted(columns: Columns) -> dict[Slot, StateDict[Any]]:
    return {slot: StateDict.trusted(column) for slot, column in columns.items()}


def _group(options: Mapping[str, Any], params: Iterable[LiveParam]) -> ParamGroup:
    fqns = [param.fqn for param in params]
    kept = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    return ParamGroup(fqns, kept, named="param_names" in options)


# -- optimizers with a state dict of their own -----------------------------------------------------------------------


def _state_of_dict(live: LiveOptimizer, modules: Modules) -> OptimState:
    """Read what ``optimizer.state_dict()`` gives."""
    given: Any = live.optimizer.state_dict()
    params = live.params
    names: list[str] | None = [param.fqn for param in params]
    groups: Any = given.get("param_groups") if is_mapping(given) else None
    if is_sequence(groups) and all(map(is_mapping, groups)):
        keys: list[Any] = [key for group in groups for key in group.get("params", ())]
        if keys and all(isinstance(key, str) for key in keys):
            names = None
        given = {**given, "param_groups": [_without_names(group) for group in groups]}
    try:
        state = OptimState.from_torch(given, names)
    except (UnknownName, SpecMismatch, NameConflict, Unsupported) as error:
        add_note(error, f"This is what state_dict() of {live.label} gave; it has a state_dict of its own, or hooks.")
        raise
    if names is None:
        if any(param.views for param in params):
            raise Unsupported(
                f"{live.label} has parameters that FSDP has flattened, and its state dict has names instead of ids: "
                "which parts of flat state they mean cannot be told. Remove the hook that puts names in."
            )
        return _renamed(state, modules)
    named = ["param_names" in group.options for group in live.groups]
    if len(named) != len(state.groups):  # a hook has made other groups
        return state
    pairs = zip(state.groups, named, strict=True)
    return state.replace(groups=[ParamGroup(group.fqns, group.options, named=own) for group, own in pairs])


def _without_names(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "param_names"}


def _renamed(state: OptimState, modules: Modules) -> OptimState:
    """Bring names that a hook has put in to the first names of the model."""

    def first(fqn: str) -> str:
        live = modules.tensors.get(fqn)
        return fqn if live is None or live.tied_to is None else live.tied_to

    slots = {slot: {first(fqn): value for fqn, value in column.items()} for slot, column in state.slots.items()}
    groups = [ParamGroup([first(fqn) for fqn in g.fqns], g.options, named=g.named) for g in state.groups]
    return state.replace(slots=slots, groups=groups)


# -- several optimizers ----------------------------------------------------------------------------------------------


def merged(states: Sequence[OptimState]) -> OptimState:
    """Put the states of several optimizers together: their groups follow each other.

    Raises:
        NameConflict: They differ in entries that belong to no parameter.
    """
    if len(states) == 1:
        return states[0]
    columns: Columns = {}
    extra: dict[str, Any] = {}
    clashes: dict[str, None] = {}
    for state in states:
        for slot, column in state.slots.items():
            into = columns.setdefault(slot, {})
            clashes.update(dict.fromkeys([k for k in column if k in into and not same_value(into[k], column[k])]))
            into.update(column)
        clashes.update(dict.fromkeys([k for k, v in state.extra.items() if k in extra and not same_value(extra[k], v)]))
        extra.update(state.extra)
    if clashes:
        raise NameConflict(
            f"Several optimizers have different entries under {listing(clashes)}, which belong to no parameter, and a "
            "merged state has one place for each. Read these optimizers one by one."
        )
    return OptimState(_trusted(columns), [group for state in states for group in state.groups], extra=extra)
