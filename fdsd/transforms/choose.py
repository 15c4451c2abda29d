"""Verbs that choose names, and functions that divide states by names and join them again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from attrs import frozen

from fdsd.data.errors import BadPattern, NameConflict, listing
from fdsd.data.model import ModelSpec
from fdsd.data.problem import Problem
from fdsd.data.statedict import StateDict, require_mapping
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.rewrite import Rewrite, Scope, keep
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.merge import joint_history, joint_kind
from fdsd.transforms.regroup import call
from fdsd.transforms.which import Choice, Which, choice, literal

__all__ = ["combine", "drop", "filter_frozen", "partition", "select"]


@frozen
class _Choosing(Step):
    """What verbs that only let names through have."""

    which: Choice

    @property
    def grade(self) -> Grade:
        return Grade.ONE_SIDED

    def invert(self) -> tuple[Step, ...]:
        return (Only(self),)

    def call_text(self) -> str:
        return call(self.verb, [self.which.call_text()])


@frozen
class Select(_Choosing):
    """See ``select``."""

    verb: ClassVar[str] = "select"

    def rewrite(self, scope: Scope) -> Rewrite:
        names, problems = self.which.pick(scope)
        return Rewrite.of(map(keep, names), problems)


@frozen
class Drop(_Choosing):
    """See ``drop``."""

    verb: ClassVar[str] = "drop"

    def rewrite(self, scope: Scope) -> Rewrite:
        names, problems = self.which.pick(scope)
        gone = set(names)
        return Rewrite.of([keep(name) for name in scope.names if name not in gone], problems)


@frozen
class FilterFrozen(_Choosing):
    """See ``filter_frozen``."""

    verb: ClassVar[str] = "filter_frozen"

    def rewrite(self, scope: Scope) -> Rewrite:
        names, problems = self.which.pick(scope)
        gone = set(scope.aliases(names))
        return Rewrite.of([keep(name) for name in scope.names if name not in gone], problems)

    def call_text(self) -> str:
        patterns = [pattern.text for pattern in self.which.patterns]
        return call(self.verb, [self.which.call_text() if self.which.predicates else repr(patterns)])


@frozen
class Only(Step):
    """The inverse of a choice: what was not let through cannot be brought back, and must not be there."""

    choice: _Choosing

    @property
    def verb(self) -> str:  # type: ignore[override]  # named after the choice that it undoes
        return f"~{self.choice.verb}"

    @property
    def grade(self) -> Grade:
        return Grade.ONE_SIDED

    def rewrite(self, scope: Scope) -> Rewrite:
        passed = {assign.target for assign in self.choice.rewrite(scope).assigns}
        problems: list[Problem] = []
        if odd := [name for name in scope.names if name not in passed]:
            text = f"{listing(odd)} would not have come through {self.choice.call_text()}, so it cannot be undone here."
            problems.append(Problem("round trip", text, tuple(odd)))
        return Rewrite.of(map(keep, scope.names), problems)

    def invert(self) -> tuple[Step, ...]:
        return (self.choice,)

    def call_text(self) -> str:
        return f"~{self.choice.call_text()}"


def _some(verb: str, which: tuple[Which, ...]) -> Choice:
    """Read names, at least one: choosing by nothing at all is a slip."""
    if not which:
        raise BadPattern(f"{verb}: no names were given. Give patterns or a function; an empty list chooses nothing.")
    return choice(verb, *which)


def select(*which: Which) -> Pipeline:
    """Keep the tensors with these names, in their order.

    Args:
        *which: Patterns of names, which may have unnamed holes ``{_}`` and ``{_...}``, collections of patterns, or
            functions of name and ``TensorSpec`` that tell whether a tensor is meant. A pattern that matches nothing
            is an error, unless it ends in ``?``; an empty collection chooses nothing.

    Raises:
        BadPattern: There are no names, or they are none.
        UnknownName: When run: a pattern matches nothing; with the pattern that would match.

    Law: one-sided: ``~`` passes on what ``select`` would let through, and refuses the rest.

    >>> list(select("layers.{_...}")({"layers.0.w": 1, "norm": 2}))
    ['layers.0.w']
    """
    return Pipeline((Select(_some("select", which)),))


def drop(*which: Which) -> Pipeline:
    """Leave the tensors with these names out.

    Args:
        *which: The names; see ``select``.

    Raises:
        BadPattern: There are no names, or they are none.
        UnknownName: When run: a pattern matches nothing; with the pattern that would match.

    Law: one-sided: ``~`` asserts that they are absent.

    >>> list(drop("{_...}.inv_freq")({"rope.inv_freq": 1, "norm": 2}))
    ['norm']
    """
    return Pipeline((Drop(_some("drop", which)),))


def filter_frozen(frozen: ModelSpec | Collection[str]) -> Pipeline:
    """Leave out the frozen parameters, and every name that is tied to one of them.

    Args:
        frozen: What a model says is frozen, or the names themselves (patterns). Of the former, a state need not hold
            all.

    Raises:
        BadPattern: They are no names.
        UnknownName: When run: a pattern matches nothing.

    Law: one-sided: ``~`` asserts that they are absent.

    >>> w = torch.ones(2)
    >>> list(filter_frozen(["embed"])({"embed": w, "head": w, "norm": torch.ones(1)}))
    ['norm']
    """
    if isinstance(frozen, torch.nn.Module):
        raise BadPattern(
            "filter_frozen: it takes names or a ModelSpec, not a module. Give the names of its frozen parameters: "
            "[n for n, p in module.named_parameters() if not p.requires_grad]."
        )
    if isinstance(frozen, ModelSpec):
        patterns = tuple([pattern.as_optional() for pattern in literal(frozen.frozen)])
        return Pipeline((FilterFrozen(Choice(patterns)),))
    return Pipeline((FilterFrozen(choice("filter_frozen", frozen)),))


def partition(state: Mapping[str, Any], *which: Which) -> tuple[StateDict[Any], StateDict[Any]]:
    """Divide a state into the tensors with these names and the others.

    Args:
        state: The state, a mapping.
        *which: The names; see ``select``.

    Raises:
        BadPattern: There are no names, or they are none.
        UnknownName: A pattern matches nothing.

    Law: ``combine(*partition(state, ...))`` equals ``state``, but for the order.

    >>> chosen, others = partition({"a": 1, "b": 2}, "a")
    >>> list(chosen), list(others)
    (['a'], ['b'])
    """
    chosen = _some("partition", which)
    given = require_mapping(state, "partition")
    return Pipeline((Select(chosen),))(given), Pipeline((Drop(chosen),))(given)


def combine(*states: Mapping[str, Any]) -> StateDict[Any]:
    """Join states with different names into one, in order.

    The steps that made all of them alike are kept for ``save`` to record.

    Args:
        *states: The states; none at all give an empty one.

    Raises:
        NameConflict: A name is in two of them.
        Unsupported: One is no mapping.
        SpecMismatch: Names are not strings.

    >>> list(combine({"a": 1}, {"b": 2}))
    ['a', 'b']
    """
    made: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    twice: set[str] = set()
    given = [StateDict(require_mapping(state, "combine")) for state in states]
    for state in given:
        twice.update(name for name in state if name in made)
        made.update(state)
        metadata.update(state.metadata or {})
    if twice:
        raise NameConflict(f"combine: {listing(twice)} in more than one state. Rename or drop them first.")
    return StateDict.trusted(made, metadata or None, joint_history(given), joint_kind(given))
