"""`RuleTable`: tables of rename rules. The first rule that matches a name wins it; other names pass through.

Rules are data: a table can be compared, printed, pickled and inverted, and tells all problems that it has
with a list of names at once. Moving leaves is the verbs' job; many-to-one rules live in ``grouping``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from attrs import define, field, frozen

from fdsd.data._dispatch import Dispatch
from fdsd.data.errors import NotInvertible, Unsupported, add_note, listing, plural
from fdsd.data.naming import nearest, nearest_template
from fdsd.data.problem import Problem
from fdsd.data.rule import FunctionRule, PatternRule, RegexRule, Rule, read_rule, rules_repr

__all__ = [
    "FunctionRule",
    "PatternRule",
    "RegexRule",
    "Renaming",
    "Rule",
    "RuleTable",
    "Rules",
    "check_round_trip",
]

_SUGGESTED = 10
"""A suggestion looks at every name, so only this many unmatched rules get one."""

Rules: TypeAlias = (
    "Mapping[Any, Any] | Iterable[tuple[Any, Any]] | Iterable[Rule] | Callable[[str], str | None] | RuleTable"
)


@define
class Renaming:
    """What a table does to a list of names.

    ``targets`` and ``winners`` (the place of the rule that won the name, or -1) have one item for each name.
    """

    targets: list[str]
    winners: list[int]
    problems: list[Problem]


@frozen(repr=False)
class RuleTable:
    """An ordered table of rename rules, with the table that undoes it where one was given.

    >>> table = RuleTable.make({"layers.{i}.wq": "h.{i}.q", "norm?": "ln_f"})
    >>> table.apply(["layers.0.wq", "head"]).targets
    ['h.0.q', 'head']
    >>> table.invert()
    RuleTable.make({'h.{i}.q': 'layers.{i}.wq', 'ln_f?': 'norm'})

    Law: ``~~table == table``; equal tables do the same.
    """

    rules: tuple[Rule, ...]
    backward: tuple[Rule, ...] | None = None
    _dispatch: Dispatch | None = field(default=None, init=False, eq=False)

    @classmethod
    def make(cls, rules: Rules, inverse: Rules | None = None) -> RuleTable:
        """Read rules, and check each by itself.

        Args:
            rules: a mapping or pairs of source to target, or one function from a name to a new name or None.
                A source is a pattern or a compiled regular expression; the latter's target is a template, as
                for ``re.Match.expand``, or a function of the match.
            inverse: the rules that undo these; needed for inverting expressions and functions only.

        Raises:
            BadPattern: a pattern is not well-formed, or the sides of a rule do not fit.
        """
        if isinstance(rules, RuleTable):
            return rules if inverse is None else cls(rules.rules, _read(inverse))
        return cls(_read(rules), None if inverse is None else _read(inverse))

    def apply(self, names: Sequence[str]) -> Renaming:
        """Rename every name, and find all problems: unmatched and shadowed rules, bad targets, collisions."""
        renaming = self.rename(names)
        renaming.problems += _collisions(names, renaming.targets)
        renaming.problems += _idle_rules(self, names, set(renaming.winners))
        return renaming

    def rename(self, names: Sequence[str]) -> Renaming:
        """Rename every name, and find only what is no name; `apply` finds all problems."""
        dispatch = self._dispatch
        if dispatch is None:
            rewriters = (r.rewriter(at) for at, r in enumerate(self.rules) if isinstance(r, PatternRule))
            others = ((at, _noted(r)) for at, r in enumerate(self.rules) if not isinstance(r, PatternRule))
            dispatch = Dispatch(tuple(rewriters), tuple(others))
            object.__setattr__(self, "_dispatch", dispatch)
        targets, winners = dispatch.resolve(names)
        problems = _bad_targets(self, names, targets, winners) if dispatch.others else []
        return Renaming(targets, winners, problems)

    def invert(self) -> RuleTable:
        """Give the table that undoes this one: the sides swapped in place, each ``?`` on its new source.

        It undoes every name for which `check_round_trip` finds nothing.

        Raises:
            NotInvertible: a rule is an expression or a function, and no ``inverse`` was given.
        """
        if self.backward is not None:
            return RuleTable(self.backward, self.rules)
        swapped: list[Rule] = []
        for rule in self.rules:
            if not isinstance(rule, PatternRule):
                raise NotInvertible(f"{rule} cannot be undone by itself; give the rules that undo it as inverse=.")
            source = rule.target.as_optional() if rule.source.optional else rule.target
            swapped.append(PatternRule(source, rule.source.unoptional()))
        return RuleTable(tuple(swapped))

    def arguments(self) -> str:
        """Give the arguments that make this table again, for the `repr` of verbs."""
        text = rules_repr(self.rules)
        return text if self.backward is None else f"{text}, inverse={rules_repr(self.backward)}"

    def __repr__(self) -> str:
        return f"RuleTable.make({self.arguments()})"

    def __reduce__(self) -> tuple[type[RuleTable], tuple[tuple[Rule, ...], tuple[Rule, ...] | None]]:
        return RuleTable, (self.rules, self.backward)


def check_round_trip(table: RuleTable, inverse: RuleTable, names: Sequence[str]) -> list[Problem]:
    """Rename every name there and back, and give a problem for each that comes back as another.

    >>> swap = RuleTable.make({"{a}_{b}": "{b}_{a}"})
    >>> print(check_round_trip(swap, swap.invert(), ["x_y", "x_y_z"])[0].message)
    'x_y_z' becomes 'y_z_x', which comes back as 'z_x_y'. Make the patterns exclude this, or give inverse=.
    """
    targets = table.rename(names).targets
    returned = inverse.rename(targets)
    problems: list[Problem] = []
    for name, target, back, winner in zip(names, targets, returned.targets, returned.winners, strict=True):
        if back != name:
            there = f"passes through as {name!r}" if target == name else f"becomes {target!r}"
            way = f"comes back as {back!r}" if winner >= 0 else "no rule of the inverse takes back"
            remedy = "Make the patterns exclude this, or give inverse=."
            message = f"{name!r} {there}, which {way}. {remedy}"
            problems.append(Problem("round trip", message, (name, target, back), winner if winner >= 0 else None))
    return problems


def _read(rules: Rules) -> tuple[Rule, ...]:
    if isinstance(rules, RuleTable):
        return rules.rules
    if callable(rules) and not isinstance(rules, Mapping):
        return (FunctionRule(rules),)
    if isinstance(rules, (str, bytes)) or not isinstance(rules, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Unsupported(f"rules are a mapping, pairs or a function, not {type(rules).__name__}: {rules!r}.")
    pairs = cast("Iterable[object]", rules.items() if isinstance(rules, Mapping) else rules)
    return tuple(read_rule(pair) for pair in pairs)


def _noted(rule: RegexRule | FunctionRule) -> Callable[[str], str | None]:
    """Give the rule as a function whose errors say which name they are about."""

    def run(name: str) -> str | None:
        try:
            return rule(name)
        except Exception as error:
            add_note(error, f"{rule}, asked for the new name of {name!r}")
            raise

    return run


def _bad_targets(table: RuleTable, names: Sequence[str], targets: list[str], winners: list[int]) -> list[Problem]:
    """Find what is no name, put the old name in its place, and tell."""
    problems: list[Problem] = []
    for at, target in enumerate(targets):
        if not isinstance(target, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' functions give anything
            rule, name = table.rules[winners[at]], names[at]
            message = f"{rule} gives {target!r} for {name!r}; a new name is a str, and None keeps the old one."
            problems.append(Problem("bad target", message, (name,), winners[at]))
            targets[at] = name
    return problems


def _collisions(names: Sequence[str], targets: list[str]) -> list[Problem]:
    if len(set(targets)) == len(targets):
        return []
    sources: dict[str, list[str]] = {}
    for name, target in zip(names, targets, strict=True):
        sources.setdefault(target, []).append(name)
    return [
        Problem(
            "collision",
            f"{len(mapped)} names map to {target!r}: {listing(mapped)}. "
            "Renames must be one-to-one; drop one first, or use concat().",
            tuple(mapped),
        )
        for target, mapped in sources.items()
        if len(mapped) > 1
    ]


def _idle_rules(table: RuleTable, names: Sequence[str], won: set[int]) -> list[Problem]:
    problems: list[Problem] = []
    known = frozenset(names)  # of thousands of names written out, each would walk through all of these
    num_unmatched = 0
    for place, rule in enumerate(table.rules):
        if place in won or (isinstance(rule, PatternRule) and rule.source.optional):
            continue
        if isinstance(rule, FunctionRule):
            if names:
                every = f"each of {plural(len(names), 'name')}"
                message = f"{rule} gives None for {every}; give back the names that stay as they are."
                problems.append(Problem("unmatched rule", message, (), place))
            continue
        literal = rule.rewriter(0).source.literal if isinstance(rule, PatternRule) else None
        matched = _matched(rule, names) if literal is None else [literal] if literal in known else []
        if matched:
            problems.append(_shadowed(table, place, matched))
        else:
            num_unmatched += 1
            suggestion = _suggestion(rule, names) if num_unmatched <= _SUGGESTED else ""
            problems.append(_unmatched(rule, place, len(names), suggestion))
    return problems


def _matched(rule: PatternRule | RegexRule, names: Sequence[str]) -> list[str]:
    if isinstance(rule, RegexRule):
        return [name for name in names if rule.source.fullmatch(name)]
    return [names[at] for at, _ in rule.rewriter(0).source.find(names)]


def _shadowed(table: RuleTable, place: int, matched: list[str]) -> Problem:
    winners = sorted(set(table.rename(matched).winners))
    shadows = ", ".join(str(table.rules[winner]) for winner in winners[:3])
    shadows += f" and {len(winners) - 3} more" if len(winners) > 3 else ""
    goes = "goes" if len(matched) == 1 else "go"
    stands = "stands" if len(winners) == 1 else "stand"
    message = (
        f"{table.rules[place]} wins no name: {plural(len(matched), 'name')} that it matches, such as "
        f"{matched[0]!r}, {goes} to {shadows}, which {stands} before it. Put it first, or remove it."
    )
    return Problem("shadowed rule", message, tuple(matched), place)


def _unmatched(rule: PatternRule | RegexRule, place: int, num_names: int, suggestion: str) -> Problem:
    message = f"{rule} matches none of {plural(num_names, 'name')}{suggestion}."
    if isinstance(rule, PatternRule):
        message += " Correct it, or end its source with '?' if it may match nothing."
    else:
        message += " Correct it, or use a function, which may leave names alone."
    return Problem("unmatched rule", message, (), place)


def _suggestion(rule: PatternRule | RegexRule, names: Sequence[str]) -> str:
    if isinstance(rule, RegexRule):
        close = nearest(re.sub(r"\\(.)", r"\1", rule.source.pattern), names)
        return f"; the nearest name is {close[0]!r}" if close else ""
    outside = next((names[at] for at, _ in rule.source.matcher.find(names)), None)
    if outside is not None:
        return f"; the source alone matches {outside!r}, but its values do not fit {rule.target.text!r}"
    found, close_name = nearest_template(rule.source.unoptional(), names)
    if found is not None:
        count = sum(1 for _ in found.matcher.find(names))
        return f"; {found.text!r} would match {plural(count, 'name')}, such as {close_name!r}"
    return "" if close_name is None else f"; the nearest name is {close_name!r}"
