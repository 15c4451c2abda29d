"""What a tensor is before it has data: its shape and dtype, and how to read them off any leaf.

Nothing here touches element values. ``VirtualTensor`` is the base of the leaves that stand for tensors
which are not wholly here (``Lazy``, ``Sharded``); their classes live on higher floors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable
from functools import lru_cache
from typing import Any

import torch
from attrs import field, frozen

from fdsd.data.errors import SpecMismatch, Unsupported
from fdsd.data.place import Place

__all__ = [
    "OpaqueSpec",
    "PlainAccess",
    "TensorSpec",
    "VirtualTensor",
    "dtype_name",
    "is_exact",
    "known_spec",
    "spec_of",
]

Shape = tuple[int, ...]

# ShardedTensor warns of its end whenever an attribute is looked at.
PlainAccess = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]  # no public name


def _to_shape(shape: Iterable[int]) -> Shape:
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError as error:
        raise SpecMismatch(f"TensorSpec: a shape is a tuple of whole numbers, not {shape!r}.") from error
    if sizes and min(sizes) < 0:
        raise SpecMismatch(f"TensorSpec: sizes are 0 or more, not {sizes}.")
    return sizes


def _check_dtype(_instance: object, _attribute: object, value: Any) -> None:
    if not isinstance(value, torch.dtype):
        raise SpecMismatch(f"TensorSpec: {value!r} is no torch.dtype; write for example torch.float32.")


@frozen
class TensorSpec:
    """Shape and dtype of a tensor; the device is no part of it, since the edge chooses it.

    >>> spec = TensorSpec((2, 3), torch.float32)
    >>> spec.numel, spec.nbytes
    (6, 24)
    >>> spec
    TensorSpec((2, 3), torch.float32)
    """

    shape: Shape = field(converter=_to_shape)
    dtype: torch.dtype = field(validator=_check_dtype)
    tie: Hashable = field(default=None, kw_only=True, eq=False, repr=False)  # equal for tied names; see ``specs``

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    def with_shape(self, shape: Iterable[int]) -> TensorSpec:
        """Give the spec of the same dtype and another shape."""
        return TensorSpec(shape, self.dtype)

    def with_dtype(self, dtype: torch.dtype) -> TensorSpec:
        """Give the spec of the same shape and another dtype."""
        return TensorSpec(self.shape, dtype)

    def __repr__(self) -> str:
        return f"TensorSpec({self.shape}, {self.dtype})"

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)}"


@frozen
class OpaqueSpec(TensorSpec):
    """The spec of a tensor of a class that fdsd does not know: it can be renamed and chosen, and no more."""

    cls: str = field(kw_only=True, eq=False, repr=False)


class VirtualTensor:
    """Base of the leaves that stand for a tensor which is not wholly here."""

    __slots__ = ()

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype of the whole tensor."""
        raise NotImplementedError

    @property
    def place(self) -> Place:
        """Where the tensor would lie, were it in memory: leaves of one place, shape and dtype are tied."""
        return Place(("object", id(self)))


@lru_cache(1 << 14)
def known_spec(shape: Shape, dtype: torch.dtype) -> TensorSpec:
    """Give a spec that is made once: models have thousands of tensors, of few shapes.

    >>> known_spec((2,), torch.int8) is known_spec((2,), torch.int8)
    True
    """
    return TensorSpec(shape, dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Give the short name of a dtype.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


_EXACT = frozenset({torch.Tensor, torch.nn.Parameter})


def is_exact(leaf: object) -> bool:
    """Tell whether a leaf is a plain tensor or parameter, whose data is wholly here.

    >>> is_exact(torch.ones(2)), is_exact(torch.nn.Parameter(torch.ones(2))), is_exact(3)
    (True, True, False)
    """
    return type(leaf) in _EXACT


def _check_grid(leaf: torch.Tensor) -> None:
    """Raise for tensors that are no grid of elements."""
    if leaf.is_nested:
        raise Unsupported("A nested tensor cannot be rewritten; call .unbind() and name its parts one by one.")
    if leaf.is_quantized:
        raise Unsupported(
            f"A quantized tensor of {dtype_name(leaf.dtype)} cannot be rewritten; use .dequantize(), or .int_repr() "
            "with its scale as a tensor beside it."
        )
    if leaf.layout is not torch.strided:
        raise Unsupported(f"A tensor of layout {leaf.layout} cannot be rewritten; call .to_dense() on it first.")


def spec_of(leaf: Any) -> TensorSpec | None:
    """Read the spec off any tensor-like leaf; other objects have none.

    Args:
        leaf: A tensor of any class, a virtual tensor, a spec, or any object.

    Returns:
        The spec, or ``None`` for an object that is no tensor.

    >>> spec_of(torch.zeros(2, dtype=torch.int8))
    TensorSpec((2,), torch.int8)
    >>> spec_of("extra state") is None
    True
    """
    if type(leaf) in _EXACT:
        _check_grid(leaf)
        return known_spec(leaf.shape, leaf.dtype)
    if isinstance(leaf, TensorSpec):
        return leaf
    if isinstance(leaf, torch.Tensor):
        if isinstance(leaf, torch.nn.parameter.UninitializedParameter | torch.nn.parameter.UninitializedBuffer):
            raise Unsupported(
                "An uninitialized parameter of a lazy module has no shape yet; run the module once, then take its "
                "state."
            )
        with PlainAccess():
            shape, dtype = leaf.shape, leaf.dtype
        try:
            return known_spec(shape, dtype)
        except TypeError:  # sizes that are symbols have no hash
            return TensorSpec(shape, dtype)
    if isinstance(leaf, VirtualTensor):
        return leaf.spec
    return None
