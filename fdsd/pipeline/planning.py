"""Plans of whole pipelines: the result as expressions over the source, and what reading them will do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fdsd.algebra.apply import defer
from fdsd.algebra.fill import over_budget
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.plan import Plan, plan_of
from fdsd.data.errors import Unsupported
from fdsd.data.optim import OptimState
from fdsd.data.sizes import parse_size
from fdsd.data.statedict import StateDict
from fdsd.data.train import TrainState
from fdsd.pipeline.run import run_step
from fdsd.pipeline.step import Step

__all__ = ["deferred", "expressions", "plan"]


def deferred(steps: Iterable[Step], source: Any) -> tuple[StateDict[Any], StateDict[Any]]:
    """Run the steps lazily over a source; nothing is read.

    Returns:
        The source and the result, their tensors lazy.
    """
    if isinstance(source, TrainState):
        source = source.model
    if isinstance(source, OptimState):
        raise Unsupported("Plans, coverage and provenance are of state dicts; give one column: state.slots[slot].")
    given = state = defer(source)
    for step in steps:
        state = run_step(step, state)
    return given, state


def expressions(state: StateDict[Any]) -> list[tuple[str, Lazy]]:
    """List the lazy tensors of a state, each tied one once, under its first name."""
    seen: dict[int, tuple[str, Lazy]] = {}
    for name, leaf in state.items():
        if isinstance(leaf, Lazy):
            seen.setdefault(id(leaf), (name, leaf))
    return list(seen.values())


def plan(steps: Iterable[Step], source: Any, budget: int | str | None) -> Plan:
    """Plan the whole result; see ``Pipeline.plan``."""
    _, state = deferred(steps, source)
    limit = None if budget is None else parse_size(budget)
    made = plan_of([node for _, node in expressions(state)], limit)
    if made.required and limit is not None:
        raise over_budget("A step", limit, made.required)
    return made
