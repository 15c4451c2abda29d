"""Writing the tensors of a state one after the other: by kernel copies where they are runs of a file, else in chunks.

What will be copied is found out before anything is written. Nothing here makes files or knows their formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from fdsd.algebra.fill import Session, over_budget
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.plan import Run, check_budget, plan_of
from fdsd.data.errors import OverBudget, add_note
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.engine.progress import Progress
from fdsd.engine.runs import CopyRun, Finder, start_of
from fdsd.storage.files import Extent
from fdsd.storage.safetensors_sink import SafetensorsSink

__all__ = ["Stream"]

_CHUNK = 16 << 20
"""The most bytes of a tensor that are filled before they are written."""
_LEAST = 1 << 16
"""The least, however small the budget is."""
_REMEMBERED = 64
"""A tensor of more runs is planned once more when it is written, so that not all runs are kept for so long."""


class Stream:
    """The tensors that have to be written, and how.

    Args:
        nodes: The tensors, in order.
        budget: Bytes for the chunk that is being filled, for scratch and kept results.

    Raises:
        OverBudget: An operation needs more than the budget at once; the message names the budget that suffices.
    """

    def __init__(self, nodes: Mapping[str, Lazy], budget: int) -> None:
        self._nodes = nodes
        finder = Finder()
        self.origins: dict[str, int] = {}
        self._extents: dict[str, Extent] = {}
        self._runs: dict[str, Sequence[CopyRun] | None] = {}
        filled: list[Lazy] = []
        for name, node in nodes.items():
            found = finder.find(node)
            if isinstance(found, Extent):
                self._extents[name] = found
            elif found:
                self._runs[name] = found if len(found) <= _REMEMBERED else None
            else:
                filled.append(node)
                continue
            self.origins[name] = start_of(found)
        self._chunk = _chunk_for(budget)
        _check(filled, budget)
        self._session = Session(filled, budget=_rest(budget))
        self._filled = iter(enumerate(self._session.roots))
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def extents(self) -> Iterable[Extent]:
        """The bytes of files that whole tensors consist of."""
        return self._extents.values()

    @property
    def others(self) -> Iterator[Lazy]:
        """The tensors that are not whole tensors of a file."""
        return (node for name, node in self._nodes.items() if name not in self._extents)

    def write(self, sink: SafetensorsSink, progress: Progress) -> None:
        """Write all tensors."""
        waiting: list[tuple[str, Extent]] = []
        with torch.no_grad():
            for name, node in self._nodes.items():
                extent = self._extents.get(name)
                if extent is not None:
                    waiting.append((name, extent))
                    continue
                _copy(sink, waiting, progress)
                waiting = []
                try:
                    self._write(sink, name, node, progress)
                except Exception as error:
                    add_note(error, f"while saving {name!r}, {node.spec}")
                    raise
            _copy(sink, waiting, progress)

    def _write(self, sink: SafetensorsSink, name: str, node: Lazy, progress: Progress) -> None:
        if name not in self._runs:
            position, root = next(self._filled)
            self._fill(sink, name, root, progress)
            self._session.finish(position)
            return
        runs = self._runs[name]
        if runs is None:
            found = Finder().find(node)
            assert isinstance(found, list)
            runs = found
        for run in runs:
            sink.copy(name, run.offset, run.extent)
            progress.advance(run.extent.nbytes)

    def _fill(self, sink: SafetensorsSink, name: str, node: Lazy, progress: Progress) -> None:
        spec = node.spec
        size = spec.dtype.itemsize
        for region, where in Region.whole(spec.shape).chunks(self._chunk // size):
            memory = self._memory(region, spec)
            self._session.fill(node, region, memory)
            sink.write(name, _offset(where, spec) * size, memory)
            progress.advance(region.numel * size)

    def _memory(self, region: Region, spec: TensorSpec) -> torch.Tensor:
        """Give memory for a chunk, the same every time: fresh memory costs several times as much."""
        nbytes = region.numel * spec.dtype.itemsize
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(max(nbytes, self._chunk), dtype=torch.uint8)
        return self._buffer[:nbytes].view(spec.dtype).view(region.shape)


def _copy(sink: SafetensorsSink, waiting: Sequence[tuple[str, Extent]], progress: Progress) -> None:
    for count in sink.copy_tensors(waiting):
        progress.advance(count)


def _chunk_for(budget: int) -> int:
    return max(_LEAST, min(_CHUNK, budget // 4))


def _rest(budget: int) -> int:
    """What a budget leaves for scratch and kept results."""
    return max(0, budget - _chunk_for(budget))


def _check(nodes: Sequence[Lazy], budget: int) -> None:
    """Raise before anything is read if an operation cannot fit beside the chunk, naming the budget that suffices."""
    try:
        check_budget(nodes, _rest(budget))
    except OverBudget as error:
        plan = plan_of(nodes, _rest(budget))
        enough = plan.required
        while _rest(enough) < plan.required:
            enough += plan.required - _rest(enough)
        calls = [step.op for step in plan.steps if isinstance(step, Run) and step.region is None]
        raise over_budget(calls[0] if len(calls) == 1 else "A step", budget, enough) from error


def _offset(where: Iterable[slice], spec: TensorSpec) -> int:
    offset = 0
    for part, size in zip(where, spec.shape, strict=True):
        offset = offset * size + part.start
    return offset
