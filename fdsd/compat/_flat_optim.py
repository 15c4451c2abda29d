"""The flat form of the state of optimizers, both ways, as torch has it: what it does not say, a live state says.

The names of parameters are known when it is read, so that even options with dots in their names can be told from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from attrs import evolve

from fdsd.compat._errors import LoadError
from fdsd.compat._options import StateDictOptions
from fdsd.data.columns import as_path, join_sequences
from fdsd.data.errors import Unsupported, listing
from fdsd.data.flat_optim import flatten, unflatten
from fdsd.data.groups import ParamGroup
from fdsd.data.optim import OptimState

__all__ = ["flat_of", "state_of_flat"]

_GROUPS = "param_groups."
_DOT = "\u2024"  # stands for a dot in the name of an option, and looks like one in errors


def flat_of(state: OptimState) -> dict[str, Any]:
    """Give the flat form: ``state.<fqn>.<slot>``, and ``param_groups.<fqn>.<option>`` for every option.

    Raises:
        Unsupported: An option with a dot in its name would be read as one of another parameter.
        NameConflict: Two values would have one name.

    >>> flat_of(OptimState({}, (ParamGroup(("w",), {"my.lr": 0.2}),)))
    {'param_groups.w.my.lr': 0.2}
    """
    hidden = _renamed(state, ".", _DOT)
    made = flatten(hidden, whole_sequences=True).to_dict()
    if hidden is state:
        return made
    names = set(state.fqns)
    unclear = [
        f"{name}.{option}"
        for group in state.groups
        for option in group.options
        for name in group.fqns
        if _name_in(f"{name}.{option}", names) != name
    ]
    if unclear:
        raise Unsupported(
            "flatten_optimizer_state_dict: options with a dot in their name would be read as those of other "
            f"parameters: {listing(unclear)}. Rename them in the groups first, or use the nested form."
        )
    return {key.replace(_DOT, ".") if key.startswith(_GROUPS) else key: value for key, value in made.items()}


def _renamed(state: OptimState, old: str, new: str) -> OptimState:
    """Replace a letter in the names of options."""
    if not any(old in str(option) for group in state.groups for option in group.options):
        return state
    return state.replace(groups=[_group_renamed(group, old, new) for group in state.groups])


def _group_renamed(group: ParamGroup, old: str, new: str) -> ParamGroup:
    options: Mapping[Any, Any] = group.options
    renamed = {key.replace(old, new) if isinstance(key, str) else key: value for key, value in options.items()}
    return evolve(group, options=renamed)


def _name_in(rest: str, names: Collection[str]) -> str | None:
    """Give the longest of some names with which ``<fqn>.<option>`` begins."""
    at = rest.rfind(".")
    while at >= 0:
        if rest[:at] in names:
            return rest[:at]
        at = rest.rfind(".", 0, at)
    return None


def state_of_flat(
    flat: Mapping[str, Any], like: OptimState, known: Collection[str], options: StateDictOptions
) -> OptimState:
    """Read the flat form, whose keys say less than the live state does: slots, groups and their order come from that.

    Args:
        flat: The flat form.
        like: The live state.
        known: The names that the model has.
        options: Only ``strict`` counts.

    Raises:
        LoadError: It lacks hyper-parameters, or slots of a parameter of which it has others, and ``strict``.
    """
    missing = _missing_options(flat, like)
    names = set(like.fqns)
    if not _listed(flat) <= names:
        flat = {_with_hidden_dots(key, names): value for key, value in flat.items()}
    found = unflatten(flat, _renamed(like, ".", _DOT), strict=False)
    found = _renamed(found, _DOT, ".")
    missing += _missing_slots(found, like)
    if missing and options.strict:
        raise LoadError(
            f"Missing key(s) in optimizer state_dict: {listing(missing)}. Files of older versions may lack "
            "hyper-parameters: StateDictOptions(strict=False) keeps the optimizer's own values."
        )
    return _with_strays(found if not missing else _completed(found, like), flat, {*known, *names})


def _listed(flat: Mapping[str, Any]) -> set[str]:
    """List the parameters of which there are options."""
    return {key.rpartition(".")[0][len(_GROUPS) :] for key in flat if key.startswith(_GROUPS)}


def _with_hidden_dots(key: str, names: Collection[str]) -> str:
    """Replace the dots in the name of an option, if the name of its parameter is known."""
    rest = key.removeprefix(_GROUPS)
    name = _name_in(rest, names) if key.startswith(_GROUPS) else None
    return key if name is None else f"{_GROUPS}{name}.{rest[len(name) + 1 :].replace('.', _DOT)}"


def _missing_options(flat: Mapping[str, Any], like: OptimState) -> list[str]:
    """List the keys of the groups of a live state that the flat form lacks."""
    return [
        key
        for group in like.groups
        for name in group.fqns
        for option in group.options
        if (key := f"{_GROUPS}{name}.{option}") not in flat
    ]


def _missing_slots(found: OptimState, like: OptimState) -> list[str]:
    """List the slots of a live state that parameters lack which have others."""
    missing: list[str] = []
    rows = {name for column in found.slots.values() for name in column}
    whole = join_sequences(found.slots)
    for slot, column in join_sequences(like.slots).items():
        path = ".".join(map(str, as_path(slot)))
        there: Mapping[str, Any] = whole.get(slot, {})
        missing += [f"state.{name}.{path}" for name in column if name in rows and name not in there]
    return missing


def _with_strays(found: OptimState, flat: Mapping[str, Any], known: set[str]) -> OptimState:
    """Add what belongs to no parameter: neither the model nor a group has its name."""
    listed = _listed(flat)
    there = {name for column in found.slots.values() for name in column}
    names = known | listed | there
    slots: dict[Any, dict[str, Any]] = {}
    for key, value in flat.items() if listed else ():
        if not key.startswith("state."):
            continue
        rest = key.removeprefix("state.")
        name, dot, slot = rest.rpartition(".")
        if name in names:
            continue  # nearly all do
        if {rest, *[rest[:i] for i, letter in enumerate(rest) if letter == "."]}.isdisjoint(names):
            slots.setdefault(slot if dot else (), {})[name if dot else rest] = value
    if not slots:
        return found
    return found.replace(slots={**found.slots, **{k: {**found.slots.get(k, {}), **own} for k, own in slots.items()}})


def _completed(found: OptimState, like: OptimState) -> OptimState:
    """Fill in the slots that parameters with state lack."""
    rows = {name for column in found.slots.values() for name in column}
    slots: dict[Any, dict[str, Any]] = join_sequences(found.slots)
    for slot, column in join_sequences(like.slots).items():
        into = slots.setdefault(slot, {})
        into.update({name: value for name, value in column.items() if name in rows and name not in into})
    return found.replace(slots=slots)
