"""Choosing names: by patterns, or by a function of name and spec."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from attrs import field, frozen

from fdsd.algebra.ops.call import function_name
from fdsd.data.errors import BadPattern, add_note, plural
from fdsd.data.naming import nearest_template
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec
from fdsd.data.template import Template, escape
from fdsd.pipeline.rewrite import Scope
from fdsd.transforms.regroup import shown

__all__ = ["Choice", "Which", "choice", "literal"]

Predicate = Callable[[str, TensorSpec], bool]
Which = str | Template | Collection[str | Template] | Predicate
"""Names: a pattern, several, or a function of a tensor's name and spec."""

_SUGGESTED = 10
"""A suggestion looks at every name, so only this many patterns that match nothing get one."""


@frozen
class Choice:
    """What a verb works on.

    ``is_default`` tells that nothing was given, so that the verb's own default holds; an empty list chooses nothing.

    >>> Choice.of("a.{_}").pick(Scope({"a.b": 1, "c": 2}))
    (['a.b'], [])
    """

    patterns: tuple[Template, ...] = ()
    predicates: tuple[Predicate, ...] = ()
    is_default: bool = field(default=False, kw_only=True)

    @classmethod
    def of(cls, *which: Which) -> Choice:
        """Read what a user gave: patterns, collections of patterns, functions.

        Raises:
            BadPattern: Something is none of these.
        """
        patterns: list[Template] = []
        predicates: list[Predicate] = []
        for item in which:
            if isinstance(item, str | Template):
                patterns.append(_selector(item))
            elif isinstance(item, torch.nn.Module):
                raise BadPattern("names are given as patterns or as a function, not as a module. Give its names.")
            elif callable(item):
                predicates.append(item)
            elif isinstance(item, Collection) and not isinstance(item, bytes | torch.Tensor):
                ordered = sorted(item, key=str) if isinstance(item, set | frozenset) else item
                patterns.extend([_selector(pattern) for pattern in ordered])
            else:
                raise BadPattern(
                    f"names are given as patterns, in collections of them, or as a function, not as "
                    f"{type(item).__name__}: {shown(item)}."
                )
        return cls(tuple(dict.fromkeys(patterns)), tuple(predicates), is_default=not which)

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
        idle = [p for p in self.patterns if p not in used and not p.optional]
        return chosen, [_unmatched(p, scope, is_hinted=at < _SUGGESTED) for at, p in enumerate(idle)]

    def call_text(self) -> str:
        """Give the source text of the arguments."""
        texts = [repr(p.text) for p in self.patterns]
        texts += [function_name(fn) for fn in self.predicates]
        return ", ".join(texts) if texts or self.is_default else "[]"

    def one_text(self) -> str:
        """Give the source text as a single argument."""
        if len(self.patterns) + len(self.predicates) == 1:
            return self.call_text()
        return f"[{', '.join([repr(p.text) for p in self.patterns])}]"


def choice(verb: str, *which: Which) -> Choice:
    """Read the names that a verb was given, or say what is wrong with them.

    Raises:
        BadPattern: They are no names.
    """
    try:
        return Choice.of(*which)
    except BadPattern as error:
        error.args = (f"{verb}: {error}",)
        raise


def _selector(pattern: Any) -> Template:
    if not isinstance(pattern, str | Template):
        raise BadPattern(f"each of several names is a pattern, a str, not {shown(pattern)}.")
    return pattern if isinstance(pattern, Template) else Template.selector(pattern)


def _holds(fn: Predicate, name: str, scope: Scope) -> bool:
    """Ask a predicate; objects that are no tensors have no spec and are not chosen."""
    spec = scope.spec(name)
    if spec is None:
        return False
    try:
        return bool(fn(name, spec))
    except Exception as error:
        add_note(error, f"{function_name(fn)}, asked whether {name!r}, {spec}, is meant")
        raise


def _unmatched(pattern: Template, scope: Scope, *, is_hinted: bool) -> Problem:
    text = (
        f"no name matches {pattern.text!r} among {len(scope.names)}{_suggestion(pattern, scope) if is_hinted else ''}. "
        "Correct it, or end it in '?' if it may be absent."
    )
    return Problem("unmatched rule", text)


def _suggestion(pattern: Template, scope: Scope) -> str:
    """Give the pattern that would match, or else the nearest name."""
    found, close = nearest_template(pattern, scope.names)
    if close is None:
        return ""
    if found is None or found.is_literal:
        return f"; the nearest name is {close!r}"
    count = sum(1 for _ in found.matcher.find(scope.names))
    return f"; {found.text!r} would match {plural(count, 'name')}, such as {close!r}"


def literal(names: Iterable[str]) -> tuple[Template, ...]:
    """Give the patterns that match exactly these names."""
    return tuple([Template(escape(name)) for name in names])
