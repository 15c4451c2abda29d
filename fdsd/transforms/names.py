"""Verbs that change names and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from attrs import field, frozen

from fdsd.data.errors import BadPattern, FdsdError, NotInvertible, listing
from fdsd.data.problem import Problem
from fdsd.data.rules import Rules, RuleTable, check_round_trip
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.rewrite import Assign, Rewrite, Scope
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.regroup import refuse_unless_undone, shown

__all__ = ["add_prefix", "drop_prefix", "rename_fqns", "strip_wrappers"]


@frozen
class RenameFqns(Step):
    """See ``rename_fqns``.

    As the inverse of another rename it knows that one, and takes only names that it could have given. That is no
    part of what it is: it equals the rename with the sides swapped.
    """

    table: RuleTable
    undoes: RuleTable | None = field(default=None, eq=False)
    verb: ClassVar[str] = "rename_fqns"

    @property
    def grade(self) -> Grade:
        try:
            self.table.invert()
        except NotInvertible:
            return Grade.NONE
        return Grade.EXACT

    def rewrite(self, scope: Scope) -> Rewrite:
        renaming = self.table.apply(scope.names)
        problems = list(renaming.problems)
        if self.undoes is not None and not problems:
            problems = check_round_trip(self.table, self.undoes, scope.names)
        return _renamed(scope.names, renaming.targets, problems)

    def invert(self) -> tuple[Step, ...]:
        if self.undoes is not None:
            return (RenameFqns(self.undoes),)
        try:
            return (RenameFqns(self.table.invert(), self.table),)
        except NotInvertible as error:
            self.refuse_inverse(str(error))

    def bind(self, scope: Scope) -> tuple[Step, ...]:
        if self.grade is Grade.EXACT and not self.table.apply(scope.names).problems:
            refuse_unless_undone(self.verb, check_round_trip(self.table, self.table.invert(), scope.names))
        return (self,)

    def call_text(self) -> str:
        return f"rename_fqns({self.table.arguments()})"


def _renamed(names: Sequence[str], targets: Sequence[str], problems: Iterable[Problem]) -> Rewrite:
    return Rewrite.of([Assign(target, (name,)) for name, target in zip(names, targets, strict=True)], problems)


def rename_fqns(rules: Rules, *, inverse: Rules | None = None) -> Pipeline:
    """Rename tensors by rules; names that no rule matches pass through.

    Args:
        rules: A mapping, or pairs, of pattern to target, the first rule that matches wins; or a function from a
            name to its new name or ``None``. A source may also be a compiled regex (``fullmatch``, then ``expand``).
        inverse: The rules that undo these; needed to invert regexes and functions only.

    Raises:
        BadPattern: A pattern is malformed, or the sides of a rule have different holes.
        UnknownName: When run: a rule that matches nothing, unless it ends in ``?``.
        NameConflict: When run: two names map to one, or a function gives something else than a name.
        Unsupported: ``rules`` are no rules at all.

    Law: exact: ``~`` swaps the sides, and checks each name there and back. That makes it another pipeline than the
    rename with the sides swapped, which takes names that would come back as others.

    >>> p = rename_fqns({"layers.{i}.wq": "blocks.{i}.q"})
    >>> list(p({"layers.0.wq": 1, "norm": 2}))
    ['blocks.0.q', 'norm']
    >>> list((~p)({"blocks.0.q": 1, "norm": 2}))
    ['layers.0.wq', 'norm']
    >>> ~p
    rename_fqns({'blocks.{i}.q': 'layers.{i}.wq'})
    """
    try:
        return Pipeline((RenameFqns(RuleTable.make(rules, inverse)),))
    except FdsdError as error:
        error.args = (f"rename_fqns: {error}",)
        raise


@frozen
class AddPrefix(Step):
    """See ``add_prefix``."""

    prefix: str
    verb: ClassVar[str] = "add_prefix"

    @property
    def grade(self) -> Grade:
        return Grade.EXACT

    def rewrite(self, scope: Scope) -> Rewrite:
        return Rewrite.of([Assign(self.prefix + name, (name,)) for name in scope.names])

    def invert(self) -> tuple[Step, ...]:
        return (DropPrefix(self.prefix),)

    def call_text(self) -> str:
        return f"add_prefix({self.prefix!r})"


@frozen
class DropPrefix(Step):
    """See ``drop_prefix``."""

    prefix: str
    verb: ClassVar[str] = "drop_prefix"

    @property
    def grade(self) -> Grade:
        return Grade.EXACT

    def rewrite(self, scope: Scope) -> Rewrite:
        without = [name for name in scope.names if not name.startswith(self.prefix)]
        problems: list[Problem] = []
        if without:
            text = (
                f"{len(without)} of {len(scope.names)} names do not begin with {self.prefix!r}: {listing(without)}. "
                "To leave such names as they are, use rename_fqns with a pattern that ends in '{rest...}'."
            )
            problems.append(Problem("unmatched rule", text, tuple(without)))
        return Rewrite.of([Assign(name.removeprefix(self.prefix), (name,)) for name in scope.names], problems)

    def invert(self) -> tuple[Step, ...]:
        return (AddPrefix(self.prefix),)

    def call_text(self) -> str:
        return f"drop_prefix({self.prefix!r})"


def add_prefix(prefix: str) -> Pipeline:
    """Put a prefix before every name.

    Args:
        prefix: The text, with its dot.

    Law: exact: ``~add_prefix(s) == drop_prefix(s)``.

    >>> list(add_prefix("model.")({"w": 1}))
    ['model.w']
    """
    return Pipeline((AddPrefix(_text("add_prefix", prefix)),))


def drop_prefix(prefix: str) -> Pipeline:
    """Take a prefix off every name.

    Args:
        prefix: The text, with its dot.

    Raises:
        UnknownName: When run: some names do not begin with it.
        NameConflict: When run: a name is nothing but the prefix.

    Law: exact: ``~drop_prefix(s) == add_prefix(s)``.

    >>> list(drop_prefix("model.")({"model.w": 1}))
    ['w']
    """
    return Pipeline((DropPrefix(_text("drop_prefix", prefix)),))


def _text(verb: str, prefix: Any) -> str:
    if not isinstance(prefix, str):
        raise BadPattern(f"{verb}: a prefix is a str, such as 'model.', not {shown(prefix)}.")
    return prefix


WRAPPERS = frozenset(["_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
"""Segments that wrappers of modules add: torch.compile, DDP, FSDP1, activation checkpointing."""


@frozen
class StripWrappers(Step):
    """See ``strip_wrappers``."""

    verb: ClassVar[str] = "strip_wrappers"

    @property
    def grade(self) -> Grade:
        return Grade.NONE

    def rewrite(self, scope: Scope) -> Rewrite:
        return Rewrite.of([Assign(_stripped(name), (name,)) for name in scope.names])

    def invert(self) -> tuple[Step, ...]:
        self.refuse_inverse("where the wrappers stood is lost. Use rename_fqns() to say it.")

    def call_text(self) -> str:
        return "strip_wrappers()"


def _stripped(name: str) -> str:
    *path, last = name.split(".")
    return ".".join([*[segment for segment in path if segment not in WRAPPERS], last])


def strip_wrappers() -> Pipeline:
    """Take the segments that wrappers add out of every name, wherever they stand.

    These are ``_orig_mod`` (torch.compile), ``module`` (DDP), ``_fsdp_wrapped_module`` (FSDP1) and
    ``_checkpoint_wrapped_module`` (activation checkpointing). The last segment, the tensor's own, always stays.

    Raises:
        NameConflict: When run: two names become one.

    Law: not invertible.

    >>> list(strip_wrappers()({"module._orig_mod.0._checkpoint_wrapped_module.weight": 1}))
    ['0.weight']
    """
    return Pipeline((StripWrappers(),))
