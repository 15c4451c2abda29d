"""Values written such that equal ones give the same text on every rank: what a digest is made of.

Pickles will not do: they tell objects that are equal from such that are identical.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import attrs
import torch

from fdsd.data.values import is_dict, is_sequence

__all__ = ["canonical"]


def canonical(value: Any) -> Any:
    """Write a value as nested tuples of texts and numbers.

    Args:
        value: A number, a text, a dtype, a function, a frozen class of attrs, or a tuple, list or dict of such.

    >>> canonical((1, torch.int8, True))
    ('tuple', (1, 'torch.int8', True))
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value if type(value) in _PLAIN else (type(value).__qualname__, repr(value))
    if isinstance(value, torch.dtype | torch.device | type):
        return str(value)
    if isinstance(value, array):
        return ("array", value.typecode, hashlib.sha256(value.tobytes()).hexdigest())
    if is_sequence(value):
        return (type(value).__qualname__, tuple([canonical(item) for item in value]))
    if is_dict(value):
        return ("dict", tuple([(canonical(key), canonical(item)) for key, item in value.items()]))
    kind: type[Any] = value.__class__
    if attrs.has(kind):
        return _of_attrs(value, kind)
    return _of_function(value) if callable(value) else _of_object(value)


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _of_attrs(value: Any, kind: type[Any]) -> Any:
    fields = [field for field in attrs.fields(kind) if field.eq and field.init]
    name = f"{kind.__module__}.{kind.__qualname__}"
    return (name, tuple([(field.name, canonical(getattr(value, field.name))) for field in fields]))


def _of_function(value: Callable[..., Any]) -> Any:
    if isinstance(value, partial):
        return ("partial", canonical(value.func), canonical(value.args), canonical(value.keywords))
    owner: Any = getattr(value, "__self__", None)
    name = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    code = _of_code(value.__code__) if isinstance(value, FunctionType) else None
    return ("function", name, code, None if owner is None else type(owner).__qualname__)


def _of_code(code: CodeType) -> Any:
    consts = tuple([_of_code(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts])
    return (hashlib.sha256(code.co_code).hexdigest(), code.co_names, consts)


def _of_object(value: Any) -> Any:
    has_repr = "__repr__" in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}
    shown = repr(value) if has_repr else None  # an address says nothing
    return (f"{type(value).__module__}.{type(value).__qualname__}", shown)
