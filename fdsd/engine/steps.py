"""What is done with what has been read: the steps of a plan, over buffers that live from first to last use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fdsd.algebra.dtypes import copy_elements, movable
from fdsd.algebra.lazy import Computing, Op, Structural
from fdsd.algebra.ops.call import Call
from fdsd.algebra.plan import Copy, Fill, Run, View
from fdsd.layout.wiring import Step

__all__ = ["run_steps"]

Result = Callable[[View], "torch.Tensor | None"]
"""Gives the view of a result, if the view is of one."""


def run_steps(steps: Sequence[Step], buffers: dict[int, torch.Tensor], result: Result, device: torch.device) -> None:
    """Run the steps of a plan.

    Args:
        steps: The steps, without reads.
        buffers: The buffers that have been read into, flat, by number; they are used up.
        result: Gives the memory of results.
        device: Where other buffers are made.
    """
    last: dict[int, int] = {}
    sizes: dict[int, tuple[torch.dtype, int]] = {}
    for i, step in enumerate(steps):
        for view in _views(step):
            last[view.buffer] = i
            most = view.offset + sum([(n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)]) + 1
            sizes[view.buffer] = view.dtype, max(most, sizes.get(view.buffer, (view.dtype, 0))[1])

    def at(view: View) -> torch.Tensor:
        found = result(view)
        if found is not None:
            return found
        if view.buffer not in buffers:
            dtype, size = sizes[view.buffer]
            buffers[view.buffer] = torch.empty(size, dtype=dtype, device=device)
        memory = buffers[view.buffer]
        return memory.as_strided(view.shape, view.strides, memory.storage_offset() + view.offset)

    for i, step in enumerate(steps):
        if isinstance(step, Run) and step.region is None:
            made = _call(step, [at(view) for view in step.parts])
            buffers.update(zip([out.buffer for out in step.outs], made, strict=True))
        else:
            _do(step, at)
        for view in _views(step):
            if last[view.buffer] == i:
                buffers.pop(view.buffer, None)


def _views(step: Step) -> tuple[View, ...]:
    if isinstance(step, Copy):
        return step.source, step.out
    return (step.out,) if isinstance(step, Fill) else (*step.parts, *step.outs)


def _do(step: Step, at: Callable[[View], torch.Tensor]) -> None:
    if isinstance(step, Copy):
        copy_elements(at(step.source), at(step.out))
    elif isinstance(step, Fill):
        step.op.fill(at(step.out))
    else:
        parts, op, region = [at(view) for view in step.parts], step.op, step.region
        assert region is not None
        if isinstance(op, Structural):
            op.gather(parts, region, at(step.outs[0]))
        else:
            assert isinstance(op, Computing)
            op.compute(parts, region, at(step.outs[0]))


def _call(step: Run, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compute whole results, as contiguous tensors."""
    op = step.op
    assert isinstance(op, Op)
    if isinstance(op, Call):
        made = op.run(parts, op.specs)
    else:
        found = op.eager(*parts)
        made = found if isinstance(found, tuple) else (found,)
    return [movable(value.resolve_conj().resolve_neg()).contiguous().view(value.dtype) for value in made]
