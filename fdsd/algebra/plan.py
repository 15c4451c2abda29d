"""The plan of a run: the driver's walk over ``meta`` memory, written down instead of done.

A structural plan is reads only. Nothing here reads data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen

from fdsd.algebra.fill import Session, over_budget
from fdsd.algebra.graph import walk
from fdsd.algebra.lazy import Computing, Lazy, Structural
from fdsd.algebra.ops.call import Call
from fdsd.algebra.ops.leaves import Constant, Origin
from fdsd.data.memory import storage_id
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec

__all__ = ["Copy", "Fill", "Plan", "Read", "Run", "Step", "View", "check_budget", "plan_of"]


@frozen
class View:
    """Where in a numbered buffer: offset, shape and strides in elements of ``dtype``."""

    buffer: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@frozen
class Read:
    """Copy a region of a source tensor into a view."""

    origin: Origin
    region: Region
    out: View


@frozen
class Copy:
    """Copy a view into another, casting."""

    source: View
    out: View


@frozen
class Fill:
    """Write one value."""

    op: Constant
    out: View


@frozen
class Run:
    """Run an operation on views."""

    op: object
    parts: tuple[View, ...]
    region: Region | None
    outs: tuple[View, ...]


Step = Read | Copy | Fill | Run


@frozen
class Plan:
    """What a run will do, in order.

    Attributes:
        steps: Reads, copies, constants and calls over numbered buffers; buffer ``i`` is the ``i``-th result.
        results: The specs of the results.
        peak: The most bytes of scratch and kept results at one time, results themselves left out.
        required: The least budget that an operation which needs its whole input asked for, if over the budget.
    """

    steps: tuple[Step, ...] = field(repr=lambda steps: f"<{len(steps)} steps>")
    results: tuple[TensorSpec, ...]
    peak: int
    required: int

    @property
    def reads(self) -> tuple[Read, ...]:
        """The steps that read."""
        return tuple([step for step in self.steps if isinstance(step, Read)])

    def __str__(self) -> str:
        total = sum([spec.nbytes for spec in self.results])
        lines = [f"{len(self.steps)} steps, {total:,} bytes of results, {self.peak:,} bytes of scratch at the peak"]
        lines += [f"  {_step_text(step)}" for step in self.steps[:20]]
        if len(self.steps) > 20:
            lines.append(f"  ... and {len(self.steps) - 20} more")
        return "\n".join(lines)

    @property
    def is_reads_only(self) -> bool:
        """Whether nothing but reads happens, each straight into a result."""
        return all(isinstance(step, Read) for step in self.steps)


class Recorder:
    """The executor that writes down what would be done, on ``meta`` memory."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # ids of storages must not be used again

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._numbers[storage_id(tensor)] = len(self._alive)
        self._alive.append(tensor)
        return tensor

    def view(self, tensor: torch.Tensor) -> View:
        """Describe memory that this recorder gave out."""
        number = self._numbers[storage_id(tensor)]
        return View(number, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def read(self, origin: Origin, region: Region, out: torch.Tensor) -> None:
        self.steps.append(Read(origin, region, self.view(out)))

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        self.steps.append(Copy(self.view(source), self.view(out)))

    def constant(self, op: Constant, out: torch.Tensor) -> None:
        self.steps.append(Fill(op, self.view(out)))

    def gather(self, op: Structural, parts: Sequence[torch.Tensor], region: Region, out: torch.Tensor) -> None:
        self.steps.append(Run(op, tuple(map(self.view, parts)), region, (self.view(out),)))

    def compute(self, op: Computing, parts: Sequence[torch.Tensor], region: Region, out: torch.Tensor) -> None:
        self.steps.append(Run(op, tuple(map(self.view, parts)), region, (self.view(out),)))

    def call(self, node: Lazy, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        made = [self.empty(spec.shape, spec.dtype) for spec in node.outputs]
        self.steps.append(Run(node.op, tuple(map(self.view, parts)), None, tuple(map(self.view, made))))
        return made


def _read_text(read: Read) -> str:
    size = read.region.numel * read.out.dtype.itemsize
    return f"read   {size:>14,} B of {read.origin.fqn} -> buffer {read.out.buffer}"


def _step_text(step: Step) -> str:
    if isinstance(step, Read):
        return _read_text(step)
    if isinstance(step, Copy):
        return f"copy   buffer {step.source.buffer} -> buffer {step.out.buffer}"
    if isinstance(step, Fill):
        return f"fill   {step.op.value!r} -> buffer {step.out.buffer}"
    outs = ", ".join([str(out.buffer) for out in step.outs])
    return f"call   {step.op} on {', '.join([str(part.buffer) for part in step.parts]) or 'nothing'} -> buffer {outs}"


def plan_of(roots: Sequence[Lazy], budget: int | None = None) -> Plan:
    """Plan the whole of some expressions, in order.

    Args:
        roots: The expressions.
        budget: Bytes for scratch and kept results; ``None`` for no limit.

    Returns:
        The plan. ``required`` tells if an operation does not fit the budget.

    >>> from fdsd.algebra.apply import defer_leaf
    >>> plan_of([defer_leaf(torch.ones(2, 3))]).is_reads_only
    True
    """
    recorder = Recorder()
    session = Session(roots, budget=budget, executor=recorder, strict=False)
    outs = [recorder.empty(root.shape, root.dtype) for root in session.roots]
    for position, (root, out) in enumerate(zip(session.roots, outs, strict=True)):
        session.fill(root, Region.whole(root.shape), out)
        session.finish(position)
    results = tuple([root.spec for root in session.roots])
    return Plan(tuple(recorder.steps), results, session.peak, session.required)


def check_budget(roots: Sequence[Lazy], budget: int | None) -> None:
    """Raise before anything is read, if an operation that needs its whole input cannot fit the budget.

    Raises:
        OverBudget: Naming the budget that is needed.
    """
    if budget is None or not any(isinstance(node.op, Call) for node in walk(roots)):
        return
    plan = plan_of(roots, budget)
    required = plan.required
    while (more := plan_of(roots, required).required if required else 0) > required:
        required = more  # with more room, more is kept
    if required:
        calls = [step.op for step in plan.steps if isinstance(step, Run) and step.region is None]
        raise over_budget(calls[0] if len(calls) == 1 else "A step", budget, required)
