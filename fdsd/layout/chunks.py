"""The arithmetic of sharding one dim: torch's chunk rule, axis after axis, as runs of indices.

A run is a start and a length. Meshes, layouts and other dims are unknown here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from fdsd.data.errors import SpecMismatch

__all__ = ["Cut", "Run", "chunk", "runs_of", "size_of"]

Run = tuple[int, int]


class Cut(NamedTuple):
    """One axis that cuts a dim: into how many shards, which of them is meant, and the parts it cuts each by itself."""

    num: int
    which: int
    parts: int | tuple[int, ...] | None = None


def chunk(size: int, num: int, index: int) -> Run:
    """Give the start and length of one of ``num`` chunks of a dim, as ``torch.chunk`` cuts it, padded with empty ones.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    most = -(-size // num)
    start = min(size, most * index)
    return start, min(size, start + most) - start


def _take(runs: list[Run], start: int, length: int, into: list[Run]) -> None:
    """Append the elements ``start .. start + length`` of some runs, one after the other, to other runs."""
    for at, size in runs:
        if length <= 0:
            return
        if start >= size:
            start -= size
            continue
        taken = min(size - start, length)
        if into and sum(into[-1]) == at + start:
            into[-1] = (into[-1][0], into[-1][1] + taken)
        else:
            into.append((at + start, taken))
        start, length = 0, length - taken


def _part_bounds(size: int, parts: int | tuple[int, ...] | None) -> list[Run]:
    if parts is None:
        return [(0, size)]
    if isinstance(parts, int):
        return [chunk(size, parts, i) for i in range(parts)]
    if sum(parts) != size:
        raise SpecMismatch(f"parts={parts} have {sum(parts)} elements together, and there are {size} to cut.")
    starts = [sum(parts[:i]) for i in range(len(parts))]
    return list(zip(starts, parts, strict=True))


@lru_cache(1 << 16)
def runs_of(size: int, cuts: tuple[Cut, ...]) -> tuple[Run, ...]:
    """Give the indices of a dim that are left after some cuts, one after the other, in the order they lie in memory.

    Args:
        size: The size of the dim.
        cuts: The axes that cut it, the first one first.

    Returns:
        Runs that are not empty, and that do not continue each other.

    Raises:
        SpecMismatch: The sizes of parts do not add up to what is there to be cut.

    >>> runs_of(8, (Cut(2, 1, parts=2),))
    ((2, 2), (6, 2))
    >>> runs_of(5, (Cut(2, 0), Cut(2, 1)))
    ((2, 1),)
    """
    runs: list[Run] = [(0, size)] if size else []
    for num, which, parts in cuts:
        left: list[Run] = []
        for start, length in _part_bounds(sum([length for _, length in runs]), parts):
            offset, taken = chunk(length, num, which)
            _take(runs, start + offset, taken, left)
        runs = left
    return tuple(runs)


def size_of(size: int, cuts: tuple[Cut, ...]) -> int:
    """Give how many indices of a dim are left after some cuts.

    >>> size_of(5, (Cut(4, 2),))
    1
    """
    return sum([length for _, length in runs_of(size, cuts)])
