"""Which dtypes can be copied, cast and moved, and the one function that copies elements.

A few dtypes have no ``copy_`` (sub-byte ones) or lack single kernels (unsigned ones); they move as integers of
the same size. Casts that torch cannot do, or that drop a part of a value, are refused by name.
"""

from __future__ import annotations

import torch

from fdsd.data.errors import Unsupported
from fdsd.data.spec import dtype_name

__all__ = ["as_bytes", "check_cast", "copy_elements", "is_widening", "movable"]

_CARRIERS: dict[torch.dtype, torch.dtype] = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
# Elements of these mean nothing to torch's kernels: they can be moved, not read.
_OPAQUE = frozenset(
    dtype
    for name in [
        *[f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)],
        "bits1x8",
        "bits2x4",
        "bits4x2",
        "bits8",
        "bits16",
        "float4_e2m1fn_x2",
    ]
    if (dtype := getattr(torch, name, None)) is not None
)
_CARRIERS.update({dtype: torch.int16 if dtype.itemsize == 2 else torch.uint8 for dtype in _OPAQUE})
_QUANTIZED = frozenset([torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Give the bytes of the elements in row-major order, conjugate and negative bits resolved.

    >>> as_bytes(torch.tensor([1, 2], dtype=torch.int16))
    tensor([1, 0, 2, 0], dtype=torch.uint8)
    """
    packed = movable(tensor.resolve_conj().resolve_neg()).contiguous()
    # A tensor of one element counts as contiguous whatever its strides are, and a view of bytes does mind them.
    return packed.as_strided((packed.numel(),), (1,)).view(torch.uint8)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor in a dtype of the same size that every kernel for moving elements knows.

    >>> movable(torch.zeros(2, dtype=torch.uint16)).dtype
    torch.int16
    """
    carrier = _CARRIERS.get(tensor.dtype)
    return tensor if carrier is None else tensor.view(carrier)


def check_cast(source: torch.dtype, target: torch.dtype) -> None:
    """Raise for a cast that torch cannot do, or that would drop the imaginary part.

    Raises:
        Unsupported: Naming both dtypes and the remedy.
    """
    if source == target:
        return
    for dtype in (source, target):
        if dtype in _OPAQUE or dtype in _QUANTIZED:
            raise Unsupported(
                f"cast from {dtype_name(source)} to {dtype_name(target)}: elements of {dtype_name(dtype)} can be "
                "moved but not cast. Leave these tensors out by name, or use map_tensors() with a function of "
                "your own."
            )
    if source.is_complex and not target.is_complex:
        raise Unsupported(
            f"cast from {dtype_name(source)} to {dtype_name(target)} would drop the imaginary part. "
            "Use map_tensors(torch.real) or map_tensors(torch.view_as_real) to say which part is meant."
        )


def copy_elements(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy into ``out`` with its dtype and strides; conjugate and negative bits are resolved on the way."""
    if source.dtype == out.dtype:
        movable(out).copy_(movable(source))
        return
    check_cast(source.dtype, out.dtype)
    out.copy_(source.resolve_conj().resolve_neg())


def is_widening(source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether every value of ``source`` is a value of ``target``, so that a cast there and back is exact.

    >>> is_widening(torch.bfloat16, torch.float32), is_widening(torch.float16, torch.bfloat16)
    (True, False)
    """
    if source == target:
        return True
    if {source, target} & (_OPAQUE | _QUANTIZED) or source.is_complex != target.is_complex:
        return False  # the way from complex back to real would drop imaginary parts
    if source.is_complex:
        return is_widening(source.to_real(), target.to_real())
    if source is torch.bool:
        both = torch.tensor([False, True])
        return torch.equal(both.to(target).to(torch.bool), both)
    if source.is_floating_point:
        return target.is_floating_point and _float_fits(source, target)
    low, high = torch.iinfo(source).min, torch.iinfo(source).max
    if target.is_floating_point:
        # The integers up to 2 / eps are exact; 8-bit float kinds are too narrow for every integer dtype.
        return (
            target.itemsize >= 2 and max(-low, high) <= 2 / torch.finfo(target).eps and high < torch.finfo(target).max
        )
    if target is torch.bool:
        return False
    return torch.iinfo(target).min <= low and high <= torch.iinfo(target).max


def _float_fits(source: torch.dtype, target: torch.dtype) -> bool:
    """Try all values of an 8-bit dtype there and back; compare wider ones by precision and range."""
    if source.itemsize >= target.itemsize:
        return False
    if source.itemsize == 1:
        every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
        back = every.view(source).to(target).to(source)
        return torch.equal(back.view(torch.uint8), every) or _equal_but_for_nan(back, every.view(source))
    a, b = torch.finfo(source), torch.finfo(target)
    return a.eps >= b.eps and a.max <= b.max and a.smallest_normal * a.eps >= b.smallest_normal * b.eps


def _equal_but_for_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    a32, b32 = a.to(torch.float32), b.to(torch.float32)
    same = (a.view(torch.uint8) == b.view(torch.uint8)) | (a32.isnan() & b32.isnan())
    return bool(same.all())
