"""Operations without inputs: where expressions begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import field, frozen

from fdsd.algebra.dtypes import check_cast, copy_elements, movable
from fdsd.algebra.lazy import Op
from fdsd.data.errors import Unsupported
from fdsd.data.place import Place
from fdsd.data.protocols import Source
from fdsd.data.spec import TensorSpec, dtype_name

__all__ = ["Constant", "Origin", "exactly", "scalar"]


def exactly(value: object) -> tuple[type[object], str]:
    """Give what tells numbers apart that are equal but not the same: ``0.0`` and ``-0.0``, ``1`` and ``True``.

    >>> exactly(0.0) == exactly(-0.0), exactly(1) == exactly(True), exactly(0.5) == exactly(0.5)
    (False, False, True)
    """
    return type(value), repr(value)


def scalar(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Give one number as a tensor without dims, rounded if the dtype is a floating one.

    Args:
        value: A number of Python's.
        dtype: The dtype of the result.

    Raises:
        Unsupported: The dtype does not have the number, or it is none.

    >>> scalar(2.7, torch.bfloat16)
    tensor(2.7031, dtype=torch.bfloat16)
    """
    refusal = f"a constant of {dtype_name(dtype)} cannot be {value!r}"
    if not isinstance(value, bool | int | float | complex):
        raise Unsupported(f"{refusal}, which is no number.")
    if type(value) in (int, bool) and not value:  # all zero bits in every dtype
        zero = torch.empty((), dtype=dtype)
        movable(zero).zero_()
        return zero
    if not (dtype.is_floating_point or dtype.is_complex):
        value = _whole(value, dtype, refusal)
        if dtype is torch.uint64:
            return torch.tensor(value - (value >> 63 << 64), dtype=torch.int64).view(dtype)
    try:
        return torch.full((), value, dtype=dtype)
    except (RuntimeError, TypeError, OverflowError, ValueError) as error:
        raise Unsupported(f"{refusal}: {error}.") from error


def _whole(value: Any, dtype: torch.dtype, refusal: str) -> int:
    """Give a number that an integer dtype, or bool, has exactly."""
    if isinstance(value, complex) or value != value or value in (float("inf"), -float("inf")) or value % 1:
        raise Unsupported(f"{refusal}, which is no whole number.")
    try:
        low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    except TypeError as error:
        raise Unsupported(f"{refusal}: only 0 is known of this dtype.") from error
    if not low <= value <= high:
        raise Unsupported(f"{refusal}: it holds {low} to {high}.")
    return int(value)


@frozen
class Origin(Op):
    """A tensor of a source, by its FQN there."""

    source: Source = field(eq=id)
    fqn: str
    spec: TensorSpec = field(eq=False)

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        return self.spec

    def root(self) -> Place | None:
        find: Callable[[str], Place | None] | None = getattr(self.source, "place", None)
        return None if find is None else find(self.fqn)

    def __repr__(self) -> str:
        return f"Origin({self.fqn!r})"


@frozen
class Constant(Op):
    """A tensor of one value, rounded to its own dtype before anything else happens to it."""

    spec: TensorSpec
    value: Any = field(default=0, eq=exactly)

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        scalar(self.value, self.spec.dtype)
        return self.spec

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        out = torch.empty(self.spec.shape, dtype=self.spec.dtype)
        self.fill(out)
        return out

    def fill(self, out: torch.Tensor) -> None:
        """Write the value to all of ``out``, in its dtype."""
        value = scalar(self.value, self.spec.dtype)
        check_cast(self.spec.dtype, out.dtype)
        copy_elements(value.expand(out.shape), out)
