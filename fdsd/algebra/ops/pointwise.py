"""Operations that compute each element from the elements at the same place.

Each is built of single correctly rounded torch calls, in float32 for narrower floats, so that neither the slicing
nor the memory layout can change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen

from fdsd.algebra.dtypes import as_bytes, copy_elements
from fdsd.algebra.lazy import Computing
from fdsd.algebra.ops.leaves import exactly
from fdsd.data.errors import SpecMismatch, Unsupported, plural
from fdsd.data.place import Place
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec, dtype_name

__all__ = ["AddScalar", "Average", "Lerp", "Same"]


class _Pointwise(Computing):
    """Shared by all: any region needs just itself of every input."""

    __slots__ = ()

    pointwise = True

    def needs(self, inputs: Sequence[TensorSpec], region: Region) -> Sequence[Region]:
        return [region] * len(inputs)

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def overhead(self, dtype: torch.dtype) -> int:
        return 3 * max(dtype.itemsize, 4)  # temporaries of the dtype in which arithmetic is done

    def compute(self, parts: Sequence[torch.Tensor], region: Region, out: torch.Tensor) -> None:
        copy_elements(self.eager(*parts), out)


def _same_spec(what: str, inputs: Sequence[TensorSpec]) -> TensorSpec:
    for x in inputs[1:]:
        if x != inputs[0]:
            raise SpecMismatch(f"{what}: shapes and dtypes must be equal, these differ: {inputs[0]} and {x}.")
    return inputs[0]


def _working_dtype(dtype: torch.dtype, what: str) -> torch.dtype:
    """The dtype in which arithmetic on ``dtype`` is done: float32 for the narrower floats."""
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize >= 4):
        return torch.complex64 if dtype is torch.complex32 else dtype
    if dtype.is_floating_point and dtype is not getattr(torch, "float4_e2m1fn_x2", None):
        return torch.float32
    raise Unsupported(
        f"{what}: {dtype_name(dtype)} is no floating dtype. Leave these tensors out by name, or cast first."
    )


@frozen
class AddScalar(_Pointwise):
    """Add one number to every element, rounding once to the tensor's own dtype; sums of integers wrap as torch's do."""

    value: float = field(eq=exactly)

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        if x.dtype.is_floating_point or x.dtype.is_complex:
            _working_dtype(x.dtype, "add_scalar")
        elif x.dtype not in _INTEGERS or not _is_of(self.value, x.dtype):
            raise Unsupported(
                f"add_scalar: {self.value!r} cannot be added to elements of {dtype_name(x.dtype)}"
                f"{_range_text(x.dtype)}. Use cast() first."
            )
        return x

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        (x,) = inputs
        if x.dtype in _INTEGERS:
            return x + int(self.value)
        return (x.to(_working_dtype(x.dtype, "add_scalar")) + float(self.value)).to(x.dtype)


_INTEGERS = frozenset([torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])


def _is_of(value: float, dtype: torch.dtype) -> bool:
    """Whether an integer dtype has a number."""
    info = torch.iinfo(dtype)
    return info.min <= value <= info.max and int(value) == value


def _range_text(dtype: torch.dtype) -> str:
    if dtype not in _INTEGERS:
        return ""
    return f", which holds whole numbers from {torch.iinfo(dtype).min} to {torch.iinfo(dtype).max}"


@frozen
class Average(_Pointwise):
    """The weighted sum of tensors, added up in order and rounded once; without weights their mean.

    The mean of equal numbers is that number, whatever rounding the sum would suffer.
    """

    weights: tuple[float, ...] | None = field(default=None, eq=exactly)

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        if not inputs:
            raise SpecMismatch("average: there are no tensors; give one or more.")
        if self.weights is not None and len(self.weights) != len(inputs):
            raise SpecMismatch(
                f"average: {plural(len(inputs), 'tensor')} with {plural(len(self.weights), 'weight')}. Give one for "
                "each."
            )
        spec = _same_spec("average", inputs)
        _working_dtype(spec.dtype, "average")
        return spec

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        dtype = inputs[0].dtype
        work = _working_dtype(dtype, "average")
        if self.weights is None:
            return _mean(inputs, work).to(dtype)
        total = inputs[0].to(work) * self.weights[0]
        for x, weight in zip(inputs[1:], self.weights[1:], strict=True):
            total = total + x.to(work) * weight
        return total.to(dtype)


def _mean(inputs: Sequence[torch.Tensor], work: torch.dtype) -> torch.Tensor:
    first = inputs[0].to(work)
    total, equal = first, torch.ones_like(first, dtype=torch.bool)
    for x in inputs[1:]:
        total = total + x.to(work)
        equal &= x.to(work) == first
    return torch.where(equal, first, total / len(inputs))


@frozen
class Lerp(_Pointwise):
    """``a + weight * (b - a)``, rounded once; exactly ``a`` at weight 0, ``b`` at weight 1, and both where equal."""

    weight: float = field(eq=exactly)

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        spec = _same_spec("lerp", inputs)
        _working_dtype(spec.dtype, "lerp")
        return spec

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        a, b = inputs
        if self.weight in (0, 1):
            return (b if self.weight else a).clone()
        work = _working_dtype(a.dtype, "lerp")
        low, high = a.to(work), b.to(work)
        # The formula that is exact at the nearer end, as torch.lerp has it.
        if abs(self.weight) < 0.5:
            made = low + (high - low) * self.weight
        else:
            made = high - (high - low) * (1 - self.weight)
        return torch.where(low == high, low, made).to(a.dtype)  # inf - inf would be no number


@frozen
class Same(_Pointwise):
    """The first tensor, once all of them are found to be equal byte for byte; a value check."""

    names: tuple[str, ...]
    reason: str
    is_view = True

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        for name, x in zip(self.names, inputs, strict=True):
            if x != inputs[0]:
                raise SpecMismatch(
                    f"{self.reason}: {self.names[0]!r} is {inputs[0]}, but {name!r} is {x}. Drop all but one first."
                )
        return inputs[0]

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        if any(x.is_meta for x in inputs):  # there are no values to compare
            return inputs[0]
        first = as_bytes(inputs[0])
        unequal = [
            name for name, x in zip(self.names[1:], inputs[1:], strict=True) if not torch.equal(first, as_bytes(x))
        ]
        if unequal:
            raise SpecMismatch(
                f"{self.reason}: {self.names[0]!r} and {', '.join(map(repr, unequal[:10]))} hold unequal values. "
                "Drop all but one first."
            )
        return inputs[0]

    def view(self, place: Place, spec: TensorSpec) -> Place | None:
        return place
