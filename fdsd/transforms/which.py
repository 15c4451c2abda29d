"""Choosing names: by patterns, or by a function of name and spec."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from attrs import frozen

from fdsd.algebra.ops.call import function_name
from fdsd.data.errors import BadPattern
from fdsd.data.naming import nearest
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec
from fdsd.data.template import Template, escape
from fdsd.pipeline.rewrite import Scope

__all__ = ["Choice", "Which", "literal"]

Predicate = Callable[[str, TensorSpec], bool]
Which = str | Template | Collection[str | Template] | Predicate
"""Names: a pattern, several, or a function of a tensor's name and spec."""


@frozen
class Choice:
    """What a verb works on; empty means what the verb works on by default.

    >>> Choice.of("a.{_}").pick(Scope({"a.b": 1, "c": 2}))
    (['a.b'], [])
    """

    patterns: tuple[Template, ...] = ()
    predicates: tuple[Predicate, ...] = ()

    @classmethod
    def of(cls, *which: Which) -> Choice:
        """Read what a user gave: patterns, collections of patterns, functions."""
        patterns: list[Template] = []
        predicates: list[Predicate] = []
        for item in which:
            if isinstance(item, str | Template):
                patterns.append(_selector(item))
            elif callable(item):
                predicates.append(item)
            elif isinstance(item, Collection):
                patterns.extend([_selector(pattern) for pattern in item])
            else:
                raise BadPattern(f"Names are given as patterns or as a function, not as {type(item).__name__}.")
        return cls(tuple(dict.fromkeys(patterns)), tuple(predicates))

    @property
    def is_default(self) -> bool:
        """Whether nothing was given."""
        return not self.patterns and not self.predicates

    def pick(self, scope: Scope) -> tuple[list[str], list[Problem]]:
        """Give the chosen names in the order of the scope, and a problem for each pattern that chooses none."""
        literals = {p.format({}): p for p in self.patterns if p.is_literal}
        others = [p for p in self.patterns if not p.is_literal]
        used: set[Template] = set()
        chosen: list[str] = []
        for name in scope.names:
            hits = [p for p in others if p.match(name) is not None]
            if name in literals:
                hits.append(literals[name])
            used.update(hits)
            if hits or any(_holds(fn, name, scope) for fn in self.predicates):
                chosen.append(name)
        return chosen, [_unmatched(p, scope) for p in self.patterns if p not in used and not p.optional]

    def call_text(self) -> str:
        """Give the source text of the arguments."""
        texts = [repr(p.text) for p in self.patterns]
        return ", ".join([*texts, *[function_name(fn) for fn in self.predicates]])

    def one_text(self) -> str:
        """Give the source text as a single argument."""
        if len(self.patterns) + len(self.predicates) == 1:
            return self.call_text()
        return f"[{self.call_text()}]"


def _selector(pattern: str | Template) -> Template:
    return pattern if isinstance(pattern, Template) else Template.selector(pattern)


def _holds(fn: Predicate, name: str, scope: Scope) -> bool:
    """Ask a predicate; objects that are no tensors have no spec and are not chosen."""
    spec = scope.spec(name)
    return spec is not None and bool(fn(name, spec))


def _unmatched(pattern: Template, scope: Scope) -> Problem:
    close = nearest(pattern.text, scope.names)
    hint = f"; the nearest name is {close[0]!r}" if close else ""
    text = (
        f"no name matches {pattern.text!r} among {len(scope.names)}{hint}. "
        "Correct it, or end it in '?' if it may be absent."
    )
    return Problem("unmatched rule", text)


def literal(names: Iterable[str]) -> tuple[Template, ...]:
    """Give the patterns that match exactly these names."""
    return tuple([Template(escape(name)) for name in names])
