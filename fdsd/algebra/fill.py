"""The one driver: fill a region of an expression into memory.

It owns reads, scratch, casts, memo and budget. Structural operations hand smaller views of the same memory to
their inputs, so a whole chain costs one strided copy for each source piece. What really happens to the memory is
left to an ``Executor``: one does it, another records it as a plan.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.graph import Graph, producer
from fdsd.algebra.lazy import Computing, Lazy, Structural
from fdsd.algebra.ops.call import Item, check_results
from fdsd.algebra.ops.leaves import Constant, Origin
from fdsd.data.errors import OverBudget, SpecMismatch
from fdsd.data.region import Region
from fdsd.data.ties import storage_id

__all__ = ["Executor", "Runner", "Session"]

_FLOOR = 1 << 16
"""Scratch that is granted however little of the budget is left, so that no run crawls element by element."""
_SPARSE = 8
"""A covering scratch is worth it up to this many times the wanted elements."""


class Executor(Protocol):
    """What is done to memory."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Give scratch."""
        ...

    def read(self, origin: Origin, region: Region, out: torch.Tensor) -> None:
        """Copy a region of a source tensor."""
        ...

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Copy elements, casting to the dtype of ``out``."""
        ...

    def constant(self, op: Constant, out: torch.Tensor) -> None:
        """Write one value."""
        ...

    def gather(self, op: Structural, parts: Sequence[torch.Tensor], region: Region, out: torch.Tensor) -> None:
        """Move elements from covering scratch."""
        ...

    def compute(self, op: Computing, parts: Sequence[torch.Tensor], region: Region, out: torch.Tensor) -> None:
        """Compute a region."""
        ...

    def call(self, node: Lazy, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Compute whole results."""
        ...


class Runner:
    """The executor that really does it."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def read(self, origin: Origin, region: Region, out: torch.Tensor) -> None:
        origin.source.read(origin.fqn, region, out)

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        copy_elements(source, out)

    def constant(self, op: Constant, out: torch.Tensor) -> None:
        op.fill(out)

    def gather(self, op: Structural, parts: Sequence[torch.Tensor], region: Region, out: torch.Tensor) -> None:
        op.gather(parts, region, out)

    def compute(self, op: Computing, parts: Sequence[torch.Tensor], region: Region, out: torch.Tensor) -> None:
        op.compute(parts, region, out)

    def call(self, node: Lazy, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        made = node.op.eager(*parts)
        results = made if isinstance(made, tuple) else (made,)
        check_results(getattr(node.op, "fn", node.op), results, node.outputs)
        return results


class Session:
    """One run over some roots: what is kept, what is in use, and how much may be.

    Args:
        roots: The expressions of the run, in the order in which they will be filled.
        budget: Bytes that scratch and kept results may take together; ``None`` for no limit.
        executor: What is done to memory.
        strict: Whether an operation over the budget raises at once; else ``required`` tells at the end.

    Attributes:
        peak: The most bytes that were in use at one time.
        required: The largest need met that exceeded the budget, else 0.

    >>> from fdsd.algebra.apply import apply, defer_leaf
    >>> from fdsd.algebra.ops import Slice
    >>> x = apply(Slice(0, 1, 2), defer_leaf(torch.arange(4)))
    >>> session = Session([x])
    >>> out = torch.empty(2, dtype=torch.int64)
    >>> session.fill(session.roots[0], Region.whole((2,)), out); out
    tensor([1, 2])
    """

    def __init__(
        self,
        roots: Sequence[Lazy],
        *,
        budget: int | None = None,
        executor: Executor | None = None,
        strict: bool = True,
    ) -> None:
        self.graph = Graph(roots)
        self.roots = self.graph.roots
        self.budget = budget
        self.executor: Executor = Runner() if executor is None else executor
        self.strict = strict
        self.in_use = 0
        self.peak = 0
        self.required = 0
        self._memo: dict[int, Sequence[torch.Tensor]] = {}

    # -- memory ------------------------------------------------------------------------------------------

    def hold(self, nbytes: int) -> None:
        """Count bytes as in use (negative ones give back)."""
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)

    @contextmanager
    def _scratch(self, shape: Sequence[int], dtype: torch.dtype) -> Generator[torch.Tensor]:
        tensor = self.executor.empty(shape, dtype)
        nbytes = tensor.numel() * dtype.itemsize
        self.hold(nbytes)
        try:
            yield tensor
        finally:
            self.hold(-nbytes)

    def _allowed(self, node: Lazy) -> int | None:
        """The bytes that this operation may take, leaving as much to each one below it."""
        if self.budget is None:
            return None
        return max((self.budget - self.in_use) // max(1, self.graph.depth[id(node)]), _FLOOR)

    def finish(self, position: int) -> None:
        """Release what only the roots up to ``position`` needed; roots are finished in order."""
        for key in [key for key in self._memo if self.graph.last_root[key] <= position]:
            del self._memo[key]
            self.hold(-sum([spec.nbytes for spec in self.graph.kept[key].outputs]))

    # -- the driver --------------------------------------------------------------------------------------

    def fill(self, node: Lazy, region: Region, out: torch.Tensor) -> None:
        """Fill ``region`` of ``node`` into ``out``, whose dims are the region's pairs and whose dtype may be any."""
        if tuple(out.shape) != region.shape:
            raise SpecMismatch(f"fill: memory of shape {tuple(out.shape)} does not fit the region {region}.")
        stack = [(node, region, out)]
        while stack:
            node, region, out = stack.pop()
            op = node.op
            if not region.numel:
                continue
            if isinstance(op, Origin):
                self.executor.read(op, region, out)
            elif isinstance(op, Constant):
                self.executor.constant(op, out)
            elif isinstance(op, Computing | Item):
                self._fill_computed(node, region, out)
            elif isinstance(op, Structural):
                if op.rounds and out.dtype != node.dtype:
                    self._through_scratch(node, region, out)
                elif op.gathers(region) and self._fill_gathered(node, op, region, out):
                    continue
                else:
                    stack.extend(reversed(list(op.pull(node.inputs, region, out))))

    def _through_scratch(self, node: Lazy, region: Region, out: torch.Tensor) -> None:
        """Let elements take the node's own dtype before they go to ``out``."""
        size, allowed = node.dtype.itemsize, self._allowed(node)
        for part, where in region.chunks(region.numel if allowed is None else allowed // size):
            with self._scratch(part.shape, node.dtype) as scratch:
                self.fill(node, part, scratch)
                self.executor.copy(scratch, out[where])

    def _fill_gathered(self, node: Lazy, op: Structural, region: Region, out: torch.Tensor) -> bool:
        """Gather from a covering scratch, if that is small enough to be worth it."""
        (cover,), (x,) = op.cover(region), node.inputs
        allowed = self._allowed(node)
        if cover.numel > _SPARSE * region.numel:
            return False
        if allowed is not None and cover.numel * x.dtype.itemsize > allowed:
            return False
        with self._scratch(cover.shape, x.dtype) as scratch:
            self.fill(x, cover, scratch)
            self.executor.gather(op, [scratch], region, out)
        return True

    def _fill_computed(self, node: Lazy, region: Region, out: torch.Tensor) -> None:
        owner, index = producer(node)
        if id(owner) in self.graph.kept and (values := self._kept(owner)) is not None:
            value = values[index]
            strides, offset = region.strides(value.stride())
            view = value.as_strided(region.shape, strides, value.storage_offset() + offset)
            self.executor.copy(view, out)
        elif out.dtype != node.dtype:
            self._through_scratch(node, region, out)
        else:
            self._compute(node, region, out)

    def _compute(self, node: Lazy, region: Region, out: torch.Tensor) -> None:
        """Compute a region from its needs, in halves that fit what is allowed."""
        op = node.op
        assert isinstance(op, Computing)
        needs = op.needs([x.spec for x in node.inputs], region)
        parts_bytes = sum([r.numel * x.dtype.itemsize for r, x in zip(needs, node.inputs, strict=True)])
        cost = parts_bytes + region.numel * node.dtype.itemsize
        allowed = self._allowed(node)
        if allowed is not None and cost > allowed and region.numel > 1:
            for chunk, where in region.chunks(max(1, region.numel * allowed // cost)):
                self._compute(node, chunk, out[where])
            return
        parts: list[torch.Tensor] = []
        for x, need in zip(node.inputs, needs, strict=True):
            part = self.executor.empty(need.shape, x.dtype)
            self.fill(x, need, part)
            parts.append(part)
            self.hold(need.numel * x.dtype.itemsize)
        self.executor.compute(op, parts, region, out)
        self.hold(-parts_bytes)

    # -- kept results ------------------------------------------------------------------------------------

    def _kept(self, node: Lazy) -> Sequence[torch.Tensor] | None:
        """Give the whole results of a node, computed once; ``None`` if a region at a time fits better."""
        if (values := self._memo.get(id(node))) is not None:
            return values
        op = node.op
        assert isinstance(op, Computing)
        size = sum([spec.nbytes for spec in node.outputs])
        if op.whole:
            values = self._call(node, size)
        elif self.budget is not None and self.in_use + 2 * size > self.budget:
            return None
        else:
            made = self.executor.empty(node.shape, node.dtype)
            self.hold(size)
            self._compute(node, Region.whole(node.shape), made)
            values = [made]
        self._memo[id(node)] = values
        return values

    def _call(self, node: Lazy, size: int) -> Sequence[torch.Tensor]:
        need = size + sum([x.spec.nbytes for x in node.inputs])
        self._require(node, need)
        parts: list[torch.Tensor] = []
        for x in node.inputs:
            part = self.executor.empty(x.shape, x.dtype)
            self.hold(x.spec.nbytes)
            self.fill(x, Region.whole(x.shape), part)
            parts.append(part)
        self.hold(size)
        values = [_own_memory(value, parts) for value in self.executor.call(node, parts)]
        self.hold(size - need)
        return values

    def _require(self, node: Lazy, need: int) -> None:
        """See to it that an operation which needs its whole input fits the budget."""
        total = self.in_use + need
        if self.budget is None or total <= self.budget:
            return
        self.required = max(self.required, total)
        if self.strict:
            raise over_budget(node.op, self.budget, total)


def over_budget(op: object, budget: int, required: int) -> OverBudget:
    """Word the error of an operation that cannot run within the budget."""
    return OverBudget(
        f"{op} needs its whole input and result at once, {required:,} bytes with what else is kept, but the budget "
        f"is {budget:,} bytes. Give a budget of at least {required}."
    )


def _own_memory(value: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy a result that is a view of a scratch input or keeps more memory alive than its own elements."""
    borrowed = storage_id(value) in {storage_id(part) for part in parts}
    if borrowed or value.is_conj() or value.is_neg() or not value.is_contiguous():
        return value.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    return value
