"""Stacking tensors along a new dim by an index in their names, and taking them apart: ``stack`` and ``unstack``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from attrs import evolve, frozen

from fdsd.algebra.apply import Applier
from fdsd.algebra.ops import Select
from fdsd.algebra.ops import Stack as StackOp
from fdsd.data.errors import BadPattern, SpecMismatch
from fdsd.data.grouping import (
    Groups,
    Spread,
    check_groups_round_trip,
    check_indexed,
    group_indexed,
    group_unindexed,
)
from fdsd.data.problem import Problem
from fdsd.data.template import Template, escape
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.rewrite import Assign, Rewrite, Scope
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.regroup import (
    as_dim,
    as_int,
    as_pattern,
    call,
    optional_int,
    refuse_unless_undone,
    regroup,
    require_spec,
    said_once,
    shown,
    unknown,
)

__all__ = ["stack", "unstack"]


@frozen
class _Indexed(Step):
    """What both directions have: the patterns and how the index is meant."""

    source: Template
    target: Template
    index: str | None = None
    dim: int = 0
    num: int | None = None

    @property
    def grade(self) -> Grade:
        return Grade.EXACT

    def call_text(self) -> str:
        named: dict[str, Any] = {}
        if self.index is not None:
            named["index"] = self.index
        if self.dim:
            named["dim"] = self.dim
        if self.num is not None:
            named["num"] = self.num
        return call(self.verb, [repr(self.source.text), repr(self.target.text)], **named)


@frozen
class Stack(_Indexed):
    """See ``stack``."""

    verb: ClassVar[str] = "stack"

    def __attrs_post_init__(self) -> None:
        check_indexed(self.source, self.target, self.index)

    def rewrite(self, scope: Scope) -> Rewrite:
        found = group_indexed(self.source, self.target, scope.names, index=self.index, num=self.num)
        comes = {
            group.position: [Assign(group.target, group.members, self._join if group.is_complete else unknown)]
            for group in found.groups
        }
        return regroup(scope, [name for group in found.groups for name in group.members], comes, found.problems)

    def _join(self, apply: Applier, leaves: Sequence[Any]) -> Any:
        spec = require_spec(leaves[0])
        with said_once(self.verb):
            return apply(StackOp(as_dim(self.dim, spec, extra=1)), *leaves)

    def invert(self) -> tuple[Step, ...]:
        return (Unstack(self.target, self.source, self.index, self.dim, self.num),)

    def bind(self, scope: Scope) -> tuple[Step, ...]:
        found = group_indexed(self.source, self.target, scope.names, index=self.index, num=self.num)
        if found.problems:
            return (self,)
        num = max([len(group.members) for group in found.groups], default=self.num or 1)
        back = group_unindexed(self.target, self.source, found.rewrite(scope.names), num, index=self.index)
        refuse_unless_undone(self.verb, check_groups_round_trip(found, back))
        return (evolve(self, num=num) if found.groups else self,)


@frozen
class Unstack(_Indexed):
    """See ``unstack``."""

    verb: ClassVar[str] = "unstack"

    def __attrs_post_init__(self) -> None:
        check_indexed(self.target, self.source, self.index)

    def rewrite(self, scope: Scope) -> Rewrite:
        found = self._spreads(scope)
        comes = {
            spread.position: [
                Assign(target, (spread.source,), partial(self._take, k, len(spread.targets)))
                for k, target in enumerate(spread.targets)
            ]
            for spread in found.groups
        }
        return regroup(scope, [spread.source for spread in found.groups], comes, found.problems)

    def _spreads(self, scope: Scope) -> Groups[Spread]:
        faults: dict[str, Problem] = {}

        def count(name: str) -> int:
            try:
                return self._count(scope, name)
            except SpecMismatch as error:
                faults[name] = Problem("spec", f"{name!r}: {error}", (name,))
                return 1

        num = count if self.num is None else self.num
        found = group_unindexed(self.source, self.target, scope.names, num, index=self.index)
        if faults:
            found.groups = [spread for spread in found.groups if spread.source not in faults]
            found.problems[:0] = faults.values()
        return found

    def _count(self, scope: Scope, name: str) -> int:
        if not scope.is_known(name):
            raise SpecMismatch("the number of its parts is not known here. Give num=.")
        spec = require_spec(scope.spec(name))
        return spec.shape[as_dim(self.dim, spec)]

    def _take(self, k: int, num: int, apply: Applier, leaves: Sequence[Any]) -> Any:
        (leaf,) = leaves
        spec = require_spec(leaf)
        dim = as_dim(self.dim, spec)
        if spec.shape[dim] != num:
            raise SpecMismatch(f"dim {dim} of shape {spec.shape} has size {spec.shape[dim]}, not num={num}.")
        return apply(Select(dim, k), leaf)

    def invert(self) -> tuple[Step, ...]:
        return (Stack(self.target, self.source, self.index, self.dim, self.num),)

    def bind(self, scope: Scope) -> tuple[Step, ...]:
        found = self._spreads(scope)
        if found.problems:
            return (self,)
        nums = {len(spread.targets) for spread in found.groups}
        steps = [self] if not nums else [evolve(self, num=max(nums))]
        if len(nums) > 1:
            steps = [self._only(spread) for spread in found.groups]
        for step in steps:
            there = step._spreads(scope)
            back = group_indexed(step.target, step.source, there.rewrite(scope.names), index=self.index, num=step.num)
            refuse_unless_undone(self.verb, check_groups_round_trip(there, back))
        return tuple(steps)

    def _only(self, spread: Spread) -> Unstack:
        """The same for one name alone: the index is the only hole that is left."""
        bindings = self.source.match(spread.source) or {}
        pieces = [
            escape(piece)
            if isinstance(piece, str)
            else escape(piece.encode(bindings[piece.name]))
            if piece.name in bindings
            else piece.text
            for piece in self.target.pieces
        ]
        target = Template("".join(pieces))
        return evolve(self, source=Template.literal(spread.source), target=target, num=len(spread.targets))


def _arguments(
    verb: str, source: Any, target: Any, index: Any, dim: Any, num: Any
) -> tuple[Template, Template, str | None, int, int | None]:
    if index is not None and not isinstance(index, str):
        raise BadPattern(f"{verb}: index is the name of a hole, a str, not {shown(index)}.")
    count = optional_int(verb, "num", num)
    if count is not None and count < 1:
        raise SpecMismatch(f"{verb}: num={count}, but a stack has 1 part or more.")
    patterns = as_pattern(verb, "source", source), as_pattern(verb, "target", target)
    return *patterns, index, as_int(verb, "dim", dim), count


def stack(
    source: str | Template,
    target: str | Template,
    *,
    index: str | None = None,
    dim: int = 0,
    num: int | None = None,
) -> Pipeline:
    """Stack the tensors whose names differ by an index along a new dim.

    Args:
        source: The pattern of the parts; it has exactly one hole more than the target, the index.
        target: The pattern of the result, which stands where the first of its parts stood. A ``?`` at its end allows
            that there is nothing to stack.
        index: The name of that hole, for the reader.
        dim: Where the new dim stands in the result; negative ones count from the end.
        num: How many parts each stack must have.

    Raises:
        BadPattern: The patterns do not fit each other.
        UnknownName: When run: nothing matches the source.
        IncompleteGroup: When run: the indices are not ``0..n-1``, or not the same everywhere; it names them.
        SpecMismatch: When run: shapes or dtypes differ.

    Law: exact; ``~`` is the ``unstack``.

    >>> import torch
    >>> stack("e.{x}.w", "e.w")({"e.1.w": torch.tensor([2]), "e.0.w": torch.tensor([1])})["e.w"]
    tensor([[1],
            [2]])
    """
    return Pipeline((Stack(*_arguments("stack", source, target, index, dim, num)),))


def unstack(
    source: str | Template,
    target: str | Template,
    *,
    index: str | None = None,
    dim: int = 0,
    num: int | None = None,
) -> Pipeline:
    """Take a tensor apart along a dim into tensors whose names differ by the index; the inverse of ``stack``.

    Args:
        source: The pattern of the tensor. A ``?`` at its end allows that nothing matches.
        target: The pattern of the parts; it has exactly one hole more than the source, the index.
        index: The name of that hole, for the reader.
        dim: The dim that goes away; negative ones count from the end.
        num: How many parts there must be; otherwise as many as the dim has.

    Raises:
        BadPattern: The patterns do not fit each other.
        UnknownName: When run: nothing matches the source.
        SpecMismatch: When run: there is no such dim, or its size is not ``num``.

    Law: exact; ``~`` is the ``stack``.

    >>> import torch
    >>> list(unstack("e.w", "e.{x}.w")({"e.w": torch.zeros(2, 3)}))
    ['e.0.w', 'e.1.w']
    """
    return Pipeline((Unstack(*_arguments("unstack", source, target, index, dim, num)),))
