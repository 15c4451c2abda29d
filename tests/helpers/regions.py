"""Regions for tests, memory to fill, and the oracle that slices a tensor by a region, one index at a time."""

from __future__ import annotations

import math
from random import Random

import torch
from attrs import frozen

from fdsd.data.region import Region, Span
from tests.helpers.tensors import as_bytes, carried, plain, slots

__all__ = ["Memory", "memory", "random_region", "random_shape", "random_span", "slice_by"]

_SIZES = (1, 2, 3, 4, 6, 8)
_ODD_SIZES = (0, 1, 5, 7, 12, 16)


def random_shape(rng: Random, *, max_dims: int = 3) -> tuple[int, ...]:
    """Draw a shape; 0-dim ones and zero-size dims come up."""
    return tuple(rng.choice(_ODD_SIZES if rng.random() < 0.25 else _SIZES) for _ in range(rng.randint(0, max_dims)))


def random_span(rng: Random, size: int) -> Span:
    """Draw a span inside a dim: a selected index, one run, or nested runs; it may be empty."""
    if not size:
        return Span(0, ((0, 1),))
    if rng.random() < 0.25:
        return Span(0, ((size, 1),))
    room, pairs = size - 1, []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3))):
        step = rng.randint(1, max(1, min(room, 5)))
        length = rng.randint(1, room // step + 1) if rng.random() < 0.97 else 0
        room -= max(length - 1, 0) * step
        pairs.append((length, step))
    rng.shuffle(pairs)
    return Span(rng.randint(0, room), tuple(pairs))


def random_region(rng: Random, shape: tuple[int, ...]) -> Region:
    """Draw a region inside a tensor of ``shape``, of not many more elements (indices may come up repeatedly)."""
    spans: list[Span] = []
    room = 4 * math.prod(shape) + 16
    for size in shape:
        span = random_span(rng, size)
        while span.numel > max(size, room):
            span = random_span(rng, size)
        room //= max(1, span.numel)
        spans.append(span)
    return Region(tuple(spans))


def slice_by(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Take a region of a tensor, by listing the indices of each dim."""
    bits = carried(plain(tensor))
    for dim, span in enumerate(region.spans):
        bits = bits.index_select(dim, torch.tensor(span.indices(), dtype=torch.int64))
    return slots(bits.reshape(region.shape), tensor.dtype)


@frozen
class Memory:
    """Memory to fill, a view of a larger buffer."""

    out: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor

    def spilled(self) -> bool:
        """Tell whether anything but the view was written."""
        after = as_bytes(self.buffer)
        size = self.out.dtype.itemsize
        offset, strides = self.out.storage_offset(), self.out.stride()
        for tensor in (after, expected := self.before.clone()):
            rows = tensor.view(-1, size).as_strided(
                (*self.out.shape, size), (*(s * size for s in strides), 1), offset * size
            )
            rows.zero_()
        return not torch.equal(after, expected)


def memory(rng: Random, shape: tuple[int, ...], dtype: torch.dtype) -> Memory:
    """Draw memory of a shape: contiguous, permuted, with gaps; all around it lie marked bytes."""
    order = list(range(len(shape)))
    if rng.random() < 0.5:
        rng.shuffle(order)
    gap = rng.choice((1, 1, 2))
    lead = rng.choice((0, 0, 5))
    buffer = torch.full(((lead + gap * math.prod(shape) + 1) * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)
    dense = torch.empty([shape[d] for d in order], device="meta").stride()
    strides = [0] * len(shape)
    for stride, d in zip(dense, order, strict=True):
        strides[d] = stride * gap
    return Memory(buffer.as_strided(shape, strides, lead), buffer, as_bytes(buffer))
