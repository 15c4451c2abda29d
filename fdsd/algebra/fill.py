"""The one driver: fill a region of an expression into memory.

It owns reads, scratch, casts, memo and budget. Structural operations hand smaller views of the same memory to
their inputs, so a whole chain costs one strided copy for each source piece. What really happens to the memory is
left to an ``Executor``: one does it, another records it as a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch

from fdsd.algebra.dtypes import copy_elements, movable
from fdsd.algebra.graph import Graph, producer
from fdsd.algebra.lazy import Computing, Lazy, Pull, Structural
from fdsd.algebra.ops.call import Call, Item
from fdsd.algebra.ops.leaves import Constant, Origin
from fdsd.algebra.spans import view_of
from fdsd.data.errors import OverBudget, SpecMismatch
from fdsd.data.memory import storage_id
from fdsd.data.region import Region

__all__ = ["Executor", "Runner", "Session"]

_FLOOR = 1 << 16
"""Scratch that is granted however little of the budget is left, so that no run crawls element by element."""
_SPARSE = 8
"""A covering scratch is worth it up to this many times the wanted elements."""


_Action = Callable[["_Stack"], None]
_Stack = list[Pull | _Action]


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
        if isinstance(node.op, Call):
            return node.op.run(parts, node.outputs)
        made = node.op.eager(*parts)
        return made if isinstance(made, tuple) else (made,)


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

    def _scratch(self, region: Region, dtype: torch.dtype) -> torch.Tensor:
        self.hold(region.numel * dtype.itemsize)
        return self.executor.empty(region.shape, dtype)

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
    #
    # What is to be done stands on a stack: memory to fill, and actions that may put more on it. So neither long
    # chains nor deep nesting can overflow Python's own stack.

    def fill(self, node: Lazy, region: Region, out: torch.Tensor) -> None:
        """Fill ``region`` of ``node`` into ``out``, whose dims are the region's pairs and whose dtype may be any."""
        if tuple(out.shape) != region.shape:
            raise SpecMismatch(f"fill: memory of shape {tuple(out.shape)} does not fit the region {region}.")
        region.check_inside(node.shape, "fill")
        todo: _Stack = [(node, region, out)]
        held = self.in_use - self._kept_bytes()
        try:
            while todo:
                task = todo.pop()
                if callable(task):
                    task(todo)
                else:
                    self._fill(task, todo)
        except BaseException:
            self.in_use = held + self._kept_bytes()
            raise

    def _kept_bytes(self) -> int:
        return sum([spec.nbytes for key in self._memo for spec in self.graph.kept[key].outputs])

    def _fill(self, task: Pull, todo: _Stack) -> None:
        node, region, out = task
        op = node.op
        if not region.numel:
            return
        if isinstance(op, Origin):
            self.executor.read(op, region, out)
        elif isinstance(op, Constant):
            self.executor.constant(op, out)
        elif isinstance(op, Computing | Item):
            self._fill_computed(task, todo)
        elif isinstance(op, Structural):
            if op.rounds and out.dtype != node.dtype:
                self._through_scratch(task, todo)
            elif not (op.gathers(region) and self._fill_gathered(task, op, todo)):
                todo.extend(reversed(list(op.pull(node.inputs, region, out))))

    def _through_scratch(self, task: Pull, todo: _Stack) -> None:
        """Let elements take the node's own dtype before they go to their memory, a chunk at a time."""
        node, region, out = task
        allowed = self._allowed(node)
        limit = region.numel if allowed is None else allowed // node.dtype.itemsize

        def chunk(part: Region, view: torch.Tensor, todo: _Stack) -> None:
            scratch = self._scratch(part, node.dtype)

            def done(_: _Stack) -> None:
                self.executor.copy(scratch, view)
                self.hold(-part.numel * node.dtype.itemsize)

            todo.extend([done, (node, part, scratch)])

        _one_by_one((partial(chunk, part, out[where]) for part, where in region.chunks(limit)), todo)

    def _fill_gathered(self, task: Pull, op: Structural, todo: _Stack) -> bool:
        """Gather from a covering scratch, if that is small enough to be worth it."""
        node, region, out = task
        (cover,), (x,) = op.cover(region), node.inputs
        allowed, size = self._allowed(node), cover.numel * x.dtype.itemsize
        if cover.numel > _SPARSE * region.numel or (allowed is not None and size > allowed):
            return False
        scratch = self._scratch(cover, x.dtype)

        def done(_: _Stack) -> None:
            self.executor.gather(op, [scratch], region, out)
            self.hold(-size)

        todo.extend([done, (x, cover, scratch)])
        return True

    def _fill_computed(self, task: Pull, todo: _Stack) -> None:
        node, region, out = task
        owner, index = producer(node)
        if (values := self._memo.get(id(owner))) is not None:
            self.executor.copy(view_of(values[index], region), out)
        elif id(owner) in self.graph.kept and self._fits(owner):
            todo.append(task)  # again, once the whole is there
            self._keep(owner, todo)
        elif out.dtype != node.dtype:
            self._through_scratch(task, todo)
        else:
            self._compute(node, region, out, todo)

    def _compute(self, node: Lazy, region: Region, out: torch.Tensor, todo: _Stack) -> None:
        """Compute a region from its needs, in parts that fit what is allowed."""
        op = node.op
        assert isinstance(op, Computing)
        needs = op.needs([x.spec for x in node.inputs], region)
        parts_bytes = sum([r.numel * x.dtype.itemsize for r, x in zip(needs, node.inputs, strict=True)])
        cost = parts_bytes + region.numel * (node.dtype.itemsize + op.overhead(node.dtype))
        allowed = self._allowed(node)
        if allowed is not None and cost > allowed and region.numel > 1:
            limit = max(1, region.numel * allowed // cost)
            halves = (partial(self._compute, node, part, out[where]) for part, where in region.chunks(limit))
            _one_by_one(halves, todo)
            return
        parts = [self._scratch(need, x.dtype) for x, need in zip(node.inputs, needs, strict=True)]

        def done(_: _Stack) -> None:
            self.executor.compute(op, parts, region, out)
            self.hold(-parts_bytes)

        todo.append(done)
        todo.extend(reversed(list(zip(node.inputs, needs, parts, strict=True))))

    # -- kept results ------------------------------------------------------------------------------------

    def _fits(self, node: Lazy) -> bool:
        """Whether the whole result is kept: always if nothing less can be computed, else if there is room."""
        assert isinstance(node.op, Computing)
        size = sum([spec.nbytes for spec in node.outputs])
        return node.op.whole or self.budget is None or self.in_use + 2 * size <= self.budget

    def _keep(self, node: Lazy, todo: _Stack) -> None:
        """Compute the whole results of a node and keep them."""
        assert isinstance(node.op, Computing)
        if node.op.whole:
            self._call(node, todo)
            return
        made = self._scratch(Region.whole(node.shape), node.dtype)

        def done(_: _Stack) -> None:
            self._memo[id(node)] = [made]

        todo.extend([done, partial(self._compute, node, Region.whole(node.shape), made)])

    def _call(self, node: Lazy, todo: _Stack) -> None:
        size = sum([spec.nbytes for spec in node.outputs])
        needed = sum([x.spec.nbytes for x in node.inputs])
        self._require(node, size + needed)
        wholes = [Region.whole(x.shape) for x in node.inputs]
        parts = [self._scratch(whole, x.dtype) for x, whole in zip(node.inputs, wholes, strict=True)]

        def done(_: _Stack) -> None:
            self.hold(size)
            self._memo[id(node)] = [_own_memory(value, parts) for value in self.executor.call(node, parts)]
            self.hold(-needed)

        todo.append(done)
        todo.extend(reversed(list(zip(node.inputs, wholes, parts, strict=True))))

    def _require(self, node: Lazy, need: int) -> None:
        """See to it that an operation which needs its whole input fits the budget."""
        total = self.in_use + need
        if self.budget is None or total <= self.budget:
            return
        self.required = max(self.required, total)
        if self.strict:
            raise over_budget(node.op, self.budget, total)


def _one_by_one(actions: Iterator[_Action], todo: _Stack) -> None:
    """Put actions on the stack so that each is made when the one before is done: there may be very many."""

    def step(todo: _Stack) -> None:
        if (action := next(actions, None)) is not None:
            todo.extend([step, action])

    todo.append(step)


def over_budget(op: object, budget: int, required: int) -> OverBudget:
    """Word the error of an operation that cannot run within the budget."""
    return OverBudget(
        f"{op} needs its whole input and result at once, {required:,} bytes with what else is kept, but the budget "
        f"is {budget:,} bytes. Give a budget of at least {required}."
    )


def _own_memory(value: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy a result that shares memory with a scratch input, keeps more alive than its elements, or has odd strides."""
    is_part = value.untyped_storage().nbytes() > value.numel() * value.dtype.itemsize
    borrowed = is_part or storage_id(value) in {storage_id(part) for part in parts}
    if borrowed or value.is_conj() or value.is_neg() or not value.is_contiguous():
        plain = value.resolve_conj().resolve_neg()
        return movable(plain).clone(memory_format=torch.contiguous_format).view(value.dtype)
    return value
