"""The base of verbs that do the same to each of some tensors, under the same names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import evolve, frozen

from fdsd.algebra.apply import Applier
from fdsd.data.errors import SpecMismatch
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec
from fdsd.pipeline.rewrite import Assign, Rewrite, Scope, keep
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.regroup import require_spec, said_once
from fdsd.transforms.which import Choice, literal

__all__ = ["Each"]


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
        with said_once(self.verb):
            return self.make(apply, leaves[0], require_spec(leaves[0]))

    def make(self, apply: Applier, leaf: Any, spec: TensorSpec) -> Any:
        """Make the new leaf."""
        raise NotImplementedError

    # A function that chooses by spec may choose other tensors once the specs have changed, so it has to be settled
    # before the step can be undone.

    @property
    def grade(self) -> Grade:
        return Grade.NONE if self.which.predicates else self.own_grade

    @property
    def own_grade(self) -> Grade:
        """How far the step can be undone, if the names are settled."""
        return Grade.NONE

    def invert(self) -> tuple[Step, ...]:
        if self.which.predicates and self.own_grade is not Grade.NONE:
            self.refuse_inverse(
                "a function chose the names, and may choose others afterwards. Use .bind(source) first."
            )
        return (self.inverse(),)

    def inverse(self) -> Step:
        """Give the step that undoes this one, if the names are settled."""
        raise NotImplementedError

    def bind(self, scope: Scope) -> tuple[Step, ...]:
        names, problems = self.pick(scope)
        if problems:
            return (self,)
        step = evolve(self, which=Choice(literal(names))) if self.which.predicates else self
        try:
            return step.fix(scope, names)
        except SpecMismatch:  # running the step says it better: for all tensors at once
            return (step,)

    def fix(self, scope: Scope, names: Sequence[str]) -> tuple[Step, ...]:
        """Write into the step what its inverse needs to know of the tensors with these names."""
        return (self,)

    def fix_each(self, argument: str, values: Iterable[tuple[str, Any]]) -> tuple[Step, ...]:
        """Write a value that depends on the tensor into the step: one step for each distinct value."""
        by_value: dict[Any, list[str]] = {}
        for name, value in values:
            by_value.setdefault(value, []).append(name)
        if len(by_value) == 1:
            return (evolve(self, **{argument: next(iter(by_value))}),)
        made = [evolve(self, which=Choice(literal(names)), **{argument: v}) for v, names in by_value.items()]
        return tuple(made) or (self,)
