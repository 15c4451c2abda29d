"""Nested state dicts of dicts, lists and tuples: their leaves by path, two of them side by side, and rebuilding.

What is done with leaves is not known here. Anything that is no tensor, no plain value and no container is refused, or
copied where the caller asks for no check of types.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from attrs import define, field

from fdsd.compat._errors import ValueTypeError
from fdsd.data.values import is_mapping, is_sequence

__all__ = ["Pairs", "Path", "leaves_of", "mapped", "named", "nothing_of", "pairs_of", "type_fault"]

Path = tuple[Any, ...]
"""The keys and indices that lead to a leaf."""

_PLAIN = (int, float, str, bytes, io.BytesIO, type(None))
_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


def named(path: Path) -> str:
    """Write a path as one text; different paths give different texts.

    Keys that are texts stand as they are, so that a flat state dict keeps its names; indices and other keys stand in
    brackets.

    >>> named(("state", "layers.0.weight", "exp_avg")), named(("betas", 0)), named(("betas", "[0]"))
    ('state/layers.0.weight/exp_avg', 'betas/[0]', 'betas/~2[0]')
    """
    return "/".join([_segment(key) for key in path])


def _segment(key: Any) -> str:
    if not isinstance(key, str):
        return f"[{_escaped(repr(key))}]"
    return ("~2" if key.startswith("[") else "") + _escaped(key)


def _escaped(text: str) -> str:
    return text.replace("~", "~0").replace("/", "~1")


def _bounded(walk: _F) -> _F:
    """Word what happens with a container that holds itself."""

    @functools.wraps(walk)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return walk(*args, **kwargs)
        except RecursionError:
            raise ValueTypeError("The state dict is nested too deeply, or holds itself; flatten it first.") from None

    return checked  # type: ignore[return-value]  # the same signature


def _items(tree: Any) -> list[tuple[Any, Any]] | None:
    """Give the children of a container by key or index; ``None`` for a leaf."""
    kind = _container(type(tree))  # type: ignore[arg-type]  # classes have hashes
    if kind is None:
        return None
    return list(tree.items()) if kind is Mapping else list(enumerate(cast("list[Any]", tree)))


@functools.lru_cache(1 << 10)
def _container(kind: type) -> type | None:
    """Tell mappings, and lists and tuples, from leaves; asking a class takes longer than remembering what it said."""
    if issubclass(kind, Mapping):
        return Mapping
    return list if issubclass(kind, list | tuple) else None


@_bounded
def leaves_of(tree: Any) -> dict[Path, Any]:
    """List the leaves with their paths, in order.

    Args:
        tree: Dicts, lists and tuples, nested in any way; or a leaf.

    Raises:
        ValueTypeError: A container holds itself.

    >>> leaves_of({"a": {"step": 3, "betas": (0.9, 0.99)}})
    {('a', 'step'): 3, ('a', 'betas', 0): 0.9, ('a', 'betas', 1): 0.99}
    """
    found: dict[Path, Any] = {}
    _find_leaves(tree, (), found)
    return found


def _find_leaves(at: Any, path: Path, found: dict[Path, Any]) -> None:  # no closure: it would keep tensors in a cycle
    items = _items(at)
    if items is None:
        found[path] = at
    for key, value in items or ():
        _find_leaves(value, (*path, key), found)


def type_fault(leaves: Mapping[Path, Any]) -> ValueTypeError | None:
    """Say which leaves are neither tensors nor plain values, if there are any.

    >>> type_fault({("a",): 3, ("b",): {4}})
    ValueTypeError("Unexpected value type <class 'set'> at 'b'. A state dict that is gathered, moved or copied holds \
tensors, int, float, str, bytes, BytesIO, None, and dicts, lists and tuples of them; type_check=False copies others.")
    """
    wrong: dict[Any, list[str]] = {}
    for path, leaf in leaves.items():
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            wrong.setdefault(type(leaf), []).append(named(path))
    if not wrong:
        return None
    told = [f"{kind} at {', '.join(map(repr, names[:10]))}{_rest(len(names) - 10)}" for kind, names in wrong.items()]
    return ValueTypeError(
        f"Unexpected value type {'; '.join(told)}. A state dict that is gathered, moved or copied holds tensors, int, "
        "float, str, bytes, BytesIO, None, and dicts, lists and tuples of them; type_check=False copies others."
    )


def _rest(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


@_bounded
def mapped(tree: Any, change: Callable[[Path, Any], Any]) -> Any:
    """Make the tree again of plain dicts, lists and tuples, with each leaf changed.

    Args:
        tree: Dicts, lists and tuples, nested in any way; or a leaf.
        change: Gives the new leaf for a path and a tensor or plain value; objects of other types are copied.

    >>> mapped({"a": {"step": 3, "betas": (0.9, 0.99)}}, lambda path, leaf: leaf * 2)
    {'a': {'step': 6, 'betas': (1.8, 1.98)}}
    """
    return _changed(tree, (), change, {})


def _changed(at: Any, path: Path, change: Callable[[Path, Any], Any], memo: dict[int, Any]) -> Any:
    items = _items(at)
    if items is None:
        is_known = isinstance(at, (torch.Tensor, *_PLAIN))
        return change(path, at) if is_known else copy.deepcopy(at, memo)  # one object in two places stays one
    made = {key: _changed(value, (*path, key), change, memo) for key, value in items}
    if is_mapping(at):
        return made
    return list(made.values()) if isinstance(at, list) else tuple(made.values())


@define
class Pairs:
    """Two nested state dicts side by side.

    Attributes:
        leaves: For each path of the first one its leaf and that of the second one.
        problems: Where the two are built in different ways.
    """

    leaves: dict[Path, tuple[Any, Any]] = field(factory=dict)
    problems: list[str] = field(factory=list)


@_bounded
def pairs_of(tree: Any, companion: Any) -> Pairs:
    """Put two nested state dicts side by side. A list and a tuple go together.

    >>> pairs = pairs_of({"a": [1, 2], "b": 3}, {"a": (4, 5), "c": 6})
    >>> pairs.leaves, pairs.problems
    ({}, ["the top has the keys 'a', 'b' against 'a', 'c'"])
    """
    made = Pairs()
    _pair(tree, companion, (), made)
    return made


def _pair(a: Any, b: Any, path: Path, made: Pairs) -> None:
    ours, theirs = _items(a), _items(b)
    if ours is None and theirs is None:
        made.leaves[path] = a, b
    elif ours is None or theirs is None or is_mapping(a) != is_mapping(b):
        made.problems.append(f"{_place(path)} is {_kind(a)} against {_kind(b)}")
    elif not is_mapping(a) and len(ours) != len(theirs):
        made.problems.append(f"{_place(path)} has {len(ours)} entries against {len(theirs)}")
    elif (others := dict(theirs)).keys() != dict(ours).keys():
        made.problems.append(f"{_place(path)} has the keys {_keys(ours)} against {_keys(theirs)}")
    else:
        for key, value in ours:
            _pair(value, others[key], (*path, key), made)


def _place(path: Path) -> str:
    return repr(named(path)) if path else "the top"


def _keys(items: list[tuple[Any, Any]]) -> str:
    keys = [repr(key) for key, _ in items]
    return (", ".join(keys[:10]) + _rest(len(keys) - 10)) or "none"


def _kind(value: Any) -> str:
    if is_mapping(value):
        return "a dict"
    if is_sequence(value):
        return "a list" if isinstance(value, list) else "a tuple"
    return f"a {type(value).__name__}"


def nothing_of(tree: _T) -> _T:
    """Give what ranks get that get nothing of a state dict, or of a leaf.

    >>> nothing_of({"a": 1}), nothing_of(torch.ones(2))
    ({}, None)
    """
    nothing: Any = {} if is_mapping(tree) else None
    made: _T = nothing
    return made
