"""Sources and executors that keep count, and an interpreter of plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
import torch
from attrs import frozen
from torch.multiprocessing.reductions import StorageWeakRef

import fdsd.algebra.fill as fill_module
from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.fill import Runner, Session
from fdsd.algebra.lazy import Computing, Lazy, Op, Structural
from fdsd.algebra.memory import MemorySource
from fdsd.algebra.ops import Origin
from fdsd.algebra.plan import Copy, Fill, Plan, Read, Run, View
from fdsd.data.region import Region

__all__ = ["CountingSource", "Ran", "Watcher", "floor", "replay", "run", "run_whole"]


class CountingSource(MemorySource):
    """Tensors in memory that remember what was read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.reads: list[tuple[str, Region]] = []

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        self.reads.append((fqn, region))
        super().read(fqn, region, out)

    @property
    def elements(self) -> int:
        """How many elements were read, all together."""
        return sum(region.numel for _, region in self.reads)

    def lazy(self, fqn: str) -> Lazy:
        """Give a tensor of this source."""
        spec = self.specs()[fqn]
        return Lazy(Origin(self, fqn, spec), (), [spec])


class Watcher(Runner):
    """Does the work, and counts operations and the scratch that is really alive."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.peak = 0
        self._alive: list[tuple[StorageWeakRef, int]] = []

    def _watch(self, *tensors: torch.Tensor) -> None:
        self._alive = [(ref, size) for ref, size in self._alive if not ref.expired()]
        known = {ref for ref, _ in self._alive}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if (ref := StorageWeakRef(storage)) not in known:
                self._alive.append((ref, storage.nbytes()))
        self.peak = max(self.peak, self.alive)

    @property
    def alive(self) -> int:
        """The bytes of scratch and kept results that are alive now."""
        return sum(size for ref, size in self._alive if not ref.expired())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = super().empty(shape, dtype)
        self._watch(made)
        return made

    def gather(self, op: Structural, parts: Sequence[torch.Tensor], region: Region, out: torch.Tensor) -> None:
        self.counts["gather"] += 1
        super().gather(op, parts, region, out)

    def compute(self, op: Computing, parts: Sequence[torch.Tensor], region: Region, out: torch.Tensor) -> None:
        self.counts[type(op).__name__] += 1
        self.counts["elements"] += region.numel
        super().compute(op, parts, region, out)

    def call(self, node: Lazy, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.counts[type(node.op).__name__] += 1
        made = super().call(node, parts)
        self._watch(*made)
        return made


@frozen
class Ran:
    """What a run gave: the results of the roots, the session and the executor."""

    results: list[torch.Tensor]
    session: Session
    watcher: Watcher


def run(wanted: Sequence[tuple[Lazy, Region]], *, budget: int | None = None, strict: bool = True) -> Ran:
    """Fill regions of roots in order, as an engine does."""
    watcher = Watcher()
    session = Session([node for node, _ in wanted], budget=budget, executor=watcher, strict=strict)
    results: list[torch.Tensor] = []
    for position, (root, (_, region)) in enumerate(zip(session.roots, wanted, strict=True)):
        out = torch.empty(region.shape, dtype=root.dtype)
        session.fill(root, region, out)
        session.finish(position)
        results.append(out)
    return Ran(results, session, watcher)


def run_whole(*roots: Lazy, budget: int | None = None, strict: bool = True) -> Ran:
    """Fill the whole of some roots in order."""
    return run([(root, Region.whole(root.shape)) for root in roots], budget=budget, strict=strict)


@contextmanager
def floor(nbytes: int) -> Iterator[None]:
    """Grant less scratch than usual when the budget is exhausted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill_module, "_FLOOR", nbytes)
        yield


# -- plans -----------------------------------------------------------------------------------------------------


def _extents(plan: Plan) -> dict[int, tuple[torch.dtype, int]]:
    """How many elements each buffer has, by what is used of it."""
    found: dict[int, tuple[torch.dtype, int]] = {}
    views: list[View] = []
    for step in plan.steps:
        if isinstance(step, Read | Copy | Fill):
            views.append(step.out)
        if isinstance(step, Copy):
            views.append(step.source)
        if isinstance(step, Run):
            views += [*step.parts, *step.outs]
    for i, spec in enumerate(plan.results):
        found[i] = (spec.dtype, spec.numel)
    for view in views:
        last = view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + 1
        size = found.get(view.buffer, (view.dtype, 0))[1]
        assert found.get(view.buffer, (view.dtype, 0))[0] == view.dtype
        found[view.buffer] = (view.dtype, max(size, last if min(view.shape, default=1) else 0))
    return found


def replay(plan: Plan) -> list[torch.Tensor]:
    """Do what a plan says, knowing nothing of the expressions that it was made of."""
    buffers = {n: torch.empty(size, dtype=dtype) for n, (dtype, size) in _extents(plan).items()}

    def at(view: View) -> torch.Tensor:
        return buffers[view.buffer].as_strided(view.shape, view.strides, view.offset)

    for step in plan.steps:
        if isinstance(step, Read):
            step.origin.source.read(step.origin.fqn, step.region, at(step.out))
        elif isinstance(step, Copy):
            copy_elements(at(step.source), at(step.out))
        elif isinstance(step, Fill):
            step.op.fill(at(step.out))
        else:
            _perform(step, [at(view) for view in step.parts], [at(view) for view in step.outs])
    return [
        buffers[i].as_strided(spec.shape, torch.empty(spec.shape, device="meta").stride(), 0)
        for i, spec in enumerate(plan.results)
    ]


def _perform(step: Run, parts: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
    op = step.op
    assert isinstance(op, Op)
    if step.region is None:
        made = op.eager(*parts)
        for result, out in zip(made if isinstance(made, tuple) else (made,), outs, strict=True):
            copy_elements(result, out)
    elif isinstance(op, Structural):
        op.gather(parts, step.region, outs[0])
    else:
        assert isinstance(op, Computing)
        op.compute(parts, step.region, outs[0])
