"""The rules of a rename: a pair of patterns, a regular expression, or a function; each checked by itself.

What follows from several rules (who wins, collisions, inverses) lives in ``rules``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from attrs import frozen

from fdsd.data._dispatch import Rewriter
from fdsd.data._parse import Hole
from fdsd.data.errors import BadPattern, Unsupported
from fdsd.data.template import Template, as_template, bind_together

__all__ = ["FunctionRule", "PatternRule", "RegexRule", "Rule", "read_rule", "rules_repr"]


@frozen
class PatternRule:
    """Names that the source pattern matches become what the target pattern writes.

    A range, words or sum on one side hold on both, so the sides are a relation that can be read either way.
    """

    source: Template
    target: Template

    def __attrs_post_init__(self) -> None:
        source, target = self.source, self.target
        if target.optional:
            raise BadPattern(f"{self}: the '?' stands on the source; write {source.as_optional().text!r}.")
        for here, there, text in ((source, target, "target"), (target, source, "source")):
            absent = sorted(set(here.holes) - set(there.holes))
            if absent:
                holes = ", ".join(f"{{{name}}}" for name in absent)
                raise BadPattern(f"{self}: the {text} lacks {holes}; both sides of a rename have the same holes.")
            if any(isinstance(piece, Hole) and piece.is_unnamed for piece in here.pieces):
                raise BadPattern(f"{self}: unnamed holes are for select and drop only; give them names.")
        self.rewriter(0)

    def rewriter(self, place: int) -> Rewriter:
        """Give what runs this rule, at its place in a table."""
        return Rewriter(place, *bind_together(self.source, self.target))

    def __str__(self) -> str:
        return f"rule {self.source.text!r} -> {self.target.text!r}"

    def __repr__(self) -> str:
        return f"({self.source.text!r}, {self.target.text!r})"


@frozen
class RegexRule:
    """Names that the expression matches in whole become what the template or function makes of the match."""

    source: re.Pattern[str]
    target: str | Callable[[re.Match[str]], str]

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.source.pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadPattern(f"{self}: names are text, so the expression must be one of str, not of bytes.")
        if isinstance(self.target, str):
            try:
                self.source.sub(self.target, "")
            except (re.error, IndexError) as error:
                raise BadPattern(f"{self}: the target is no template for this expression: {error}.") from None

    def __call__(self, name: str) -> str | None:
        found = self.source.fullmatch(name)
        if found is None:
            return None
        return found.expand(self.target) if isinstance(self.target, str) else self.target(found)

    def __str__(self) -> str:
        return f"rule {_regex_repr(self.source)}"

    def __repr__(self) -> str:
        target = repr(self.target) if isinstance(self.target, str) else _function_repr(self.target)
        return f"({_regex_repr(self.source)}, {target})"


@frozen
class FunctionRule:
    """Names become what the function gives; None lets a name pass through."""

    function: Callable[[str], str | None]

    def __call__(self, name: str) -> str | None:
        return self.function(name)

    def __str__(self) -> str:
        return f"function {_function_repr(self.function)}"

    def __repr__(self) -> str:
        return _function_repr(self.function)


Rule: TypeAlias = PatternRule | RegexRule | FunctionRule


def read_rule(pair: object) -> Rule:
    """Read a pair of a source and a target, unless it is a rule already."""
    if isinstance(pair, (PatternRule, RegexRule, FunctionRule)):
        return pair
    if not isinstance(pair, (tuple, list)) or len(cast("Sequence[object]", pair)) != 2:
        raise Unsupported(f"a rule is a pair of a source and a target, not {pair!r}.")
    source, target = cast("Sequence[object]", pair)
    if isinstance(source, re.Pattern):
        regex = cast("re.Pattern[str]", source)
        if isinstance(target, str) or callable(target):
            return RegexRule(regex, cast("str | Callable[[re.Match[str]], str]", target))
        raise Unsupported(f"{_regex_repr(regex)}: its target is a template or a function, not {target!r}.")
    for side in (source, target):
        if not isinstance(side, (str, Template)):
            raise Unsupported(f"a side of a rule is a pattern, or a compiled expression, not {side!r}, in {pair!r}.")
    return PatternRule(as_template(cast("str | Template", source)), as_template(cast("str | Template", target)))


def rules_repr(rules: tuple[Rule, ...]) -> str:
    """Write rules as the value that reads as them: a function, a mapping, or pairs if one stands twice."""
    if len(rules) == 1 and isinstance(rules[0], FunctionRule):
        return repr(rules[0])
    pairs = [repr(rule) for rule in rules]
    if len({_source_repr(rule) for rule in rules}) < len(rules):
        return "[" + ", ".join(pairs) + "]"
    return "{" + ", ".join(f"{_source_repr(rule)}: {_target_repr(rule)}" for rule in rules) + "}"


def _source_repr(rule: Rule) -> str:
    if isinstance(rule, PatternRule):
        return repr(rule.source.text)
    return _regex_repr(rule.source) if isinstance(rule, RegexRule) else repr(rule)


def _target_repr(rule: Rule) -> str:
    if isinstance(rule, PatternRule):
        return repr(rule.target.text)
    if isinstance(rule, FunctionRule):
        return repr(rule)
    return repr(rule.target) if isinstance(rule.target, str) else _function_repr(rule.target)


def _regex_repr(regex: re.Pattern[Any]) -> str:
    flags = re.RegexFlag(regex.flags & ~re.UNICODE)
    return f"re.compile({regex.pattern!r}, {flags!r})" if flags else f"re.compile({regex.pattern!r})"


def _function_repr(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
