"""Optimizer state by columns: slots as paths, and the way between columns and one dict a parameter.

A path names where a value stands in the dict of its parameter. Nothing here knows of parameter groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeGuard

from attrs import frozen

from fdsd.data.errors import NameConflict, Unsupported, listing, plural
from fdsd.data.statedict import StateDict
from fdsd.data.values import has_tensor, is_dict, is_sequence

__all__ = [
    "Item",
    "Path",
    "Slot",
    "as_path",
    "as_slot",
    "at_path",
    "is_empty",
    "join_sequences",
    "to_columns",
    "to_rows",
    "walk",
]

Path = tuple[Hashable, ...]
Slot = str | Path

_DEEPEST = 64


@frozen(repr=False, order=True)
class Item:
    """A step of a path into a list or a tuple, as other steps are keys of dicts.

    Args:
        index: Which item.
        is_tuple: Whether the sequence is a tuple.

    >>> Item(0), Item(1, is_tuple=True), str(Item(1))
    (Item(0), Item(1, is_tuple=True), '1')
    """

    index: int
    is_tuple: bool = False

    def __repr__(self) -> str:
        return f"Item({self.index}, is_tuple=True)" if self.is_tuple else f"Item({self.index})"

    def __str__(self) -> str:
        return str(self.index)


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


def is_plain(value: object) -> TypeGuard[dict[Any, Any]]:
    """Tell whether a value is a dict that nests state; other classes of dicts are values, so that nothing is lost."""
    return type(value) is dict


def is_empty(value: object) -> bool:
    """Tell whether a leaf stands for an empty dict."""
    return is_plain(value) and not value


def _is_row_of_tensors(value: object) -> bool:
    return type(value) in (list, tuple) and has_tensor(value)


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """List the leaves of nested plain dicts, lists and tuples with their paths; an empty dict is a leaf.

    A list without tensors is a leaf, since it is one value (``betas``); so are containers of other classes.

    >>> list(walk({"step": 3, "kron": {0: "L", 1: {}}, "betas": [0.8, 0.9]}))
    [(('step',), 3), (('kron', 0), 'L'), (('kron', 1), {}), (('betas',), [0.8, 0.9])]
    >>> import torch
    >>> list(walk({"last": [torch.ones(()), None]}))
    [(('last', Item(0)), tensor(1.)), (('last', Item(1)), None)]
    """
    if _is_row_of_tensors(value):
        steps: Any = [(Item(i, type(value) is tuple), item) for i, item in enumerate(value)]
    elif not is_plain(value):
        yield path, value
        return
    elif not value:
        yield path, {}  # a fresh one: a live optimizer fills its own later
        return
    else:
        steps = value.items()
    if len(path) >= _DEEPEST:
        raise Unsupported(f"Optimizer state is nested more than {_DEEPEST} containers deep at {path[:4]}...")
    for key, item in steps:
        yield from walk(item, (*path, key))


def at_path(row: Any, path: Path) -> Any:
    """Give what stands at a path of a nested value, or ``None``.

    >>> at_path({"last": [1, 2]}, ("last", Item(1))), at_path({"last": 3}, ("last", Item(1)))
    (2, None)
    """
    for key in path:
        if isinstance(key, Item):
            row = row[key.index] if is_sequence(row) and key.index < len(row) else None
        else:
            row = row.get(key) if is_dict(row) else None
    return row


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
    if not any((is_plain(value) and value) or _is_row_of_tensors(value) for value in column.values()):
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

    Raises:
        Unsupported: Items of a list or tuple are missing, so that the others would move up.

    >>> to_rows({"step": {"a": 3, "b": 4}, ("kron", 0): {"a": "L"}, (): {"c": {}}})
    {'a': {'step': 3, 'kron': {0: 'L'}}, 'b': {'step': 4}, 'c': {}}
    >>> to_rows({("last", Item(0)): {"a": "x"}, ("last", Item(1)): {"a": "y"}})
    {'a': {'last': ['x', 'y']}}
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
    if any(isinstance(key, Item) for slot in slots for key in as_path(slot)):
        torn: dict[str, Path] = {}
        rows = {name: _with_sequences(row, name, (), torn) for name, row in rows.items()}
        if torn:
            name, path = next(iter(torn.items()))
            raise Unsupported(
                f"OptimState: {plural(len(torn), 'parameter')} with items missing in a list or tuple of the state, so "
                f"that others would move up: {listing(torn)}; {path!r} of {name!r} for one. Drop all items or none."
            )
    return rows


def join_sequences(slots: Mapping[Slot, Mapping[str, Any]]) -> dict[Slot, dict[str, Any]]:
    """Give the slots with lists and tuples as one value each, which is how torch's flat form has them.

    >>> join_sequences({"step": {"a": 3}, ("last", Item(0)): {"a": "x"}, ("last", Item(1)): {"a": "y"}})
    {'step': {'a': 3}, 'last': {'a': ['x', 'y']}}
    """
    made: dict[Slot, dict[str, Any]] = {}
    parts: dict[Slot, dict[Slot, Mapping[str, Any]]] = {}
    for slot, column in slots.items():
        path = as_path(slot)
        cut = next((i for i, key in enumerate(path) if isinstance(key, Item)), None)
        if cut is None:
            made.setdefault(slot, {}).update(column)
            continue
        into = as_slot(path[:cut])
        made.setdefault(into, {})
        parts.setdefault(into, {})[path[cut:]] = column
    for slot, own in parts.items():
        made[slot].update(to_rows(own))
    return made


def _with_sequences(value: Any, name: str, path: Path, torn: dict[str, Path]) -> Any:
    if not is_plain(value):
        return value
    made = {key: _with_sequences(item, name, (*path, key), torn) for key, item in value.items()}
    steps = [key for key in made if isinstance(key, Item)]
    if not steps:
        return made
    if len(steps) < len(made) or {step.index for step in steps} != set(range(len(steps))):
        torn.setdefault(name, path)
    items = [made[step] for step in sorted(steps)]
    return tuple(items) if steps[0].is_tuple else items
