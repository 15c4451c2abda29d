"""`Pieces`: boxes of one tensor, each with the ranks that hold it, or that want it; and finding those that overlap.

Columns of integers, since a tensor over many ranks has many pieces. Layouts and messages are unknown here.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from attrs import field, frozen

from fdsd.data.errors import SpecMismatch
from fdsd.data.region import Region

__all__ = ["Box", "Finder", "Grid", "Pieces", "finder_of", "intersect", "subtract"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Starts and sizes."""


def _bytes_hash(values: array[int]) -> int:
    return hash(values.tobytes())


@frozen(repr=False, eq=False, cache_hash=False)
class Pieces:
    """Different boxes of one tensor, none empty, and the ranks of each.

    >>> pieces = Pieces.of(1, [(((0,), (2,)), [1]), (((2,), (2,)), [0]), (((0,), (2,)), [3])])
    >>> list(pieces)
    [(((0,), (2,)), (1, 3)), (((2,), (2,)), (0,))]
    """

    ndim: int
    starts: array[int]  # of all boxes, one after the other
    sizes: array[int]
    ranks: tuple[tuple[int, ...], ...]  # ascending
    _hash: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        made = hash((self.ndim, _bytes_hash(self.starts), _bytes_hash(self.sizes), self.ranks))
        object.__setattr__(self, "_hash", made)

    @classmethod
    def of(cls, ndim: int, rows: Iterable[tuple[Box, Iterable[int]]]) -> Pieces:
        """Make pieces of boxes with ranks; equal boxes become one with the ranks of all, and empty ones are left out.

        Args:
            ndim: The number of dims of the tensor.
            rows: Boxes, each with the ranks that hold or want it.

        Raises:
            SpecMismatch: A box has another number of dims.
        """
        merged: dict[Box, set[int]] = {}
        for box, ranks in rows:
            if len(box[0]) != ndim or len(box[1]) != ndim:
                raise SpecMismatch(f"Pieces: the box {box} is none of a tensor of {ndim} dims.")
            if 0 not in box[1]:
                merged.setdefault((tuple(box[0]), tuple(box[1])), set()).update(ranks)
        starts, sizes = array("q"), array("q")
        shared: dict[tuple[int, ...], tuple[int, ...]] = {}
        ranks_of: list[tuple[int, ...]] = []
        for (at, size), some in merged.items():
            starts.extend(at)
            sizes.extend(size)
            ranked = tuple(sorted(some))
            ranks_of.append(shared.setdefault(ranked, ranked))
        return cls(ndim, starts, sizes, tuple(ranks_of))

    @classmethod
    def whole(cls, shape: Iterable[int], ranks: Iterable[int]) -> Pieces:
        """Give all of a tensor as one piece of some ranks.

        >>> list(Pieces.whole((2, 3), [0]))
        [(((0, 0), (2, 3)), (0,))]
        """
        shape = tuple(shape)
        return cls.of(len(shape), [(((0,) * len(shape), shape), ranks)])

    @classmethod
    def of_regions(cls, ndim: int, rows: Iterable[tuple[Region, Iterable[int]]]) -> Pieces:
        """Make pieces of regions, which have to be boxes.

        Raises:
            SpecMismatch: A region is no box.

        >>> list(Pieces.of_regions(1, [(Region.box((2,), (3,)), [0, 1])]))
        [(((2,), (3,)), (0, 1))]
        """
        return cls.of(ndim, [(_box_of(region), ranks) for region, ranks in rows])

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[tuple[Box, tuple[int, ...]]]:
        return iter([(self.box(i), self.ranks[i]) for i in range(len(self.ranks))])

    def box(self, i: int) -> Box:
        """Give the starts and sizes of a piece."""
        at = i * self.ndim
        return tuple(self.starts[at : at + self.ndim]), tuple(self.sizes[at : at + self.ndim])

    def region(self, i: int) -> Region:
        """Give a piece as a region of the tensor."""
        return Region.box(*self.box(i))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pieces):
            return NotImplemented
        return self is other or (
            (self.ndim, self.ranks) == (other.ndim, other.ranks)
            and self.starts == other.starts
            and self.sizes == other.sizes
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return Pieces, (self.ndim, self.starts, self.sizes, self.ranks)  # hashes differ from process to process

    def __repr__(self) -> str:
        return f"Pieces.of({self.ndim}, {list(self)})"


def _box_of(region: Region) -> Box:
    if any(len(span.pairs) != 1 or span.pairs[0][1] != 1 for span in region.spans):
        raise SpecMismatch(f"Pieces: {region} is no box: one pair of step 1 for each dim.")
    return tuple([span.start for span in region.spans]), tuple([span.pairs[0][0] for span in region.spans])


def intersect(a: Box, b: Box) -> Box | None:
    """Give the box that two boxes share, if it is not empty.

    >>> intersect(((0, 0), (4, 4)), ((2, 3), (5, 5)))
    ((2, 3), (2, 1))
    """
    starts = tuple([max(x, y) for x, y in zip(a[0], b[0], strict=True)])
    sizes = tuple([min(x + n, y + m) - s for x, n, y, m, s in zip(a[0], a[1], b[0], b[1], starts, strict=True)])
    return (starts, sizes) if min(sizes, default=1) > 0 else None


def subtract(box: Box, hole: Box) -> list[Box]:
    """Give what is left of a box without another one that lies within it, as boxes.

    >>> subtract(((0, 0), (4, 4)), ((1, 0), (2, 3)))
    [((0, 0), (1, 4)), ((3, 0), (1, 4)), ((1, 3), (2, 1))]
    """
    left: list[Box] = []
    starts, sizes = list(box[0]), list(box[1])
    for dim, (at, size) in enumerate(zip(*hole, strict=True)):
        before, behind = at - starts[dim], starts[dim] + sizes[dim] - at - size
        for begin, length in ((starts[dim], before), (at + size, behind)):
            if length > 0:
                left.append(
                    (
                        (*starts[:dim], begin, *starts[dim + 1 :]),
                        (*sizes[:dim], length, *sizes[dim + 1 :]),
                    )
                )
        starts[dim], sizes[dim] = at, size
    return left


class Finder(Protocol):
    """Finds the pieces that share elements with a box."""

    @property
    def is_disjoint(self) -> bool:
        """Whether no two of the pieces share elements."""
        ...

    def find(self, box: Box) -> list[int]:
        """Give the pieces that share elements with a box, ascending."""
        ...


def finder_of(pieces: Pieces) -> Finder:
    """Choose how to find pieces: by bisection in every dim if they form a grid, as those of a layout do.

    >>> grid = Pieces.of(1, [(((i,), (2,)), [i]) for i in range(0, 8, 2)])
    >>> finder_of(grid).find(((3,), (2,)))
    [1, 2]
    """
    return Grid.of(pieces) or _Sorted(pieces)


@frozen
class Grid:
    """Pieces that are products of intervals which do not overlap.

    Attributes:
        starts: Where the intervals of each dim begin, ascending.
        ends: Where they end.
        cells: The piece at the product of some intervals, if there is one.
    """

    starts: list[list[int]]
    ends: list[list[int]]
    cells: dict[tuple[int, ...], int]
    is_disjoint: bool = True

    @classmethod
    def of(cls, pieces: Pieces) -> Grid | None:
        """Give the grid that pieces form, if they form one."""
        starts: list[list[int]] = []
        ends: list[list[int]] = []
        for dim in range(pieces.ndim):
            columns = pieces.starts[dim :: pieces.ndim], pieces.sizes[dim :: pieces.ndim]
            intervals = sorted({(start, start + size) for start, size in zip(*columns, strict=True)})
            starts.append([start for start, _ in intervals])
            ends.append([end for _, end in intervals])
            if any(a[1] > b[0] for a, b in itertools.pairwise(intervals)):
                return None
        places = [{start: i for i, start in enumerate(column)} for column in starts]
        cells = {
            tuple([place[start] for place, start in zip(places, pieces.box(i)[0], strict=True)]): i
            for i in range(len(pieces))
        }
        return cls(starts, ends, cells)

    def find(self, box: Box) -> list[int]:
        hits: list[range] = []
        for starts, ends, at, size in zip(self.starts, self.ends, *box, strict=True):
            hits.append(range(bisect_right(ends, at), bisect_left(starts, at + size)))
        if math.prod([len(hit) for hit in hits]) > len(self.cells):  # a sparse grid
            return sorted(
                [i for cell, i in self.cells.items() if all(c in hit for c, hit in zip(cell, hits, strict=True))]
            )
        found = [self.cells.get(cell) for cell in itertools.product(*hits)]
        return sorted([i for i in found if i is not None])


class _Sorted:
    """Any pieces, sorted by their starts in the dim that tells most of them apart."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        columns = [pieces.starts[dim :: pieces.ndim] for dim in range(pieces.ndim)]
        self._dim = max(range(pieces.ndim), key=lambda dim: len(set(columns[dim])), default=0)
        starts: Sequence[int] = columns[self._dim] if columns else [0] * len(pieces)
        self._order = sorted(range(len(pieces)), key=starts.__getitem__)
        self._starts = [starts[i] for i in self._order]
        ends = [pieces.box(i)[0][self._dim] + pieces.box(i)[1][self._dim] for i in self._order] if columns else []
        self._reach = list(itertools.accumulate(ends, max))  # how far any of the pieces up to here reaches
        self.is_disjoint = all(len(self.find(pieces.box(i))) == 1 for i in range(len(pieces)))

    def find(self, box: Box) -> list[int]:
        at, size = box[0][self._dim], box[1][self._dim]
        near = self._order[bisect_right(self._reach, at) : bisect_left(self._starts, at + size)]
        return sorted([i for i in near if intersect(self._pieces.box(i), box) is not None])
