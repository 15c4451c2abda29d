"""The base of verbs that do the same to each of some tensors, under the same names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import evolve, frozen

from fdsd.algebra.apply import Applier
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec
from fdsd.pipeline.rewrite import Assign, Rewrite, Scope, keep
from fdsd.pipeline.step import Step
from fdsd.transforms.regroup import require_spec
from fdsd.transforms.which import Choice, literal

__all__ = ["Each", "bind_each"]


@frozen
class Each(Step):
    """Do ``make`` to each chosen tensor."""

    which: Choice

    def rewrite(self, scope: Scope) -> Rewrite:
        names, problems = self.pick(scope)
        chosen = set(names)
        assigns = [Assign(name, (name,), self._build) if name in chosen else keep(name) for name in scope.names]
        return Rewrite.of(assigns, problems)

    def pick(self, scope: Scope) -> tuple[list[str], list[Problem]]:
        """Give the chosen names; without a choice, all tensors."""
        if self.which.is_default:
            return [name for name in scope.names if scope.spec(name) is not None], []
        return self.which.pick(scope)

    def _build(self, apply: Applier, leaves: Sequence[Any]) -> Any:
        return self.make(apply, leaves[0], require_spec(leaves[0], self.verb))

    def make(self, apply: Applier, leaf: Any, spec: TensorSpec) -> Any:
        """Make the new leaf."""
        raise NotImplementedError


def bind_each(step: Each, scope: Scope, argument: str, values: Iterable[tuple[str, Any]]) -> tuple[Step, ...]:
    """Write a value that depends on the tensor into a step: one step for each distinct value.

    Args:
        step: The step.
        scope: What it sees.
        argument: The name of the attribute.
        values: The value for each chosen name.
    """
    by_value: dict[Any, list[str]] = {}
    for name, value in values:
        by_value.setdefault(value, []).append(name)
    if len(by_value) == 1:
        return (evolve(step, **{argument: next(iter(by_value))}),)
    return tuple(
        evolve(step, which=Choice(literal(names)), **{argument: value}) for value, names in by_value.items()
    ) or (step,)
