"""Renaming many names by a table of rules, fast: what `RuleTable.apply` runs.

The result is exactly that of trying the rules one after the other. Speed comes from two sound filters: rules
without holes are looked up, and of the others only those are tried whose literal end agrees with the name's
last two segments, all in one regular expression. No messages and no checks of tables live here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from fdsd.data._matcher import Alternative, Matcher
from fdsd.data._parse import Hole

_CACHE = 10_000

Found = tuple[int, str] | None
"""The place of the rule that won, and the new name; None where the name passes through."""


@frozen
class Rewriter:
    """A rule as its two matchers under common domains, at its place in the table."""

    rule: int
    source: Matcher
    target: Matcher

    def write(self, bound: dict[str, str]) -> str:
        """Write the target; the values fit, as both matchers share their domains."""
        return "".join(p if isinstance(p, str) else p.encode(bound[p.name]) for p in self.target.pieces)

    def rewrite(self, name: str) -> str | None:
        bound = self.source.match(name)
        return None if bound is None else self.write(bound)

    def may_end(self, tail: str) -> bool:
        return tail.endswith(self.source.suffix) or self.source.suffix.endswith(tail)

    def layout(self, slots: Sequence[tuple[Hole, int]]) -> tuple[str, tuple[int, ...]] | None:
        """Give the target as a ``%`` format with the groups to fill in, or None if it holds sums."""
        groups = {hole.name: group for hole, group in slots}
        holes = [piece for piece in self.target.pieces if isinstance(piece, Hole)]
        if any(hole.is_affine for hole in holes):
            return None
        text = "".join(p.replace("%", "%%") if isinstance(p, str) else "%s" for p in self.target.pieces)
        return text, tuple(groups[hole.name] for hole in holes)


_Match = Callable[[str], "re.Match[str] | None"]

_Plans = dict["int | None", tuple[int, str, tuple[int, ...]]]
"""By the empty group that ends a rule: its place, and its target as a format with the groups to fill in."""


@frozen
class _Chain:
    """The rules that may match names with one tail, as one expression; each ends in an empty group."""

    match: _Match
    plans: _Plans
    checked: dict[int, tuple[int, Alternative]]
    rewriters: tuple[Rewriter, ...]

    @classmethod
    def of(cls, rewriters: tuple[Rewriter, ...]) -> _Chain:
        plans: _Plans = {}
        checked: dict[int, tuple[int, Alternative]] = {}
        parts: list[str] = []
        group = 1
        for at, rewriter in enumerate(rewriters):
            alternative = rewriter.source.alternative(group)
            group += alternative.num_groups
            parts.append(f"{alternative.regex}()")
            layout = rewriter.layout(alternative.slots)
            if layout is None or alternative.needs_check:
                checked[group] = at, alternative
            else:
                plans[group] = rewriter.rule, *layout
            group += 1
        match = re.compile("|".join(parts), re.DOTALL).fullmatch if parts else _no_match
        return cls(match, plans, checked, rewriters)

    def resolve(self, found: re.Match[str]) -> Found:
        """Give the first rule whose source matches exactly, from the first match of the lax expression."""
        plan = self.plans.get(found.lastindex)
        if plan is not None:
            rule, text, groups = plan
            return rule, text % found.group(*groups)
        at, alternative = self.checked[found.lastindex or 0]
        bound = self.rewriters[at].source.check(found, alternative)
        if bound is not None:
            return self.rewriters[at].rule, self.rewriters[at].write(bound)
        for rewriter in self.rewriters[at + 1 :]:
            target = rewriter.rewrite(found.string)
            if target is not None:
                return rewriter.rule, target
        return None


def _no_match(_: str) -> None:
    return None


@define
class Dispatch:
    """Finds the first rule of a table that matches a name.

    Args:
        rewriters: the rules that are patterns, in order.
        others: the places and functions (name to new name or None) of the rules that are not, in order.
    """

    rewriters: tuple[Rewriter, ...]
    others: tuple[tuple[int, Callable[[str], str | None]], ...]
    _literals: dict[str, tuple[int, str]] = field(init=False)
    _by_tail: dict[str, list[Rewriter]] = field(init=False)
    _anywhere: list[Rewriter] = field(init=False)
    _chains: dict[str, tuple[_Match, _Plans, _Chain]] = field(init=False, factory=dict)
    _compiled: dict[tuple[int, ...], _Chain] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._literals, self._by_tail, self._anywhere = {}, {}, []
        for rewriter in self.rewriters:
            source = rewriter.source
            if source.literal is not None:
                self._literals.setdefault(source.literal, (rewriter.rule, rewriter.write({})))
            elif source.suffix.count(".") > 1:
                self._by_tail.setdefault(_tail(source.suffix), []).append(rewriter)
            else:
                self._anywhere.append(rewriter)

    def resolve(self, names: Sequence[str]) -> tuple[list[str], list[int]]:
        """Give the new name of each name, and the place of the rule that won it (-1 if none did)."""
        targets: list[str] = []
        winners: list[int] = []
        chains, literals, has_others = self._chains, self._literals, bool(self.others)
        add_target, add_winner = targets.append, winners.append
        for name in names:
            # this loop is the cost of a rename: no calls and look-ups but those that cannot be saved
            tail = name[name.rfind(".", 0, name.rfind(".")) + 1 :]
            match, plans, chain = chains.get(tail) or self._chain(tail)
            if has_others or name in literals:
                winner, target = self._resolve(name, chain)
            elif (found := match(name)) is None:
                winner, target = -1, name
            elif (plan := plans.get(found.lastindex)) is None:
                winner, target = chain.resolve(found) or (-1, name)
            else:
                winner, text, groups = plan
                target = text % found.group(*groups)
            add_target(target)
            add_winner(winner)
        return targets, winners

    def _resolve(self, name: str, chain: _Chain) -> tuple[int, str]:
        best = self._literals.get(name)
        lax = chain.match(name)
        found = None if lax is None else chain.resolve(lax)
        if best is None or (found is not None and found[0] < best[0]):
            best = found
        for rule, function in self.others:
            if best is not None and best[0] < rule:
                break
            target = function(name)
            if target is not None:
                return rule, target
        return (-1, name) if best is None else best

    def _chain(self, tail: str) -> tuple[_Match, _Plans, _Chain]:
        if len(self._chains) >= _CACHE:  # names whose tails all differ must not fill the memory
            self._chains.clear()
        near = (r for r in (*self._by_tail.get(tail, ()), *self._anywhere) if r.may_end(tail))
        rewriters = tuple(sorted(near, key=lambda rewriter: rewriter.rule))
        places = tuple(rewriter.rule for rewriter in rewriters)
        if places not in self._compiled:
            self._compiled[places] = _Chain.of(rewriters)
        chain = self._compiled[places]
        return self._chains.setdefault(tail, (chain.match, chain.plans, chain))


def _tail(name: str) -> str:
    """Give the last two segments, the key by which rules are found."""
    return name[name.rfind(".", 0, name.rfind(".")) + 1 :]
