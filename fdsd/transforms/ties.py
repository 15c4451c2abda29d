"""Verbs on ties: ``tie`` gives a tensor further names, ``untie`` makes them tensors of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from attrs import frozen

from fdsd.algebra.apply import Applier
from fdsd.algebra.ops import Distinct, Same
from fdsd.data.errors import BadPattern, listing
from fdsd.data.problem import Problem
from fdsd.data.rules import RuleTable
from fdsd.data.spec import TensorSpec, is_exact
from fdsd.data.template import Template
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.rewrite import Assign, Rewrite, Scope, keep
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.regroup import as_pattern, call, said_once, shown
from fdsd.transforms.which import Choice, Which, choice

__all__ = ["tie", "untie"]

Pairs = tuple[tuple[Template, Template], ...]


def _pairs_text(pairs: Pairs) -> str:
    return repr({alias.text: owner.text for alias, owner in pairs})


def _resolve(pairs: Pairs, names: Sequence[str]) -> tuple[dict[str, str], list[Problem]]:
    """Give the owner of each alias, and a problem for each owner that matches nothing."""
    found: dict[str, str] = {}
    problems: list[Problem] = []
    for alias, owner in pairs:
        table = RuleTable.make([(owner, alias)])
        renaming = table.rename(names)
        pairs_here = [
            (target, name)
            for name, target, winner in zip(names, renaming.targets, renaming.winners, strict=True)
            if winner == 0
        ]
        if not pairs_here and not owner.optional:
            problems.extend([p for p in table.apply(names).problems if p.kind == "unmatched rule"])
        for target, name in pairs_here:
            if found.setdefault(target, name) != name:
                text = f"{target!r} would be tied to {found[target]!r} and to {name!r}. An alias has one owner."
                problems.append(Problem("collision", text, (target, name, found[target])))
    return found, problems


@frozen
class Tie(Step):
    """See ``tie``."""

    pairs: Pairs
    verb: ClassVar[str] = "tie"

    @property
    def grade(self) -> Grade:
        return Grade.EXACT

    def rewrite(self, scope: Scope) -> Rewrite:
        owners, problems = _resolve(self.pairs, scope.names)
        if chained := [alias for alias, owner in owners.items() if owner in owners]:
            text = f"{listing(chained)} tied to a name that is itself an alias here. Tie all to the one owner."
            problems.append(Problem("collision", text, tuple(chained)))
        unsure = _unsure(scope, owners)
        assigns = [self._assign(name, owners.get(name, name), name in owners, unsure) for name in scope.names]
        new = [self._assign(alias, owner, True, unsure) for alias, owner in owners.items() if alias not in scope]
        return Rewrite.of([*assigns, *new], problems)

    def _assign(self, name: str, owner: str, is_alias: bool, unsure: dict[str, tuple[str, ...]]) -> Assign:
        beside = unsure.get(owner, ())
        build = partial(_same, self.verb, (owner, *beside), is_alias) if beside else None
        return Assign(name, (owner,), build, is_alias, beside)

    def bind(self, scope: Scope) -> tuple[Step, ...]:
        owners, _ = _resolve(self.pairs, scope.names)
        if there := [alias for alias in owners if alias in scope]:
            self.refuse_inverse(f"{listing(there)} there already, and undoing would drop such names.")
        return (self,)

    def invert(self) -> tuple[Step, ...]:
        return (DropAliases(self.pairs),)

    def call_text(self) -> str:
        return call(self.verb, [_pairs_text(self.pairs)])


def _unsure(scope: Scope, owners: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """For each owner, the aliases that are there as tensors of their own: they must hold its values."""
    found: dict[str, list[str]] = {}
    for alias, owner in owners.items():
        if alias in scope and (scope.tie(alias) is None or scope.tie(alias) != scope.tie(owner)):
            found.setdefault(owner, []).append(alias)
    return {owner: tuple(aliases) for owner, aliases in found.items()}


def _same(verb: str, names: tuple[str, ...], is_alias: bool, apply: Applier, leaves: Sequence[Any]) -> Any:
    """The owner's leaf, once all are found to be equal; what is not here is checked when it is read."""
    is_here = all(is_exact(leaf) or isinstance(leaf, TensorSpec) for leaf in leaves)
    if len(leaves) == 1 or (is_here and is_alias):  # one column of an optimizer; checked for the owner
        return leaves[0]
    with said_once(verb):
        checked = apply(Same(names, verb), *leaves)
    return leaves[0] if is_here else checked


@frozen
class DropAliases(Step):
    """The inverse of ``tie``: the aliases go, once they are found to be tied to their owners, or equal to them."""

    pairs: Pairs
    verb: ClassVar[str] = "~tie"

    @property
    def grade(self) -> Grade:
        return Grade.EXACT

    def rewrite(self, scope: Scope) -> Rewrite:
        owners, problems = _resolve(self.pairs, scope.names)
        absent = [alias for alias in owners if alias not in scope]
        if absent:
            text = f"{listing(absent)} not there, so there is nothing to undo. Tie first, or leave this step out."
            problems.append(Problem("missing", text, tuple(absent)))
        unsure = _unsure(scope, owners)
        return Rewrite.of([self._assign(n, unsure.get(n, ())) for n in scope.names if n not in owners], problems)

    def _assign(self, name: str, beside: tuple[str, ...]) -> Assign:
        build = partial(_same, self.verb, (name, *beside), False) if beside else None
        return Assign(name, (name,), build, False, beside)

    def invert(self) -> tuple[Step, ...]:
        return (Tie(self.pairs),)

    def call_text(self) -> str:
        return f"~tie({_pairs_text(self.pairs)})"


@frozen
class Untie(Step):
    """See ``untie``."""

    which: Choice
    verb: ClassVar[str] = "untie"
    computes: ClassVar[str | None] = "a copy would be a parameter of its own, which was never trained by itself"

    @property
    def grade(self) -> Grade:
        return Grade.NONE

    def rewrite(self, scope: Scope) -> Rewrite:
        names, problems = self.which.pick(scope)
        chosen = set(names)
        holders: dict[Any, list[str]] = {}
        for name in scope.names:
            if (key := scope.tie(name)) is not None:
                holders.setdefault(key, []).append(name)
        copied = {name for held in holders.values() for name in _copied(held, chosen)}
        assigns = [
            Assign(name, (name,), partial(self._copy, name)) if name in copied else keep(name) for name in scope.names
        ]
        return Rewrite.of(assigns, problems)

    def _copy(self, name: str, apply: Applier, leaves: Sequence[Any]) -> Any:
        return apply(Distinct(name), leaves[0])

    def invert(self) -> tuple[Step, ...]:
        self.refuse_inverse("which name owned the tensor is lost. Use tie({alias: owner}).")

    def call_text(self) -> str:
        return call(self.verb, [self.which.call_text()])


def _copied(held: list[str], chosen: set[str]) -> list[str]:
    """Of the names of one tensor, those that get a copy: all chosen ones, but one keeps the tensor."""
    here = [name for name in held if name in chosen]
    return here if len(here) < len(held) else here[1:]


def tie(aliases: Mapping[str, str]) -> Pipeline:
    """Give tensors further names: one tensor, all names.

    Args:
        aliases: For each alias the name of its owner; patterns with the same holes on both sides work too. A ``?`` at
            the end of the owner allows that it is absent. An alias that is there already must hold the same values.

    Raises:
        BadPattern: There are no names, or they are no patterns with the same holes.
        UnknownName: When run: the owner is not there.
        NameConflict: When run: an alias would have two owners.
        SpecMismatch: When run: alias and owner are both there and unequal.

    Law: exact: ``~`` drops the aliases, once they are found to be tied to their owners, or equal to them.

    >>> import torch
    >>> state = tie({"head": "embed"})({"embed": torch.ones(2)})
    >>> state["head"] is state["embed"]
    True
    """
    if not isinstance(aliases, Mapping):
        raise BadPattern(f"tie: it takes a mapping, {{alias: owner}}, not {shown(aliases)}.")
    if not aliases:
        raise BadPattern("tie: no names were given. Write tie({alias: owner}).")
    pairs = tuple(
        (as_pattern("tie", "an alias", alias), as_pattern("tie", "an owner", owner)) for alias, owner in aliases.items()
    )
    for alias, owner in pairs:
        if alias.optional:
            raise BadPattern(f"tie: the '?' stands on the owner: write {{{alias.text[:-1]!r}: {owner.text + '?'!r}}}.")
        RuleTable.make([(owner, alias)])
    return Pipeline((Tie(pairs),))


def untie(*which: Which) -> Pipeline:
    """Make names that are tied tensors of their own, with equal values.

    Args:
        *which: The names; see ``select``. Where all names of one tensor are given, the first keeps the tensor.

    Raises:
        BadPattern: There are no names, or they are none.
        UnknownName: When run: a pattern matches nothing.

    Law: not invertible, as the owner is not known any more; ``tie`` ties again.

    >>> import torch
    >>> w = torch.ones(2)
    >>> state = untie("head")({"embed": w, "head": w})
    >>> state["head"] is w, torch.equal(state["head"], w)
    (False, True)
    """
    if not which:
        raise BadPattern("untie: no names were given. For all that are tied, write untie('{_...}').")
    return Pipeline((Untie(choice("untie", *which)),))
