"""What leaves that stand for tensors refuse alike: truth, length, elements, arithmetic, and torch's own functions.

Each says what it is and which remedy there is; what such a leaf can do is told in its own module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import torch

from fdsd.data.errors import LazyError
from fdsd.data.spec import VirtualTensor

__all__ = ["Standin"]


class Standin(VirtualTensor):
    """A leaf that has a spec, and refuses with a reason whatever would need the values of a whole tensor here."""

    __slots__ = ()

    _kind: ClassVar[str]
    _until: ClassVar[str]
    _remedy: ClassVar[str]

    def _told(self) -> str:
        """Say what it is, for errors; it must not fail on an object that is not filled yet."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims."""
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.spec.ndim

    def numel(self) -> int:
        """The number of elements."""
        return self.spec.numel

    def _refuse(self, what: str) -> NoReturn:
        raise LazyError(f"This tensor is {self._told()}: it has no {what} {self._until}. {self._remedy}.")

    def _no_arithmetic(self, *_others: object) -> NoReturn:
        self._refuse("values to compute with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_arithmetic
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _no_arithmetic
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __neg__ = __pos__ = __abs__ = __invert__ = (
        _no_arithmetic
    )
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = __complex__ = _no_arithmetic

    def __contains__(self, item: object) -> bool:
        self._refuse("elements to look for")

    def __bool__(self) -> bool:
        self._refuse("truth value")

    def __len__(self) -> int:
        self._refuse("length")

    def __iter__(self) -> Iterator[Any]:
        self._refuse("elements to iterate over")

    def __getitem__(self, index: object) -> Any:
        self._refuse("elements to index")

    def __getattr__(self, name: str) -> Any:
        # protocols probe for special methods, and copying looks at objects that are not filled yet
        slots: Any = type(self).__slots__
        if name.startswith("__") or name in slots:
            raise AttributeError(name)
        self._refuse(f"attribute {name!r}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise LazyError(
            f"torch.{name} cannot run on a {cls._kind} tensor. Use map_tensors() in a pipeline, or"
            f"{cls._remedy.removeprefix('Use')}."
        )
