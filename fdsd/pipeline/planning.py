"""Plans of whole pipelines: the result as expressions over the source, and what reading them will do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fdsd.algebra.apply import defer, defer_leaf
from fdsd.algebra.fill import over_budget
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.plan import Plan, plan_of
from fdsd.data.errors import FdsdError, Unsupported
from fdsd.data.model import ModelSpec
from fdsd.data.optim import OptimState
from fdsd.data.sizes import parse_size
from fdsd.data.spec import VirtualTensor
from fdsd.data.statedict import StateDict
from fdsd.data.train import TrainState
from fdsd.pipeline.check import abstract
from fdsd.pipeline.run import note_step, run_step
from fdsd.pipeline.step import Step

__all__ = ["expressions", "lazily", "plan", "through"]


def lazily(steps: Iterable[Step], source: Any) -> list[StateDict[Any]]:
    """Run steps on the specs of a source, made lazy: the source's own names are where all expressions begin.

    Returns:
        The source, and the state after each step.

    Raises:
        Unsupported: The source or a state on the way is no state dict.
    """
    if not isinstance(source, Mapping | TrainState | OptimState | ModelSpec):
        raise Unsupported(
            f"{type(source).__name__} is no state. Give a mapping of names to tensors or specs; for a "
            "module, its state_dict()."
        )
    given = abstract(source)
    if isinstance(given, OptimState):
        raise Unsupported("Plans, coverage and provenance are of state dicts; give one column: state.slots[slot].")
    return through(steps, defer(given.model if isinstance(given, TrainState) else given))


def through(steps: Iterable[Step], state: StateDict[Any]) -> list[StateDict[Any]]:
    """Run steps on a state of lazy tensors; give it, and the state after each step."""
    every = tuple(steps)
    states: list[StateDict[Any]] = [state]
    made: Any = state
    for number, step in enumerate(every, start=1):
        try:
            made = run_step(step, made)
        except FdsdError as error:
            note_step(error, number, len(every), step)
            raise
        if not isinstance(made, StateDict):
            raise Unsupported(
                f"{step.verb} gives {type(made).__name__}, but where elements come from is known of state "
                "dicts only. Ask about the steps before it."
            )
        reached: StateDict[Any] = made  # pyright: ignore[reportUnknownVariableType]
        states.append(reached)
    return states


def expressions(state: StateDict[Any]) -> list[tuple[str, Lazy]]:
    """List the lazy tensors of a state, each tied one once, under its first name."""
    seen: dict[int, tuple[str, Lazy]] = {}
    for name, leaf in state.items():
        if isinstance(leaf, VirtualTensor) and id(leaf) not in seen:
            seen[id(leaf)] = name, defer_leaf(leaf)
    return list(seen.values())


def plan(steps: Iterable[Step], source: Any, budget: int | str | None) -> Plan:
    """Plan the whole result; see ``Pipeline.plan``."""
    state = lazily(steps, source)[-1]
    limit = None if budget is None else parse_size(budget)
    made = plan_of([node for _, node in expressions(state)], limit)
    if made.required and limit is not None:
        raise over_budget("A step", limit, made.required)
    return made
