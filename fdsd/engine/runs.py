"""Which contiguous bytes of files a lazy tensor consists of, so that the kernel can copy them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from fdsd.algebra.lazy import Lazy, Structural
from fdsd.algebra.ops import Origin
from fdsd.algebra.plan import Plan, Read, plan_of
from fdsd.data.protocols import Source
from fdsd.data.strides import Dim, joined, offsets, row_major
from fdsd.storage.files import PAGE, Extent

__all__ = ["CopyRun", "Finder", "copy_runs", "start_of"]

_SHORTEST = 1 << 16
"""Below so many bytes a run, reading into memory and writing from there is faster than a system call a run."""


@frozen
class CopyRun:
    """Consecutive bytes of a file, and where they go in the result, in bytes."""

    extent: Extent
    offset: int


class Finder:
    """Finds the runs of many tensors: at once for those that are a whole tensor of a source, else by a plan."""

    def __init__(self) -> None:
        self._extents: dict[int, Callable[[str], object] | None] = {}
        self._sources: list[Source] = []  # ids must not be used again

    def find(self, node: Lazy) -> Extent | list[CopyRun] | None:
        """Give the extent or the runs that make up a tensor, if it consists of nothing else."""
        op = node.op
        if isinstance(op, Origin):
            return self._extent(op)
        return copy_runs(plan_of([node])) if isinstance(op, Structural) and node.spec.numel else None

    def _extent(self, origin: Origin) -> Extent | None:
        key = id(origin.source)
        if key not in self._extents:
            self._extents[key] = getattr(origin.source, "extent", None)
            self._sources.append(origin.source)
        give = self._extents[key]
        found = None if give is None else give(origin.fqn)
        return found if isinstance(found, Extent) else None


def start_of(found: Extent | Sequence[CopyRun]) -> int:
    """Give a place in a page at which the tensor would begin if most of its bytes kept theirs.

    >>> from fdsd.storage.files import FileStamp
    >>> extent = Extent("x", 4096 + 64, 512, FileStamp(8192, 0, 0, 0))
    >>> start_of(extent) % 4096, start_of([CopyRun(extent, 32), CopyRun(extent.part(0, 8), 0)])
    (64, 32)
    """
    if isinstance(found, Extent):
        return found.offset
    votes: dict[int, int] = {}
    for run in found:
        phase = (run.extent.offset - run.offset) % PAGE
        votes[phase] = votes.get(phase, 0) + run.extent.nbytes
    return max(votes, key=lambda phase: (votes[phase], -phase), default=0)


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
    strides, start = read.region.strides(row_major(read.origin.spec.shape))
    outer = joined(map(Dim, read.region.shape, strides, read.out.strides))
    straight = next((dim for dim in outer if dim.source == dim.target == 1), None)
    length = 1
    if straight is not None:
        outer.remove(straight)
        length = straight.length
    if outer and length * size < _SHORTEST:
        return None
    return [
        CopyRun(extent.part((start + a) * size, (start + a + length) * size), (read.out.offset + b) * size)
        for a, b in offsets(outer)
    ]
