"""Values written such that equal ones give the same text on every rank: what a digest is made of.

Pickles will not do: they tell objects that are equal from such that are identical. But what pickling would write of
an object, its class and its state, does: two objects of one class with different states are not the same.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from functools import partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import attrs
import torch

from fdsd.algebra.dtypes import as_bytes
from fdsd.data.values import is_dict, is_sequence

__all__ = ["canonical"]


def canonical(value: Any) -> Any:
    """Write a value as nested tuples of texts and numbers.

    Args:
        value: Anything. What a function closes over is not looked at: such a one does not travel, and its ranks may
            well know their own number. Nor is the state of an object that cannot be pickled.

    >>> canonical((1, torch.int8, True))
    ('tuple', (1, 'torch.int8', True))
    """
    return _Writer().write(value)


_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_FUNCTIONS = (
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
_SHORT = 64


class _Writer:
    """Writes one value; what contains itself is written once."""

    def __init__(self) -> None:
        self._open: list[int] = []  # the objects that are being written, outermost first

    def write(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return _of_plain(value)
        if isinstance(value, torch.dtype | torch.device | type):
            return str(value)
        if isinstance(value, array):
            return ("array", value.typecode, hashlib.sha256(value.tobytes()).hexdigest())
        if id(value) in self._open:
            return ("again", self._open.index(id(value)))
        self._open.append(id(value))
        try:
            return self._of_whole(value)
        finally:
            self._open.pop()

    def _of_whole(self, value: Any) -> Any:
        if is_sequence(value):
            return (type(value).__qualname__, tuple([self.write(item) for item in value]))
        if is_dict(value):
            return ("dict", tuple([(self.write(key), self.write(item)) for key, item in value.items()]))
        if isinstance(value, set | frozenset):
            members: Any = value  # pyright: ignore[reportUnknownVariableType]  # of anything
            name: str = type(members).__qualname__
            return (name, tuple(sorted([repr(self.write(item)) for item in members])))
        if isinstance(value, partial):
            options = sorted(value.keywords.items())
            return ("partial", self.write(value.func), self.write(value.args), self.write(options))
        if isinstance(value, _FUNCTIONS):
            return self._of_function(value)
        kind: type[Any] = value.__class__
        if attrs.has(kind):
            return self._of_attrs(value, kind)
        return self._of_object(value)

    def _of_attrs(self, value: Any, kind: type[Any]) -> Any:
        fields = [field for field in attrs.fields(kind) if field.eq and field.init]
        return (_name(kind), tuple([(field.name, self.write(getattr(value, field.name))) for field in fields]))

    def _of_function(self, value: Callable[..., Any]) -> Any:
        owner: Any = getattr(value, "__self__", None)
        name = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        code = _of_code(value.__code__) if isinstance(value, FunctionType) else None
        of = None if owner is None else owner.__name__ if isinstance(owner, ModuleType) else self.write(owner)
        return ("function", name, code, of)

    def _of_object(self, value: Any) -> Any:
        """Write an object as what it would be pickled from; one that cannot be, as what it shows of itself."""
        of: type[Any] = value.__class__
        kind = _name(of)
        try:
            if type(value) in _TENSORS and value.layout is torch.strided and not value.is_meta:
                data = as_bytes(value.detach().cpu()).numpy().data
                return (kind, str(value.dtype), tuple(value.shape), hashlib.sha256(data).hexdigest())
            made: Any = value.__reduce_ex__(4)
            if isinstance(made, str):  # the name of a global
                return (kind, made)
            make, given, state, items, pairs = (*made, None, None, None)[:5]
            rest = [None if some is None else list(some) for some in (items, pairs)]
            return (kind, self.write(make), self.write(given), self.write(state), self.write(rest))
        except Exception:  # whatever a class raises that is not made to be pickled
            has_repr = "__repr__" in {name for base in of.__mro__[:-1] for name in vars(base)}
            return (kind, repr(value) if has_repr else None)  # an address says nothing


_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _of_plain(value: Any) -> Any:
    if type(value) not in _PLAIN:
        return (type(value).__qualname__, repr(value))
    if isinstance(value, bytes) and len(value) > _SHORT:
        return ("bytes", len(value), hashlib.sha256(value).hexdigest())
    return value


def _of_code(code: CodeType) -> Any:
    consts = tuple([_of_code(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts])
    return (hashlib.sha256(code.co_code).hexdigest(), code.co_names, consts)
