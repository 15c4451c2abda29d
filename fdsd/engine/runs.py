"""Which contiguous bytes of files a lazy tensor consists of, so that the kernel can copy them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

from fdsd.algebra.plan import Plan, Read
from fdsd.data.protocols import Source
from fdsd.storage.files import Extent

__all__ = ["CopyRun", "copy_runs"]

_SHORTEST = 1 << 16
"""Below so many bytes a run, reading into memory and writing from there is faster than a system call a run."""


@frozen
class CopyRun:
    """Consecutive bytes of a file, and where they go in the result, in bytes."""

    extent: Extent
    offset: int


def copy_runs(plan: Plan) -> list[CopyRun] | None:
    """Give the runs that make up the one result of a plan, if it consists of nothing else.

    Args:
        plan: The plan of one expression.

    Returns:
        The runs, or ``None`` if values are cast or computed, come from elsewhere, or lie in too short runs.
    """
    runs: list[CopyRun] = []
    for step in plan.steps:
        extent = _extent(step) if isinstance(step, Read) else None
        if extent is None:
            return None
        assert isinstance(step, Read)
        found = _runs_of(step, extent)
        if found is None:
            return None
        runs.extend(found)
    return runs


def _extent(read: Read) -> Extent | None:
    source: Source = read.origin.source
    give = getattr(source, "extent", None)
    if give is None or read.out.dtype != read.origin.spec.dtype:
        return None
    found = give(read.origin.fqn)
    return found if isinstance(found, Extent) else None


def _runs_of(read: Read, extent: Extent) -> list[CopyRun] | None:
    size = read.out.dtype.itemsize
    strides, start = read.region.strides(_row_major(read.origin.spec.shape))
    length, outer = _joint(read.region.shape, strides, read.out.strides)
    count = 1
    for n, _, _ in outer:
        count *= n
    if count > 1 and length * size < _SHORTEST:
        return None
    return [
        CopyRun(extent.part((start + a) * size, (start + a + length) * size), (read.out.offset + b) * size)
        for a, b in _offsets(outer)
    ]


def _row_major(shape: Sequence[int]) -> list[int]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


_Dim = tuple[int, int, int]


def _joint(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> tuple[int, list[_Dim]]:
    """Find the longest run that is contiguous on both sides, and the dims around it."""
    dims: list[_Dim] = []
    for n, x, y in zip(shape, a, b, strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * x and dims[-1][2] == n * y:
            dims[-1] = (dims[-1][0] * n, x, y)
        else:
            dims.append((n, x, y))
    if dims and dims[-1][1:] == (1, 1):
        return dims[-1][0], dims[:-1]
    return 1, dims


def _offsets(dims: Sequence[_Dim]) -> Iterator[tuple[int, int]]:
    if not dims:
        yield 0, 0
        return
    (n, x, y), rest = dims[0], dims[1:]
    for i in range(n):
        for a, b in _offsets(rest):
            yield i * x + a, i * y + b
