"""Joining tensors along a dim, and dividing one again: ``concat`` and ``split``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

from attrs import evolve, frozen

from fdsd.algebra.apply import Applier
from fdsd.algebra.ops import Concat as ConcatOp
from fdsd.algebra.ops import MergeDims, Slice, SplitDim
from fdsd.data.errors import SpecMismatch
from fdsd.data.grouping import Group, check_groups_round_trip, check_many, group_many, group_split
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec
from fdsd.data.template import Template
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.rewrite import Assign, Rewrite, Scope
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.regroup import (
    as_dim,
    as_int,
    as_ints,
    as_pattern,
    call,
    optional_ints,
    refuse_unless_undone,
    regroup,
    require_spec,
    said_once,
    templates,
    templates_text,
    unknown,
)

__all__ = ["concat", "split"]


def _check_sizes(verb: str, sizes: tuple[int, ...] | None, count: int, groups: int) -> None:
    if groups < 1:
        raise SpecMismatch(f"{verb}: groups={groups}, but there is 1 group or more.")
    if sizes is None:
        return
    if len(sizes) != count:
        raise SpecMismatch(f"{verb}: {len(sizes)} sizes for {count} parts: {sizes}. Give one for each part.")
    if any(size < 0 or size % groups for size in sizes):
        raise SpecMismatch(f"{verb}: sizes {sizes} do not divide into {groups} equal blocks each.")


@frozen
class Concat(Step):
    """See ``concat``."""

    sources: tuple[Template, ...]
    target: Template
    dim: int
    sizes: tuple[int, ...] | None = None
    groups: int = 1
    verb: ClassVar[str] = "concat"

    def __attrs_post_init__(self) -> None:
        check_many(self.sources, self.target)
        _check_sizes(self.verb, self.sizes, len(self.sources), self.groups)

    @property
    def grade(self) -> Grade:
        return Grade.NONE if self.sizes is None else Grade.EXACT

    def rewrite(self, scope: Scope) -> Rewrite:
        found = group_many(self.sources, self.target, scope.names)
        comes = {
            group.position: [Assign(group.target, group.members, self._join if group.is_complete else unknown)]
            for group in found.groups
        }
        return regroup(scope, [name for group in found.groups for name in group.members], comes, found.problems)

    def _join(self, apply: Applier, leaves: Sequence[Any]) -> Any:
        with said_once(self.verb):
            return self._joined(apply, leaves)

    def _joined(self, apply: Applier, leaves: Sequence[Any]) -> Any:
        specs = [require_spec(leaf) for leaf in leaves]
        dim = as_dim(self.dim, specs[0])
        found = tuple([spec.shape[dim] if dim < spec.ndim else 0 for spec in specs])
        if self.sizes is not None and found != self.sizes:
            raise SpecMismatch(f"the parts have sizes {found} in dim {dim}, not sizes={self.sizes}.")
        if self.groups == 1:
            return apply(ConcatOp(dim), *leaves)
        if any(size % self.groups for size in found):
            raise SpecMismatch(f"sizes {found} in dim {dim} do not divide into groups={self.groups} equal blocks each.")
        blocks = [
            apply(SplitDim(dim, (self.groups, size // self.groups)), leaf)
            for leaf, size in zip(leaves, found, strict=True)
        ]
        return apply(MergeDims(dim, 2), apply(ConcatOp(dim + 1), *blocks))

    def invert(self) -> tuple[Step, ...]:
        if self.sizes is None:
            self.refuse_inverse("how large the parts were is not known. Give sizes=, or use .bind(source) first.")
        return (Split(self.target, self.sources, self.dim, self.sizes, self.groups),)

    def bind(self, scope: Scope) -> tuple[Step, ...]:
        found = group_many(self.sources, self.target, scope.names)
        whole = [group for group in found.groups if group.is_complete]
        if found.problems:
            return (self,)
        back = group_split(self.target, self.sources, found.rewrite(scope.names))
        refuse_unless_undone(self.verb, check_groups_round_trip(found, back))
        if self.sizes is not None or not whole:
            return (self,)
        try:
            sizes = {group: self._sizes(scope, group) for group in whole}
        except SpecMismatch:  # running the step says it better: for all groups at once
            return (self,)
        if len(set(sizes.values())) == 1:
            return (evolve(self, sizes=sizes[whole[0]]),)
        return tuple(
            evolve(
                self,
                sources=tuple(map(Template.literal, group.members)),
                target=Template.literal(group.target),
                sizes=sizes[group],
            )
            for group in whole
        )

    def _sizes(self, scope: Scope, group: Group) -> tuple[int, ...]:
        specs = [require_spec(scope.spec(name)) for name in group.members]
        return tuple([spec.shape[as_dim(self.dim, spec)] for spec in specs])

    def call_text(self) -> str:
        named: dict[str, Any] = {"dim": self.dim}
        if self.sizes is not None:
            named["sizes"] = self.sizes
        if self.groups != 1:
            named["groups"] = self.groups
        return call(self.verb, [templates_text(self.sources), repr(self.target.text)], **named)


@frozen
class Split(Step):
    """See ``split``."""

    source: Template
    targets: tuple[Template, ...]
    dim: int
    sizes: tuple[int, ...]
    groups: int = 1
    verb: ClassVar[str] = "split"

    def __attrs_post_init__(self) -> None:
        check_many(self.targets, self.source)
        _check_sizes(self.verb, self.sizes, len(self.targets), self.groups)

    @property
    def grade(self) -> Grade:
        return Grade.EXACT

    def rewrite(self, scope: Scope) -> Rewrite:
        found = group_split(self.source, self.targets, scope.names)
        wrong = self._wrong_sizes(scope, [spread.source for spread in found.groups])
        comes = {
            spread.position: [
                Assign(target, (spread.source,), unknown if spread.source in wrong else partial(self._cut, k))
                for k, target in enumerate(spread.targets)
            ]
            for spread in found.groups
        }
        problems = [*found.problems, *wrong.values()]
        return regroup(scope, [spread.source for spread in found.groups], comes, problems)

    def _wrong_sizes(self, scope: Scope, names: Sequence[str]) -> dict[str, Problem]:
        """Say once of each source, and not of each part, that the sizes are not its own."""
        found: dict[str, Problem] = {}
        for name in names:
            spec = scope.spec(name) if scope.is_known(name) else None
            if spec is not None and -spec.ndim <= self.dim < spec.ndim and (text := self._misfit(spec)):
                found[name] = Problem("spec", f"{name!r} {spec}: {text}", (name,))
        return found

    def _misfit(self, spec: TensorSpec) -> str | None:
        dim = as_dim(self.dim, spec)
        size, total = spec.shape[dim], sum(self.sizes)
        return None if size == total else f"dim {dim} has size {size}, but sizes={self.sizes} add up to {total}."

    def _cut(self, k: int, apply: Applier, leaves: Sequence[Any]) -> Any:
        (leaf,) = leaves
        spec = require_spec(leaf)
        dim = as_dim(self.dim, spec)
        if text := self._misfit(spec):
            raise SpecMismatch(text)
        start = list(accumulate(self.sizes, initial=0))[k]
        if self.groups == 1:
            return apply(Slice(dim, start, self.sizes[k]), leaf)
        blocks = apply(SplitDim(dim, (self.groups, spec.shape[dim] // self.groups)), leaf)
        part = apply(Slice(dim + 1, start // self.groups, self.sizes[k] // self.groups), blocks)
        return apply(MergeDims(dim, 2), part)

    def invert(self) -> tuple[Step, ...]:
        return (Concat(self.targets, self.source, self.dim, self.sizes, self.groups),)

    def bind(self, scope: Scope) -> tuple[Step, ...]:
        found = group_split(self.source, self.targets, scope.names)
        if not found.problems:
            back = group_many(self.targets, self.source, found.rewrite(scope.names))
            refuse_unless_undone(self.verb, check_groups_round_trip(found, back))
        return (self,)

    def call_text(self) -> str:
        named: dict[str, Any] = {"dim": self.dim, "sizes": self.sizes}
        if self.groups != 1:
            named["groups"] = self.groups
        return call(self.verb, [repr(self.source.text), templates_text(self.targets)], **named)


def concat(
    sources: Sequence[str | Template],
    target: str | Template,
    *,
    dim: int,
    sizes: Sequence[int] | None = None,
    groups: int = 1,
) -> Pipeline:
    """Join tensors along a dim into one; for each value of the patterns' holes, a group of its own.

    Args:
        sources: The patterns of the parts, in order; all have the holes of the target.
        target: The pattern of the result, which stands where the first of its parts stood. A ``?`` at its end
            allows that there is no group at all; a partial group is always an error.
        dim: The dim; negative ones count from the end.
        sizes: The sizes of the parts in that dim, checked, and needed for the inverse.
        groups: Cut every part into so many equal blocks and take them in turn: Megatron's GQA rows (as many as
            there are key/value heads), per-head q, k, v (as many as heads), interleaved gate and up (as rows).

    Raises:
        BadPattern: The patterns do not fit each other.
        UnknownName: When run: nothing matches the sources.
        IncompleteGroup: When run: a group lacks a part.
        SpecMismatch: When run: shapes or dtypes do not fit, or blocks do not divide exactly.

    Law: exact with ``sizes``, or after ``.bind(source)``; ``~`` is the ``split``.

    >>> import torch
    >>> p = concat(["{i}.q", "{i}.k"], "{i}.qk", dim=0, groups=2)
    >>> p({"0.q": torch.tensor([1, 2]), "0.k": torch.tensor([3, 4])})["0.qk"]
    tensor([1, 3, 2, 4])
    """
    step = Concat(
        templates("concat", "sources", sources),
        as_pattern("concat", "target", target),
        as_int("concat", "dim", dim),
        optional_ints("concat", "sizes", sizes),
        as_int("concat", "groups", groups),
    )
    return Pipeline((step,))


def split(
    source: str | Template,
    targets: Sequence[str | Template],
    *,
    dim: int,
    sizes: Sequence[int],
    groups: int = 1,
) -> Pipeline:
    """Divide a tensor along a dim into parts of given sizes; the inverse of ``concat``.

    Args:
        source: The pattern of the tensor. A ``?`` at its end allows that nothing matches.
        targets: The patterns of the parts, in order; all have the holes of the source.
        dim: The dim; negative ones count from the end.
        sizes: The size of each part; they must add up exactly.
        groups: How many blocks of each part were taken in turn; see ``concat``.

    Raises:
        BadPattern: The patterns do not fit each other.
        UnknownName: When run: nothing matches the source.
        SpecMismatch: ``sizes`` do not divide into ``groups``; when run: they do not add up to the tensor's.

    Law: exact; ``~`` is the ``concat``.

    >>> import torch
    >>> parts = split("qk", ["q", "k"], dim=0, sizes=[1, 2])({"qk": torch.tensor([1, 2, 3])})
    >>> parts["q"], parts["k"]
    (tensor([1]), tensor([2, 3]))
    """
    step = Split(
        as_pattern("split", "source", source),
        templates("split", "targets", targets),
        as_int("split", "dim", dim),
        as_ints("split", "sizes", sizes),
        as_int("split", "groups", groups),
    )
    return Pipeline((step,))
