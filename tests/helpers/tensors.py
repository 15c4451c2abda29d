"""Tensors for tests: every dtype, all-different values, every memory layout; and equality by bytes."""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from random import Random

import torch

with warnings.catch_warnings():  # torch says once a process that complex32 is experimental
    warnings.simplefilter("ignore")
    torch.empty(1, dtype=torch.complex32)

__all__ = [
    "COMPLEX",
    "EIGHT_BIT_FLOATS",
    "FLOATS",
    "INTEGERS",
    "LAYOUTS",
    "MOVABLE",
    "NUMERIC",
    "OPAQUE",
    "any_layout",
    "as_bytes",
    "carried",
    "has_layout",
    "is_signed",
    "lay_out",
    "name_of",
    "numbers",
    "patterns",
    "plain",
    "same_bytes",
    "slots",
]


def _known(*names: str) -> list[torch.dtype]:
    return [dtype for name in names if (dtype := getattr(torch, name, None)) is not None]


EIGHT_BIT_FLOATS = _known("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, *EIGHT_BIT_FLOATS]
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
NUMERIC = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
OPAQUE = _known("int4", "uint4", "uint1", "int7", "bits8", "bits16", "float4_e2m1fn_x2")
MOVABLE = [*NUMERIC, *OPAQUE]
LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded", "conjugate", "negative")

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a tensor and resolve its conjugate and negative bits."""
    made = tensor.detach()
    made = made.resolve_conj() if made.is_conj() else made
    return made.resolve_neg() if made.is_neg() else made


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of the same size, where there are some."""
    word = _WORDS.get(tensor.dtype.itemsize)
    return tensor if word is None or tensor.dtype is word else plain(tensor).view(word)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Give a copy of the bytes of the elements, in row-major order."""
    # a copy, since one element of any stride is contiguous in the eyes of torch, but no view of bytes
    return carried(plain(tensor)).clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors have one shape, one dtype and the same bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def slots(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View integers from ``carried`` as ``dtype`` again."""
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


def is_signed(dtype: torch.dtype) -> bool:
    """Tell whether a numeric dtype has negative values."""
    if dtype.is_complex:
        return True
    if dtype.is_floating_point:
        return torch.finfo(dtype).min < 0
    return dtype is not torch.bool and torch.iinfo(dtype).min < 0


# -- values ----------------------------------------------------------------------------------------------------


def _shuffled(count: int, seed: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def patterns(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Give a tensor of all-different bit patterns (as far as the dtype has so many), NaNs included."""
    count, size = math.prod(shape), dtype.itemsize
    if dtype is torch.bool:
        return (_shuffled(count, seed) % 2).bool().reshape(shape)
    order = _shuffled(max(256, count), seed)[:count]
    if size <= 2:
        few = order % (1 << 8 * size)
        return slots(few.to(torch.uint8) if size == 1 else few.to(torch.int16), dtype).reshape(shape)
    mixed = order * 0x9E3779B97F4A7C1 + 0x1F123BB5159A55E5  # distinct in the low 32 bits as well
    if size == 16:
        return torch.stack([mixed, mixed * 3 + 1], 1).reshape(-1).view(dtype).reshape(shape)
    return slots(mixed.to(torch.int32) if size == 4 else mixed, dtype).reshape(shape)


@lru_cache
def _small_floats(dtype: torch.dtype) -> torch.Tensor:
    """All values of a float dtype of 8 or 16 bits from 1/64 to 100."""
    words = torch.arange(1 << 8 * dtype.itemsize)
    every = slots(words.to(torch.uint8) if dtype.itemsize == 1 else words.to(torch.int16), dtype)
    wide = every.to(torch.float64)
    return slots(carried(every)[(wide >= 1 / 64) & (wide <= 100)], dtype)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, *, signed: bool = False) -> torch.Tensor:
    """Give a tensor of all-different numbers of size at most 100, as far as the dtype has so many.

    Casts between such numbers are defined for every pair of dtypes (if not ``signed``, for unsigned ones too).
    """
    count = math.prod(shape)
    order = _shuffled(count, seed)
    if dtype is torch.bool:
        return (order % 2).bool().reshape(shape)
    if dtype.is_complex:
        real = (order.double() * 3 + 0.37) * (70 / max(1, 3 * count))
        whole = torch.complex(real, real.flip(0) * 0.875 + 0.01)
        made = whole if not signed else whole * (1 - 2 * (order % 2)).double()
        return made.to(dtype).reshape(shape)
    if not dtype.is_floating_point:
        made = order % 101
    elif dtype.itemsize <= 2:
        some = _small_floats(dtype)
        made = slots(carried(some)[order * 7919 % len(some)], dtype)
    else:
        made = ((order.double() + 0.37) * (100 / max(1, count))).to(dtype)
    if signed and is_signed(dtype):
        wide = made.to(torch.float64)
        made = torch.where(order % 2 == 0, wide, -wide)
    return made.to(dtype).reshape(shape)


# -- layouts ---------------------------------------------------------------------------------------------------


def has_layout(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Tell whether a tensor of this shape and dtype can lie in memory in this way."""
    if kind == "conjugate":
        return dtype in (torch.complex64, torch.complex128)
    if kind == "negative":
        return dtype in (torch.float32, torch.float64)
    if kind == "transposed":
        return len(shape) > 1
    if kind in ("strided", "expanded"):
        return bool(shape)
    return kind in ("contiguous", "offset")


def lay_out(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Give a tensor of the same shape and dtype that lies in memory as ``kind`` says.

    The values are the same, but for "expanded" (the first index of the first dim, repeated) and for the negative
    bit and the conjugate bit, which leave the memory and change what it means.
    """
    if kind == "contiguous":
        return tensor
    if kind == "conjugate":
        return tensor.conj()
    if kind == "negative":
        return torch.complex(torch.zeros_like(tensor), tensor).conj().imag
    bits = carried(tensor)
    if kind == "transposed":
        made = bits.transpose(0, -1).contiguous().transpose(0, -1)
    elif kind == "strided":
        made = bits.new_zeros((*bits.shape[:-1], 2 * bits.shape[-1] + 1))[..., 1::2]
        made.copy_(bits)
    elif kind == "offset":
        made = bits.new_zeros(bits.numel() + 3)[3:].view(bits.shape)
        made.copy_(bits)
    elif kind == "expanded":
        made = bits[:1].expand(bits.shape)
    else:
        raise ValueError(kind)
    return slots(made, tensor.dtype)


def any_layout(rng: Random, tensor: torch.Tensor) -> torch.Tensor:
    """Lay a tensor out in one of the ways that it can lie."""
    kinds = [kind for kind in LAYOUTS if has_layout(kind, tuple(tensor.shape), tensor.dtype)]
    return lay_out(tensor, rng.choice(kinds))
