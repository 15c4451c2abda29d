"""Plain values inside states: when two are the same, which hold tensors, and how optree's paths reach them.

For hyper-parameters, extra entries and the like. Nothing here knows of parameters, names or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard

import optree
import torch

from fdsd.data.spec import TensorSpec, VirtualTensor
from fdsd.data.statedict import same_leaf

__all__ = [
    "PartEntry",
    "has_tensor",
    "is_dict",
    "is_mapping",
    "is_sequence",
    "part_at",
    "read_only",
    "register",
    "same_mapping",
    "same_option",
    "same_value",
    "several",
]


def is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    """Tell whether a value is a dict, for the type checkers too."""
    return isinstance(value, dict)


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Tell whether a value is a mapping, for the type checkers too."""
    return isinstance(value, Mapping)


def is_sequence(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Tell whether a value is a list or a tuple, for the type checkers too."""
    return isinstance(value, list | tuple)


def read_only(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a read-only mapping of the same items, which later writes to ``mapping`` do not reach."""
    return MappingProxyType(dict(mapping))


def same_value(a: object, b: object) -> bool:
    """Tell whether two values are the same: containers item by item, NaN like NaN, tensors by identity.

    >>> same_value((0.9, [float("nan")]), (0.9, [float("nan")]))
    True
    >>> same_value((0.9, 0.95), [0.9, 0.95]), same_value(1, True), same_value(torch.ones(()), torch.ones(()))
    (False, False, False)
    """
    try:
        return _same(a, b)
    except RecursionError:  # a container that contains itself is the same as itself alone
        return False


def _same(a: object, b: object) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if is_sequence(a) and is_sequence(b):
        return len(a) == len(b) and all(map(_same, a, b))
    if is_dict(a) and is_dict(b):
        return _same_items(a, b)
    return same_leaf(a, b)


def _same_items(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> bool:
    return len(a) == len(b) and all(key in b and _same(value, b[key]) for key, value in a.items())


def same_mapping(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> bool:
    """Tell whether two mappings have the same keys with the same values, whatever their order."""
    return same_value(dict(a), dict(b))


def same_option(a: object, b: object) -> bool:
    """Tell whether two options are the same; tensors by value, a list like a tuple.

    >>> same_option([0.9, torch.tensor(0.5)], (0.9, torch.tensor(0.5))), same_option(0.1, 0.2)
    (True, False)
    """
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
    if is_sequence(a) and is_sequence(b):
        return len(a) == len(b) and _all_same(zip(a, b, strict=True))
    if is_dict(a) and is_dict(b):
        return a.keys() == b.keys() and _all_same((a[key], b[key]) for key in a)
    return same_value(a, b)


def _all_same(pairs: Iterable[tuple[object, object]]) -> bool:
    return all(same_option(x, y) for x, y in pairs)


def has_tensor(value: object) -> bool:
    """Tell whether a value is a tensor, or a container of some.

    >>> has_tensor(torch.tensor(0.1)), has_tensor((0.9, torch.tensor(0.95))), has_tensor((0.9, 0.95))
    (True, True, False)
    """
    if isinstance(value, str | int | float | None):
        return False
    tree: Any = value
    leaves: list[Any] = optree.tree_leaves(tree, namespace="fdsd")
    return any(isinstance(leaf, torch.Tensor | VirtualTensor | TensorSpec) for leaf in leaves)


def several(problems: Sequence[str], *, limit: int = 10) -> str:
    """Join sentences about offenders: at most ``limit`` shown, the rest counted.

    >>> several(["a: no", "b: no", "c: no"], limit=2)
    'a: no; b: no; and 1 more'
    """
    rest = len(problems) - limit
    return "; ".join([*problems[:limit], *([f"and {rest} more"] if rest > 0 else [])])


def part_at(obj: Any, place: tuple[Any, ...]) -> Any:
    """Get the part of a state at a step of an optree path: ``("slots", "step")`` is ``.slots["step"]``."""
    name, *keys = place
    if name == "groups" and len(keys) == 2:
        return obj.groups[keys[0]].options[keys[1]]
    part = getattr(obj, name)
    for key in keys:
        part = part[key]
    return part


class PartEntry(optree.PyTreeEntry):
    """A step of an optree path into a named part of a state."""

    __slots__ = ()

    def __call__(self, obj: Any, /) -> Any:
        """Get the part."""
        return part_at(obj, self.entry)

    def codify(self, /, node: str = "") -> str:
        """Write the access as code."""
        name, *keys = self.entry
        if name == "groups" and len(keys) == 2:
            return f"{node}.groups[{keys[0]!r}].options[{keys[1]!r}]"
        return f"{node}.{name}" + "".join(f"[{key!r}]" for key in keys)


def register(cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
    """Register a state with optree, whose types ask for a collection although none is needed."""
    optree_: Any = optree
    optree_.register_pytree_node(cls, flatten, unflatten, path_entry_type=PartEntry, namespace="fdsd")
