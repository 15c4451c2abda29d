"""Torch's optimizer dict (``optimizer.state_dict()``), read into slots and groups, and written from them.

By ids, by FQN, or by ids with ``param_names``. Pure dict work: no optimizer and no module is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fdsd.data.columns import Slot, as_slot, to_rows, walk
from fdsd.data.errors import NameConflict, SpecMismatch, UnknownName, Unsupported, listing, plural
from fdsd.data.groups import ParamGroup, twice
from fdsd.data.values import is_mapping, is_sequence

__all__ = ["Parts", "read_osd", "write_osd"]

Names = Sequence[str] | Mapping[int, str]

_GIVE_NAMES = (
    "Give them: from_torch(osd, fqns=[name for name, _ in model.named_parameters()]), the names in the order "
    "in which the optimizer got its parameters, or a mapping {id: FQN}"
)


class Parts(NamedTuple):
    """What torch's dict consists of."""

    slots: dict[Slot, dict[str, Any]]
    groups: tuple[ParamGroup, ...]
    extra: dict[str, Any]


def read_osd(osd: Mapping[str, Any], fqns: Names | None) -> Parts:
    """Read torch's dict; leaves are shared, never copied.

    Raises:
        UnknownName: ``state`` or ``param_groups`` is missing, ids have no names, or an id is in no group.
        SpecMismatch: The number of names is wrong.
        NameConflict: A name or an id stands twice, or ``fqns`` contradicts the dict's ``param_names``.
        Unsupported: Ids and names are mixed, or the dict is no optimizer's state dict.
    """
    packed, keys = _read_groups(osd)
    flat = [key for group in keys for key in group]
    by_id = _are_ids(flat)
    if double := twice(flat):
        what = "ids" if by_id else "names"
        raise NameConflict(f"from_torch: {what} {listing(double)} listed twice in the parameter groups.")
    names = _names_of_ids(packed, keys, fqns) if by_id else _checked_names(flat, fqns)
    groups = [
        ParamGroup([names[key] for key in own], {key: value for key, value in group.items() if key != "params"})
        for group, own in zip(packed, keys, strict=True)
    ]
    slots = _read_state(osd["state"], names, by_id=by_id)
    extra = {key: value for key, value in osd.items() if key not in ("state", "param_groups")}
    return Parts(slots, tuple(groups), extra)


def _read_groups(osd: Mapping[str, Any]) -> tuple[list[Any], list[list[Any]]]:
    given: Any = osd
    if not isinstance(given, Mapping):
        raise Unsupported(f"from_torch: takes optimizer.state_dict(), not {type(given).__name__}.")
    if missing := [key for key in ("state", "param_groups") if key not in osd]:
        flat = any(str(key).startswith(("state.", "param_groups.")) for key in osd)
        hint = (
            "This looks like the flat form; use unflatten_optim()."
            if flat
            else "Give what optimizer.state_dict() or get_optimizer_state_dict() returned."
        )
        raise UnknownName(f"from_torch: the optimizer's dict has no {listing(missing)}. {hint}")
    if not isinstance(osd["state"], Mapping):
        raise Unsupported(f"from_torch: osd['state'] is a dict, not {type(osd['state']).__name__}.")
    if not is_sequence(osd["param_groups"]):
        raise Unsupported(f"from_torch: osd['param_groups'] is a list, not {type(osd['param_groups']).__name__}.")
    packed: list[Any] = list(osd["param_groups"])
    if odd := [i for i, group in enumerate(packed) if not isinstance(group, Mapping) or "params" not in group]:
        raise UnknownName(f"from_torch: osd['param_groups'] {listing(odd)}: no dict with 'params' in it.")
    if odd := [i for i, group in enumerate(packed) if not _lists(group["params"])]:
        raise Unsupported(f"from_torch: osd['param_groups'] {listing(odd)}: 'params' is no list of names or ids.")
    keys = [list(group["params"]) for group in packed]
    if any(isinstance(key, torch.Tensor) for group in keys for key in group):
        raise Unsupported("from_torch: 'params' holds tensors; give optimizer.state_dict(), not the optimizer's own.")
    return packed, keys


def _lists(params: Any) -> bool:
    return isinstance(params, Iterable) and not isinstance(params, str | bytes | Mapping | torch.Tensor)


def _is_id(key: object) -> bool:
    return isinstance(key, int) and not isinstance(key, bool)


def _are_ids(keys: list[Any]) -> bool:
    ids = [key for key in keys if _is_id(key)]
    names = [key for key in keys if isinstance(key, str)]
    if odd := [key for key in keys if not _is_id(key) and not isinstance(key, str)]:
        raise Unsupported(f"from_torch: parameters are listed by id or name; these are neither: {listing(odd)}.")
    if ids and names:
        raise Unsupported(
            f"from_torch: the groups mix ids ({listing(ids)}) and names ({listing(names)}); "
            "list all parameters by one of the two."
        )
    return not names


def _checked_names(flat: list[str], fqns: Names | None) -> dict[Any, str]:
    if fqns is not None and (isinstance(fqns, str | Mapping) or list(fqns) != flat):
        raise NameConflict(
            "from_torch: the groups list parameters by name already, and fqns= says something else; "
            "leave it out, and rename with rename_fqns()."
        )
    return {name: name for name in flat}


def _names_of_ids(packed: list[Any], keys: list[list[int]], fqns: Names | None) -> dict[Any, str]:
    ids = sorted(key for group in keys for key in group)
    names = _param_names(packed, keys) if fqns is None else _given_names(ids, fqns)
    if fqns is not None and all("param_names" in group for group in packed):
        _check_swapped(names, _param_names(packed, keys))
    if odd := [name for name in names.values() if not isinstance(name, str)]:
        raise SpecMismatch(f"from_torch: names are strings; these are not: {listing(odd)}.")
    if double := twice(names.values()):
        raise NameConflict(f"from_torch: names given to two parameters: {listing(double)}.")
    return {key: names[key] for group in keys for key in group}


def _given_names(ids: list[int], fqns: Names) -> dict[Any, Any]:
    if isinstance(fqns, str):
        raise SpecMismatch(f"from_torch: fqns is a sequence of names, not the string {fqns!r}.")
    if isinstance(fqns, Mapping):
        missing = [key for key in ids if key not in fqns]
        known = set(ids)
        strays = [key for key in fqns if key not in known]
        if missing or strays:
            raise SpecMismatch(
                f"from_torch: fqns= names {plural(len(fqns), 'id')}, the groups list {len(ids)}"
                + (f"; without a name: {listing(missing)}" if missing else "")
                + (f"; in no group: {listing(strays)}" if strays else "")
                + ". Name exactly the ids of the groups."
            )
        return {key: fqns[key] for key in ids}
    names = list(fqns)
    if len(names) != len(ids):
        raise SpecMismatch(
            f"from_torch: fqns= gives {plural(len(names), 'name')}, and the groups list "
            f"{plural(len(ids), 'parameter')}. Give one for each, in the order of the ids."
        )
    return dict(zip(ids, names, strict=True))


def _check_swapped(names: dict[Any, Any], own: dict[Any, Any]) -> None:
    """Raise if the dict itself gives one of the names to another parameter; longer names, with a prefix, are fine."""
    holders = {name: key for key, name in own.items()}
    odd = [key for key, name in names.items() if holders.get(name, key) != key]
    if odd:
        texts = [f"{names[key]!r} for id {key}, which is {own[key]!r} there" for key in odd]
        raise NameConflict(
            f"from_torch: fqns= contradicts the dict's own 'param_names' for {plural(len(odd), 'parameter')}: "
            f"{'; '.join(texts[:10])}"
            f"{f'; and {len(texts) - 10} more' if len(texts) > 10 else ''}. Leave fqns= out, or give the names in the "
            "order of the ids."
        )


def _param_names(packed: list[Any], keys: list[list[int]]) -> dict[Any, Any]:
    bare = [i for i, group in enumerate(packed) if keys[i] and "param_names" not in group]
    if bare:
        count = plural(sum(map(len, keys)), "name")
        where = f" in group {listing(bare)}" if len(bare) < len([own for own in keys if own]) else ""
        raise UnknownName(f"from_torch: parameters are listed by ids without names{where}. {_GIVE_NAMES} ({count}).")
    names: dict[Any, Any] = {}
    for i, (group, own) in enumerate(zip(packed, keys, strict=True)):
        given = list(group.get("param_names", ()))
        if len(given) != len(own):
            raise SpecMismatch(
                f"from_torch: group {i} lists {plural(len(own), 'parameter')}, and has "
                f"{plural(len(given), 'name')} in 'param_names'."
            )
        names.update(zip(own, given, strict=True))
    return names


def _read_state(state: Mapping[Any, Any], names: dict[Any, str], *, by_id: bool) -> dict[Slot, dict[str, Any]]:
    strays = [key for key in state if key not in names]
    _check_strays(strays, names, by_id=by_id)
    columns: dict[Slot, dict[str, Any]] = {}
    in_order = [(name, state[key]) for key, name in names.items() if key in state]
    for name, entry in [*in_order, *((key, state[key]) for key in strays)]:
        row: Any = {**entry} if is_mapping(entry) else entry
        for path, leaf in walk(row):
            columns.setdefault(as_slot(path), {})[name] = leaf
    return columns


def _check_strays(strays: list[Any], names: dict[Any, str], *, by_id: bool) -> None:
    if odd := [key for key in strays if not isinstance(key, str)]:
        if all(map(_is_id, odd)) and by_id:
            raise UnknownName(f"from_torch: state for ids that no group lists: {listing(odd)}.")
        kind = "ids" if all(map(_is_id, odd)) else "keys"
        raise Unsupported(f"from_torch: the groups list names, and the state has {kind}: {listing(odd)}.")
    known = {*names.values(), *map(str, names)} if by_id else set[str]()  # "0" is an id that went through JSON
    if both := [key for key in strays if key in known]:
        raise Unsupported(
            f"from_torch: the groups list ids, and the state has parameters by name: {listing(both)}. "
            "Key the state as the groups do."
        )


def write_osd(
    slots: Mapping[Slot, Mapping[str, Any]],
    groups: Sequence[ParamGroup],
    extra: Mapping[str, Any],
    *,
    ids: bool,
) -> dict[str, Any]:
    """Write torch's dict, by FQN or by ids ``0..n-1`` in group order: fresh containers, shared leaves."""
    rows = to_rows(slots)
    keys: dict[str, Any] = {}
    packed: list[dict[str, Any]] = []
    for group in groups:
        start = len(keys)
        own = list(range(start, start + len(group.fqns))) if ids else list(group.fqns)
        keys.update(zip(group.fqns, own, strict=True))
        names = {"param_names": list(group.fqns)} if group.named else {}
        packed.append({**group.options, **names, "params": own})
    state = {key: rows.pop(name) for name, key in keys.items() if name in rows}
    return {"state": {**state, **rows}, "param_groups": packed, **extra}
