"""Arithmetic of strides: row-major memory, and grids that are walked on two sides at once.

Whole numbers only; nothing here touches memory or files.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["Dim", "joined", "offsets", "row_major"]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Give the strides of a contiguous tensor.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class Dim(NamedTuple):
    """A dim of a walk: how long, and how far apart its elements are at the source and at the target."""

    length: int
    source: int
    target: int


def joined(dims: Iterable[Dim]) -> list[Dim]:
    """Order dims as they lie in the source, outermost first, and join those that are one dim on both sides.

    >>> joined([Dim(3, 1, 1), Dim(2, 3, 3), Dim(1, 9, 9)])
    [Dim(length=6, source=1, target=1)]
    """
    made: list[Dim] = []
    for dim in sorted([dim for dim in dims if dim.length != 1], key=lambda dim: -dim.source):
        last = made[-1] if made else None
        if last and last.source == dim.source * dim.length and last.target == dim.target * dim.length:
            made[-1] = Dim(last.length * dim.length, dim.source, dim.target)
        else:
            made.append(dim)
    return made


def offsets(dims: Sequence[Dim]) -> Iterator[tuple[int, int]]:
    """Walk a grid in order, the last dim fastest, and give both offsets of each point.

    >>> list(offsets([Dim(2, 10, 1), Dim(2, 1, 5)]))
    [(0, 0), (1, 5), (10, 1), (11, 6)]
    """
    ranges = [[(i * dim.source, i * dim.target) for i in range(dim.length)] for dim in dims]
    for point in itertools.product(*ranges):
        yield sum([a for a, _ in point]), sum([b for _, b in point])
