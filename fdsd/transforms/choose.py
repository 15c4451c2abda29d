"""Verbs that choose names, and functions that divide and join states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from attrs import frozen

from fdsd.algebra.apply import Applier, constant, defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import Call
from fdsd.algebra.ops.call import function_name
from fdsd.data.errors import NameConflict, SpecMismatch, listing
from fdsd.data.model import ModelSpec
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.rewrite import Assign, Rewrite, Scope, keep
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.regroup import call
from fdsd.transforms.which import Choice, Which, literal

__all__ = ["combine", "drop", "filter_frozen", "insert", "partition", "select"]

Init = float | Callable[[TensorSpec], torch.Tensor]


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
        return call(self.verb, [f"[{self.which.call_text()}]"])


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


@frozen
class Insert(Step):
    """See ``insert``."""

    name: str
    spec: TensorSpec
    init: Init
    verb: ClassVar[str] = "insert"

    @property
    def grade(self) -> Grade:
        return Grade.ONE_SIDED

    def rewrite(self, scope: Scope) -> Rewrite:
        problems: list[Problem] = []
        if self.name in scope:
            text = f"{self.name!r} is there already. Drop it first, or choose another name."
            problems.append(Problem("collision", text, (self.name,)))
        is_abstract = any(isinstance(scope.leaf(name), TensorSpec) for name in scope.names)
        is_lazy = any(isinstance(scope.leaf(name), Lazy) for name in scope.names)
        build = partial(self._make, is_abstract, is_lazy)
        return Rewrite.of([*map(keep, scope.names), Assign(self.name, (), build)], problems)

    def _make(self, is_abstract: bool, is_lazy: bool, _apply: Applier, _leaves: Any) -> Any:
        if is_abstract:
            return self.spec
        if not callable(self.init):
            like = defer_leaf(self.spec) if is_lazy else torch.empty(0)
            return constant(self.spec, self.init, like=like)
        init = Call(partial(self.init, self.spec), (self.spec,))
        return Lazy(init, (), [self.spec]) if is_lazy else init.eager()

    def invert(self) -> tuple[Step, ...]:
        return (Drop(Choice(literal([self.name]))),)

    def call_text(self) -> str:
        init = function_name(self.init) if callable(self.init) else repr(self.init)
        return call(self.verb, [repr(self.name), repr(self.spec), f"init={init}"])


def select(*which: Which) -> Pipeline:
    """Keep the tensors with these names, in their order.

    Args:
        *which: Patterns of names, which may have unnamed holes ``{_}`` and ``{_...}``, collections of patterns, or
            functions of name and ``TensorSpec`` that tell whether a tensor is meant. A pattern that matches nothing
            is an error, unless it ends in ``?``.

    Law: one-sided: ``~`` passes on what ``select`` would let through, and refuses the rest.

    >>> list(select("layers.{_...}")({"layers.0.w": 1, "norm": 2}))
    ['layers.0.w']
    """
    return Pipeline((Select(Choice.of(*which)),))


def drop(*which: Which) -> Pipeline:
    """Leave the tensors with these names out.

    Args:
        *which: The names; see ``select``.

    Law: one-sided: ``~`` asserts that they are absent.

    >>> list(drop("{_...}.inv_freq")({"rope.inv_freq": 1, "norm": 2}))
    ['norm']
    """
    return Pipeline((Drop(Choice.of(*which)),))


def filter_frozen(frozen: ModelSpec | Collection[str]) -> Pipeline:
    """Leave out the frozen parameters, and every name that is tied to one of them.

    Args:
        frozen: What a model says is frozen, or the names themselves (patterns).

    Law: one-sided: ``~`` asserts that they are absent.

    >>> w = torch.ones(2)
    >>> list(filter_frozen(["embed"])({"embed": w, "head": w, "norm": torch.ones(1)}))
    ['norm']
    """
    if isinstance(frozen, ModelSpec):  # a state need not hold all that the model has
        patterns = tuple([pattern.as_optional() for pattern in literal(frozen.frozen)])
        return Pipeline((FilterFrozen(Choice(patterns)),))
    return Pipeline((FilterFrozen(Choice.of(frozen)),))


def insert(name: str, spec: TensorSpec, *, init: Init) -> Pipeline:
    """Add a tensor under a new name, at the end.

    Args:
        name: The name.
        spec: Shape and dtype of the tensor.
        init: One value for all elements, or a function that makes the tensor from the spec.

    Raises:
        NameConflict: When run: the name is there already.

    Law: one-sided: ``~`` drops it.

    >>> insert("scale", TensorSpec((2,), torch.float32), init=1.0)({})["scale"]
    tensor([1., 1.])
    """
    if not isinstance(spec, TensorSpec):
        raise SpecMismatch(f"insert: spec is a TensorSpec, not {type(spec).__name__}.")
    return Pipeline((Insert(name, spec, init),))


def partition(state: Mapping[str, Any], *which: Which) -> tuple[StateDict[Any], StateDict[Any]]:
    """Divide a state into the tensors with these names and the others.

    Law: ``combine(*partition(state, ...))`` equals ``state``, but for the order.

    >>> chosen, others = partition({"a": 1, "b": 2}, "a")
    >>> list(chosen), list(others)
    (['a'], ['b'])
    """
    choice = Choice.of(*which)
    return Pipeline((Select(choice),))(state), Pipeline((Drop(choice),))(state)


def combine(*states: Mapping[str, Any]) -> StateDict[Any]:
    """Join states with different names into one.

    Raises:
        NameConflict: A name is in two of them.

    >>> list(combine({"a": 1}, {"b": 2}))
    ['a', 'b']
    """
    made: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    twice: set[str] = set()
    for state in states:
        twice.update(name for name in state if name in made)
        made.update(state)
        metadata.update(getattr(state, "_metadata", None) or {})
    if twice:
        raise NameConflict(f"combine: {listing(twice)} in more than one state. Rename or drop them first.")
    return StateDict(made, metadata=metadata or None)
