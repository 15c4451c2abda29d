"""Running a rewrite on a state: a mapping of leaves, or a model with its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fdsd.data.errors import FdsdError, add_note
from fdsd.data.optim import OptimState
from fdsd.data.problem import Problem, describe
from fdsd.data.spec import is_exact
from fdsd.data.statedict import StateDict, specs
from fdsd.data.train import TrainState
from fdsd.pipeline.build import build_leaves
from fdsd.pipeline.lift import lift_alone, lift_beside
from fdsd.pipeline.metadata import move_metadata
from fdsd.pipeline.rewrite import Rewrite, Scope
from fdsd.pipeline.step import Step

__all__ = ["note_step", "raise_problems", "run_step", "short"]


def run_step(step: Step, state: Any) -> Any:
    """Run one step on a state of any kind.

    Raises:
        FdsdError: All that is wrong, in one message; nothing was computed then, user functions aside.
    """
    if step.converts:
        return step.apply(state)
    if isinstance(state, TrainState):
        rewrite = step.rewrite(Scope(state.model))
        raise_problems(step, rewrite.problems)
        _check_shapes(step, rewrite, state.model)
        problems: list[Problem] = []
        optim = None if state.optim is None else lift_beside(step, rewrite, state.model, state.optim, problems)
        raise_problems(step, problems)
        return TrainState(_run_rewrite(step, rewrite, Scope(state.model), state.model), optim, state.extra)
    if isinstance(state, OptimState):
        problems = []
        lifted = lift_alone(step, state, problems)
        raise_problems(step, problems)
        return lifted
    scope = Scope(state)
    rewrite = step.rewrite(scope)
    raise_problems(step, rewrite.problems)
    return _run_rewrite(step, rewrite, scope, state)


def _check_shapes(step: Step, rewrite: Rewrite, state: Mapping[str, Any]) -> None:
    """Run on specs first, so that nothing is computed if anything does not fit."""
    used = {
        name: state[name] for assign in rewrite.assigns if assign.build for name in (*assign.sources, *assign.beside)
    }
    if step.checks_first and any(map(is_exact, used.values())):
        problems: list[Problem] = []
        build_leaves(Rewrite(tuple([a for a in rewrite.assigns if a.build])), specs(used), problems)
        raise_problems(step, problems)


def _run_rewrite(step: Step, rewrite: Rewrite, scope: Scope, state: Mapping[str, Any]) -> StateDict[Any]:
    _check_shapes(step, rewrite, state)
    problems: list[Problem] = []
    made = build_leaves(rewrite, state, problems)
    raise_problems(step, problems)
    moves = [(a.sources[0], a.target) for a in rewrite.assigns if a.sources]
    metadata = move_metadata(getattr(state, "_metadata", None), moves)
    return StateDict.trusted(made, metadata, (*getattr(state, "_history", ()), step), scope.kind)


def raise_problems(step: Step, problems: tuple[Problem, ...] | list[Problem]) -> None:
    """Raise all problems of a step as one error, of the class that the first one asks for."""
    if problems:
        raise problems[0].error(f"{step.verb}: {describe(problems)}")


def note_step(error: FdsdError, number: int, count: int, step: Step) -> None:
    """Say in which step of a pipeline an error arose."""
    if count > 1:
        add_note(error, f"step {number} of {count}, {short(step.call_text())}")


def short(text: str, width: int = 100) -> str:
    """Cut a long call text in the middle of its arguments.

    >>> short("rename_fqns({'a': 'b'})", 18)
    'rename_fqns(...)'
    """
    return text if len(text) <= width else text[: text.index("(")] + "(...)"
