"""Optimizer state by columns: slots as paths, and the way between columns and one dict a parameter.

A path names where a value stands in the dict of its parameter. Nothing here knows of parameter groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from fdsd.data.errors import NameConflict, Unsupported, listing
from fdsd.data.statedict import StateDict

__all__ = ["Path", "Slot", "as_path", "as_slot", "is_empty", "to_columns", "to_rows", "walk"]

Path = tuple[Hashable, ...]
Slot = str | Path

_DEEPEST = 64


def as_path(slot: Slot) -> Path:
    """Give the path that a slot stands for.

    >>> as_path("exp_avg"), as_path(("kron", 0))
    (('exp_avg',), ('kron', 0))
    """
    return (slot,) if isinstance(slot, str) else slot


def as_slot(path: Path) -> Slot:
    """Give the slot that a path is known by: a plain string for a string at the top.

    >>> as_slot(("exp_avg",)), as_slot(("kron", 0)), as_slot((0,))
    ('exp_avg', ('kron', 0), (0,))
    """
    return path[0] if len(path) == 1 and isinstance(path[0], str) else path


def _is_plain(value: object) -> bool:
    return type(value) is dict  # other classes of dicts are leaves, so that nothing of them is lost


def is_empty(value: object) -> bool:
    """Tell whether a leaf stands for an empty dict."""
    return _is_plain(value) and not value


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """List the leaves of nested plain dicts with their paths; an empty dict is a leaf.

    Other containers are leaves, dicts of other classes among them.

    >>> list(walk({"step": 3, "kron": {0: "L", 1: {}}}))
    [(('step',), 3), (('kron', 0), 'L'), (('kron', 1), {})]
    """
    if not _is_plain(value):
        yield path, value
        return
    if not value:
        yield path, {}  # a fresh one: a live optimizer fills its own later
        return
    if len(path) >= _DEEPEST:
        raise Unsupported(f"Optimizer state is nested more than {_DEEPEST} dicts deep at {path[:4]}...")
    for key, item in value.items():
        yield from walk(item, (*path, key))


def to_columns(slots: Mapping[Slot, Mapping[str, Any]]) -> dict[Slot, StateDict[Any]]:
    """Bring slots into their one form: nested dicts split, one-string paths as strings, no empty column.

    Raises:
        Unsupported: A slot is neither a string nor a tuple.
        NameConflict: A parameter has two values in one place, or a value where it has a dict.
    """
    columns: dict[Slot, StateDict[Any]] = {}
    for slot, column in slots.items():
        given: Any = slot
        if not isinstance(given, str | tuple):
            raise Unsupported(f"OptimState: a slot is a string or a tuple path, not {slot!r}.")
        for path, part in _split(as_path(slot), column):
            key = as_slot(path)
            if key in columns:
                _refuse_both(columns[key], part, path, path)
                part = StateDict({**columns[key], **part})
            if part:
                columns[key] = part
    for slot, column in columns.items():
        path = as_path(slot)
        for cut in range(len(path)):
            above = columns.get(as_slot(path[:cut]))
            if above is not None:
                _refuse_both(above, column, path[:cut], path)
    return columns


def _split(path: Path, column: Mapping[str, Any]) -> Iterator[tuple[Path, StateDict[Any]]]:
    if not any(_is_plain(value) and value for value in column.values()):
        yield path, column if isinstance(column, StateDict) else StateDict(column)
        return
    parts: dict[Path, dict[str, Any]] = {}
    for name, value in column.items():
        for sub, leaf in walk(value, path):
            parts.setdefault(sub, {})[name] = leaf
    for sub, part in parts.items():
        yield sub, StateDict(part)


def _refuse_both(a: Mapping[str, Any], b: Mapping[str, Any], path: Path, other: Path) -> None:
    if both := a.keys() & b.keys():
        raise NameConflict(
            f"OptimState: {listing(both)} would have two values at {path!r}"
            + (f": one of its own, and a dict with {other!r} in it." if path != other else ".")
        )


def to_rows(slots: Mapping[Slot, Mapping[str, Any]]) -> dict[str, Any]:
    """Give the state of each name as one fresh dict, nested as it was; leaves are shared.

    >>> to_rows({"step": {"a": 3, "b": 4}, ("kron", 0): {"a": "L"}, (): {"c": {}}})
    {'a': {'step': 3, 'kron': {0: 'L'}}, 'b': {'step': 4}, 'c': {}}
    """
    rows: dict[str, Any] = {}
    for slot, column in slots.items():
        path = as_path(slot)
        for name, value in column.items():
            leaf: Any = {} if is_empty(value) else value
            if not path:
                rows[name] = leaf
                continue
            row = rows.setdefault(name, {})
            for key in path[:-1]:
                row = row.setdefault(key, {})
            row[path[-1]] = leaf
    return rows
