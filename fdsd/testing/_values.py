"""Tensors for tests: all-different values of every dtype, and the ways in which a tensor can lie in memory.

Nothing here draws; ``_states`` does.
"""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch

from fdsd.data.spec import TensorSpec

__all__ = ["DTYPES", "LAYOUTS", "Values", "has_layout", "lay_out"]


def _known(*names: str) -> list[torch.dtype]:
    return [dtype for name in names if (dtype := getattr(torch, name, None)) is not None]


DTYPES = _known(
    *("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("uint16", "uint32", "uint64", "complex64", "complex128", "complex32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
"""The dtypes of random states."""

LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded", "conjugate", "negative")
"""The ways in which a tensor can lie in memory."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD = 0x9E3779B97F4A7C15 >> 2 | 1  # odd, so that multiples of it are different in any number of low bits


class Values:
    """Gives tensors whose elements are all different, over all tensors, as far as their dtypes have so many.

    Args:
        seed: Where to begin.
        unique: Whether values are finite and all different; otherwise they are few bit patterns, NaN and
            infinity among them.
    """

    def __init__(self, seed: int, *, unique: bool) -> None:
        self._count = seed
        self._unique = unique

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Make the next tensor, contiguous."""
        with warnings.catch_warnings():  # torch says once a process that complex32 is experimental
            warnings.simplefilter("ignore")
            torch.empty(1, dtype=torch.complex32)
            return self._tensor(spec.dtype, spec.numel).reshape(spec.shape)

    def _tensor(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        if dtype.is_complex:
            parts = self._tensor(dtype.to_real(), 2 * count)
            return torch.view_as_complex(parts.reshape(count, 2))
        order = torch.arange(self._count, self._count + count)
        self._count += count
        if not self._unique:
            order = order * order % 7 + order % 3 * 0x7F81
        if dtype is torch.bool:
            return order * 5 % 3 == 0
        return self._from_order(dtype, order)

    def _from_order(self, dtype: torch.dtype, order: torch.Tensor) -> torch.Tensor:
        word = _WORDS[dtype.itemsize]
        if not self._unique:
            bits = order * 0x7F if dtype.itemsize == 1 else order << (8 * dtype.itemsize - 16)
        elif dtype.itemsize <= 2:
            some = _finite(dtype)
            bits = some[order * 7919 % len(some)]
        elif dtype.is_floating_point:  # a cleared top bit of the exponent: finite, and less than 2 in size
            mixed = order * _SPREAD
            top = 8 * dtype.itemsize - 2
            bits = (mixed & ((1 << top) - 1)) | ((mixed >> top & 1) << top << 1)
        else:
            bits = order * _SPREAD
        return _as_word(bits, word).view(dtype)


def _as_word(bits: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """Keep the low bits, as an integer dtype."""
    return bits.contiguous().view(torch.uint8).view(-1, 8)[:, : word.itemsize].contiguous().view(word).view(-1)


@lru_cache
def _finite(dtype: torch.dtype) -> torch.Tensor:
    """Give the bit patterns of a dtype of 8 or 16 bits that are finite numbers."""
    every = torch.arange(1 << 8 * dtype.itemsize)
    if not dtype.is_floating_point:
        return every
    values = _as_word(every, _WORDS[dtype.itemsize]).view(dtype).to(torch.float32)
    return every[values.isfinite()]


def has_layout(kind: str, spec: TensorSpec) -> bool:
    """Tell whether a tensor of this spec can lie in memory in this way."""
    if kind == "conjugate":
        return spec.dtype in (torch.complex64, torch.complex128)
    if kind == "negative":
        return spec.dtype in (torch.float32, torch.float64)
    if kind == "transposed":
        return spec.ndim > 1
    return kind in ("contiguous", "offset") or spec.ndim > 0


def lay_out(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Give a contiguous tensor's elements in memory that lies as ``kind`` says.

    The values stay, but for "expanded" (the first index of the first dim, repeated), and for "conjugate" and
    "negative", which leave the memory and change what it means.
    """
    if kind == "contiguous":
        return tensor
    if kind == "conjugate":
        return tensor.conj()
    if kind == "negative":
        return torch.complex(torch.zeros_like(tensor), tensor).conj().imag
    word = _WORDS.get(tensor.dtype.itemsize)
    bits = tensor if word is None else tensor.view(word)
    if kind == "transposed":
        made = bits.transpose(0, -1).contiguous().transpose(0, -1)
    elif kind == "expanded":
        made = bits[:1].expand(bits.shape)
    elif kind == "strided":
        made = bits.new_zeros((*bits.shape[:-1], 2 * bits.shape[-1] + 1))[..., 1::2].copy_(bits)
    else:
        made = bits.new_zeros(bits.numel() + 3)[3:].view(bits.shape).copy_(bits)
    return made if word is None else made.view(tensor.dtype)
