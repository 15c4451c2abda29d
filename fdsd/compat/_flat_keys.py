"""Flattening nested state dicts to one table by dotted names, and back. Leaves are not looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Union

from attrs import frozen

from fdsd.compat._errors import NoMapping
from fdsd.data.errors import NameConflict, UnknownName, listing
from fdsd.data.values import is_dict, is_mapping, is_sequence

__all__ = [
    "CONTAINER_TYPE",
    "FLATTEN_MAPPING",
    "OBJ_PATH",
    "PATH_ITEM",
    "STATE_DICT_TYPE",
    "Paths",
    "flatten",
    "set_element",
    "traverse",
    "unflatten",
]

PATH_ITEM = Union[str, int]  # noqa: UP007  # an alias at run time
OBJ_PATH = tuple[PATH_ITEM, ...]
FLATTEN_MAPPING = dict[str, OBJ_PATH]
STATE_DICT_TYPE = dict[str, Any]
CONTAINER_TYPE = MutableMapping[PATH_ITEM, Any]
_Visitor = Callable[[OBJ_PATH, Any], None]


@frozen
class _Container:
    """What a path does not say of a container: that it is a tuple, its keys that are no texts, that it is empty."""

    path: OBJ_PATH
    kind: type
    keys: Mapping[str, Any]
    is_empty: bool
    before: int  # how many leaves come before it


class Paths(FLATTEN_MAPPING):
    """The path of each flat name; and, beyond what torch keeps, what is needed to give back exactly what there was."""

    def __init__(self) -> None:
        super().__init__()
        self.containers: list[_Container] = []


def traverse(
    state_dict: Mapping[Any, Any],
    visitor: _Visitor,
    enter: _Visitor | None = None,
) -> None:
    """Visit each leaf with its path: texts for keys, numbers for indices.

    Args:
        state_dict: Mappings, lists and tuples, nested in any way.
        visitor: Gets the path and the leaf.
        enter: Gets the path and the container, before what is in it.

    Raises:
        NoMapping: It is no mapping.

    >>> traverse({"a": [1, {2: 3}]}, lambda path, leaf: print(path, leaf))
    ('a', 0) 1
    ('a', 1, '2') 3
    """
    if not is_mapping(state_dict):
        raise NoMapping(f"a {type(state_dict).__name__} is no state dict.")
    _visit((), state_dict, visitor, enter)


def _visit(path: OBJ_PATH, value: Any, visitor: _Visitor, enter: _Visitor | None) -> None:
    if not is_mapping(value) and not is_sequence(value):
        visitor(path, value)
        return
    if enter is not None:
        enter(path, value)
    for key, child in value.items() if is_mapping(value) else enumerate(value):
        _visit((*path, str(key) if is_mapping(value) else key), child, visitor, enter)


def flatten(state_dict: Mapping[Any, Any]) -> tuple[STATE_DICT_TYPE, Paths]:
    """Flatten to one table by dotted names.

    Args:
        state_dict: Mappings, lists and tuples, nested in any way.

    Returns:
        The leaves by name, and the path of each.

    Raises:
        NameConflict: Two leaves would have one name.

    Law: ``unflatten(*flatten(x))`` equals ``x``: tuples, keys that are no texts and empty containers too.

    >>> flatten({"a": {"b": 1}, "c": (2, 3)})
    ({'a.b': 1, 'c.0': 2, 'c.1': 3}, {'a.b': ('a', 'b'), 'c.0': ('c', 0), 'c.1': ('c', 1)})
    """
    flat: STATE_DICT_TYPE = {}
    paths = Paths()
    doubled: list[str] = []

    def visit(path: OBJ_PATH, value: Any) -> None:
        name = ".".join(map(str, path))
        if name in flat:
            doubled.append(name)
        flat[name] = value
        paths[name] = path

    def enter(path: OBJ_PATH, container: Any) -> None:
        keys = {str(key): key for key in container if not isinstance(key, str)} if is_mapping(container) else {}
        kind = dict if is_mapping(container) else tuple if isinstance(container, tuple) else list
        if keys or kind is tuple or not container:
            paths.containers.append(_Container(path, kind, keys, not container, len(flat)))

    traverse(state_dict, visit, enter)
    if doubled:
        raise NameConflict(
            f"duplicated flatten key {doubled[0]}: several entries would have one name: {listing(set(doubled))}. "
            "Rename keys that have dots, or numbers beside texts."
        )
    return flat, paths


def unflatten(state_dict: Mapping[str, Any], mapping: Mapping[str, OBJ_PATH]) -> STATE_DICT_TYPE:
    """Undo ``flatten``.

    Args:
        state_dict: The leaves by name; some may be missing.
        mapping: The path of each. From ``flatten``, it knows the types of containers too; any other makes lists of
            indices, and dicts of keys.

    Raises:
        UnknownName: The mapping lacks a name.
        NameConflict: Two paths do not go together.

    >>> unflatten({"a.b": 1, "c.0": 2}, {"a.b": ("a", "b"), "c.0": ("c", 0)})
    {'a': {'b': 1}, 'c': [2]}
    """
    if strays := [name for name in state_dict if name not in mapping]:
        raise UnknownName(f"_unflatten_state_dict: the mapping has no path for {listing(strays)}.")
    containers = mapping.containers if isinstance(mapping, Paths) else []
    empty = [each for each in containers if each.is_empty and each.path]
    position = {name: i for i, name in enumerate(mapping)} if empty else {}
    made: STATE_DICT_TYPE = {}
    for name, value in state_dict.items():
        while empty and empty[0].before <= position[name]:  # in the order of old
            _set_empty(made, empty.pop(0))
        set_element(made, mapping[name], value)
    for each in empty:
        _set_empty(made, each)
    for each in reversed(containers):  # what is within comes first, as long as paths lead there
        made = _restored(made, each)
    return made


def _set_empty(root: STATE_DICT_TYPE, container: _Container) -> None:
    if _at(root, container.path) is None:
        set_element(root, container.path, {} if container.kind is dict else [])


def _restored(root: Any, container: _Container) -> Any:
    """Give a container its own type and its own keys."""
    found: Any = _at(root, container.path)
    if container.kind is dict and is_dict(found):
        value: Any = {container.keys.get(key, key): child for key, child in found.items()}
    elif container.kind is tuple and is_sequence(found):
        value = tuple(found)
    else:
        return root
    if not container.path:
        return value
    _at(root, container.path[:-1])[container.path[-1]] = value
    return root


def _at(root: Any, path: OBJ_PATH) -> Any:
    """Give what stands at a path; ``None`` for nothing."""
    at: Any = root
    for key in path:
        if is_dict(at):
            at = at.get(key)
        elif is_sequence(at) and isinstance(key, int) and key < len(at):
            at = at[key]
        else:
            return None
    return at


def set_element(root_dict: Any, path: OBJ_PATH, value: Any) -> None:
    """Put a value at a path, and make the containers on the way: lists for indices, dicts for texts.

    Raises:
        NameConflict: Something else than such a container stands on the way.

    >>> root = {}; set_element(root, ("a", 1), 5); root
    {'a': [None, 5]}
    """
    at: Any = root_dict
    given: tuple[Any, ...] = path
    for i, key in enumerate(given):
        is_index = isinstance(key, int) and at is not root_dict
        if not (_is_list(at) and key >= 0 if is_index else is_dict(at)):
            raise NameConflict(
                f"The path {path} does not go together with the others: {path[:i]} is no "
                f"{'list' if is_index else 'dict'} with {key!r}."
            )
        if i == len(path) - 1:
            _put(at, key, value)
        elif _at(at, (key,)) is None:
            _put(at, key, [] if isinstance(path[i + 1], int) else {})
        at = _at(at, (key,))


def _is_list(value: object) -> bool:  # which does not narrow what is known of a type
    return isinstance(value, list)


def _put(at: Any, key: Any, value: Any) -> None:
    if not is_dict(at):
        at.extend([None] * (key + 1 - len(at)))
    at[key] = value
