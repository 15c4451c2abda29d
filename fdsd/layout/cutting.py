"""Cutting regions, whatever their steps, along the boundaries of pieces; memory is cut along with them.

Integers only: ``Spot`` is memory as numbers. Who holds the pieces is not looked at here.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from fdsd.algebra.spans import cut
from fdsd.data.region import Region, Span
from fdsd.layout.pieces import Box, Finder, Grid, Pieces, finder_of, intersect

__all__ = ["Cutter", "Spot", "cells"]


class Spot(NamedTuple):
    """Some elements of a numbered buffer, as a view of it says: offset, shape and strides in elements.

    It can be narrowed and selected from as a tensor can.

    >>> Spot(0, torch.int8, 0, (2, 3), (3, 1)).narrow(1, 1, 2).select(0, 1)
    Spot(buffer=0, dtype=torch.int8, offset=4, shape=(2,), strides=(1,))
    """

    buffer: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def narrow(self, dim: int, start: int, length: int) -> Spot:
        """Take ``length`` indices of a dim from ``start`` on."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return self._replace(offset=self.offset + start * self.strides[dim], shape=shape)

    def select(self, dim: int, index: int) -> Spot:
        """Take one index of a dim, which goes away."""
        return Spot(
            self.buffer,
            self.dtype,
            self.offset + index * self.strides[dim],
            self.shape[:dim] + self.shape[dim + 1 :],
            self.strides[:dim] + self.strides[dim + 1 :],
        )

    def part(self, where: Sequence[slice]) -> Spot:
        """Take a box of it."""
        offset = sum([part.start * stride for part, stride in zip(where, self.strides, strict=True)])
        return self._replace(offset=self.offset + offset, shape=tuple([part.stop - part.start for part in where]))


def _cut(span: Span, bounds: Sequence[int], spot: Spot, dim: int) -> Iterator[tuple[int, Span, Spot]]:
    found: Any = cut(span, bounds, cast("torch.Tensor", spot), dim)  # it only narrows and selects
    yield from found


_Found = tuple["int | None", Region, Spot]


class Cutter:
    """Cuts regions of one tensor along its pieces.

    Args:
        pieces: The pieces; no two of them share elements (see ``cells``).

    >>> halves = Pieces.of(1, [(((0,), (4,)), [0]), (((4,), (4,)), [1])])
    >>> odd = Region((Span(1, ((4, 2),)),))
    >>> [(i, part.spans[0].indices()) for i, part, _ in Cutter(halves).cut(odd, Spot(0, torch.int8, 0, (4,), (1,)))]
    [(0, [1, 3]), (1, [5, 7])]
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._finder = finder_of(pieces)
        self._bounds: list[tuple[list[int], list[int | None]]] = []
        if isinstance(self._finder, Grid):
            self._bounds = [_bounds(*ends) for ends in zip(self._finder.starts, self._finder.ends, strict=True)]

    def cut(self, region: Region, spot: Spot) -> Iterator[_Found]:
        """Cut a region.

        Args:
            region: The region; it is not empty.
            spot: The memory that it fills.

        Yields:
            For each part of it within one piece: the piece (``None`` for what lies in none), the part and its memory.
        """
        box = _bounding(region)
        near = self._finder.find(box)
        if len(near) == 1 and intersect(self._pieces.box(near[0]), box) == box:
            yield near[0], region, spot
        elif isinstance(self._finder, Grid):
            yield from self._by_grid(self._finder, region, spot, 0, ())
        else:
            yield from self._by_piece(near, region, spot)

    def _by_grid(self, grid: Grid, region: Region, spot: Spot, dim: int, cell: tuple[int, ...]) -> Iterator[_Found]:
        if dim == len(region.spans):
            yield grid.cells.get(cell), region, spot
            return
        bounds, intervals = self._bounds[dim]
        for part, span, view in _cut(region.spans[dim], bounds, spot, region.dim_of(dim)):
            interval = intervals[part]
            if interval is None:
                yield None, region.replace(dim, span), view
            else:
                yield from self._by_grid(grid, region.replace(dim, span), view, dim + 1, (*cell, interval))

    def _by_piece(self, near: Sequence[int], region: Region, spot: Spot) -> Iterator[_Found]:
        missing = region.numel
        for piece in near:
            for part, view in _within(region, spot, self._pieces.box(piece)):
                missing -= part.numel
                yield piece, part, view
        if missing:
            yield None, _some(missing), spot


def _some(count: int) -> Region:
    """Give a region of so many elements, when it matters only how many are missing."""
    return Region((Span(0, ((count, 1),)),))


def _bounding(region: Region) -> Box:
    return tuple([span.start for span in region.spans]), tuple([span.extent + 1 for span in region.spans])


def _bounds(starts: list[int], ends: list[int]) -> tuple[list[int], list[int | None]]:
    """Give all boundaries of a dim, and for each stretch between two of them its interval, if it lies in one."""
    bounds = sorted({0, *starts, *ends})
    intervals: list[int | None] = []
    for at in bounds:
        i = bisect_right(starts, at) - 1
        intervals.append(i if i >= 0 and at < ends[i] else None)
    return [*bounds, 1 << 62], intervals


def _within(region: Region, spot: Spot, box: Box, dim: int = 0) -> Iterator[tuple[Region, Spot]]:
    """Give the parts of a region that lie within a box."""
    if dim == len(region.spans):
        yield region, spot
        return
    start, size = box[0][dim], box[1][dim]
    for part, span, view in _cut(region.spans[dim], [-1, start, start + size, 1 << 62], spot, region.dim_of(dim)):
        if part == 1:
            yield from _within(region.replace(dim, span), view, box, dim + 1)


def cells(pieces: Pieces) -> Pieces:
    """Cut pieces that share elements along each other, so that no two do; each has the ranks of all that it lay in.

    >>> some = Pieces.of(1, [(((0,), (4,)), [0]), (((2,), (2,)), [1])])
    >>> list(cells(some))
    [(((0,), (2,)), (0,)), (((2,), (2,)), (0, 1))]
    """
    finder: Finder = finder_of(pieces)
    if finder.is_disjoint:
        return pieces
    bounds: list[list[int]] = []
    for dim in range(pieces.ndim):
        starts, sizes = pieces.starts[dim :: pieces.ndim], pieces.sizes[dim :: pieces.ndim]
        bounds.append(sorted({*starts, *[at + size for at, size in zip(starts, sizes, strict=True)]}))
    rows: list[tuple[Box, set[int]]] = []
    for corners in itertools.product(*[list(itertools.pairwise(some)) for some in bounds]):
        box = tuple([a for a, _ in corners]), tuple([b - a for a, b in corners])
        ranks = {rank for i in finder.find(box) for rank in pieces.ranks[i]}
        if ranks:
            rows.append((box, ranks))
    return Pieces.of(pieces.ndim, rows)
