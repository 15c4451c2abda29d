"""Regions: which elements of a tensor are meant, as a grid of starts and (length, step) pairs per dim.

A box is the case of one pair of step 1 for each dim. Regions rather than boxes, because a dim that was
split and permuted is still one strided copy as a region, but thousands of boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fdsd.data.errors import SpecMismatch

__all__ = ["Region", "Span"]

Pair = tuple[int, int]


class Span(NamedTuple):
    """The indices ``start + sum(i_k * step_k)`` of one dim, for ``0 <= i_k < length_k``, outermost pair first.

    >>> Span(1, ((2, 4), (2, 1))).indices()
    [1, 2, 5, 6]
    """

    start: int
    pairs: tuple[Pair, ...] = ()

    @property
    def numel(self) -> int:
        """How many indices there are."""
        return math.prod(length for length, _ in self.pairs)

    @property
    def extent(self) -> int:
        """How far the last index lies behind the first."""
        return sum((length - 1) * step for length, step in self.pairs)

    def indices(self) -> list[int]:
        """List the indices, in order."""
        values = [self.start]
        for length, step in self.pairs:
            values = [value + i * step for value in values for i in range(length)]
        return values

    def shift(self, offset: int) -> Span:
        """Move all indices by ``offset``."""
        return Span(self.start + offset, self.pairs)


class Region(NamedTuple):
    """A grid of elements of a tensor: one span for each dim.

    Memory for a region has one dim for each pair of each span; a span without pairs is a selected index.

    >>> Region.whole((2, 3)).shape
    (2, 3)
    >>> Region((Span(0, ((2, 4), (2, 1))), Span(5))).shape
    (2, 2)
    """

    spans: tuple[Span, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Region:
        """The region of all elements of a tensor of this shape."""
        return cls(tuple([Span(0, ((size, 1),)) for size in shape]))

    @classmethod
    def box(cls, starts: Sequence[int], sizes: Sequence[int]) -> Region:
        """The region of a box.

        >>> Region.box((1, 0), (2, 3)).numel
        6
        """
        return cls(tuple([Span(start, ((size, 1),)) for start, size in zip(starts, sizes, strict=True)]))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of memory for this region: one size for each pair."""
        return tuple([length for span in self.spans for length, _ in span.pairs])

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod([length for span in self.spans for length, _ in span.pairs])

    def dim_of(self, dim: int) -> int:
        """Give the first dim of the memory that belongs to dim ``dim`` of the tensor."""
        return sum([len(span.pairs) for span in self.spans[:dim]])

    def replace(self, dim: int, *spans: Span) -> Region:
        """Put other spans (none, one or several) in the place of dim ``dim``."""
        return Region(self.spans[:dim] + spans + self.spans[dim + 1 :])

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Tell whether this is all of a tensor of ``shape``, in order, as a box."""
        return self == Region.whole(shape)

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Tell whether all elements lie within a tensor of ``shape``."""
        if len(self.spans) != len(shape):
            return False
        return not self.numel or all(
            span.start >= 0 and span.start + span.extent < size for span, size in zip(self.spans, shape, strict=True)
        )

    def check_inside(self, shape: tuple[int, ...], what: str) -> None:
        """Raise unless all elements lie within a tensor of ``shape``."""
        if not self.inside(shape):
            raise SpecMismatch(f"{what}: the region {self} does not lie within the shape {shape}.")

    def narrow(self, dim: int, start: int, length: int) -> Region:
        """Take ``length`` steps from ``start`` of one dim *of the memory* (a pair), the others whole.

        >>> Region.whole((4, 6)).narrow(1, 2, 3)
        Region(spans=(Span(start=0, pairs=((4, 1),)), Span(start=2, pairs=((3, 1),))))
        """
        for d, span in enumerate(self.spans):
            if dim < len(span.pairs):
                _, step = span.pairs[dim]
                pairs = (*span.pairs[:dim], (length, step), *span.pairs[dim + 1 :])
                return self.replace(d, Span(span.start + start * step, pairs))
            dim -= len(span.pairs)
        raise SpecMismatch(f"narrow: the region's memory has no dim {dim + len(self.shape)}.")

    def strides(self, strides: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Give the strides and the offset of this region as a view of memory with ``strides``.

        >>> Region.box((1, 2), (2, 2)).strides((10, 1))
        ((10, 1), 12)
        """
        steps = tuple(
            [step * stride for span, stride in zip(self.spans, strides, strict=True) for _, step in span.pairs]
        )
        return steps, sum([span.start * stride for span, stride in zip(self.spans, strides, strict=True)])

    def chunks(self, limit: int) -> Iterator[tuple[Region, tuple[slice, ...]]]:
        """Cut the region, outermost dims of its memory first, into parts of at most ``limit`` elements.

        Yields:
            Each part and where it lies in the memory of this region, in row-major order.

        >>> [where for _, where in Region.whole((2, 3)).chunks(3)]
        [(slice(0, 1, None), slice(0, 3, None)), (slice(1, 2, None), slice(0, 3, None))]
        """
        shape = self.shape
        where = tuple([slice(0, size) for size in shape])
        yield from _chunks(self, where, 0, max(1, limit))


def _chunks(
    region: Region, where: tuple[slice, ...], dim: int, limit: int
) -> Iterator[tuple[Region, tuple[slice, ...]]]:
    numel = region.numel
    if numel <= limit or dim == len(where):
        yield region, where
        return
    size = where[dim].stop
    rows = max(1, limit // (numel // size))
    for start in range(0, size, rows):
        length = min(rows, size - start)
        part = region.narrow(dim, start, length)
        there = (*where[:dim], slice(start, start + length), *where[dim + 1 :])
        if part.numel <= limit:
            yield part, there
        else:
            yield from _chunks(part, there, dim + 1, limit)
