"""`Template`: the pattern of one FQN, or of a family of FQNs.

A pattern is text with holes, ``layers.{i}.attn.{x|q|k|v}.weight``; it reads a name into values and writes
values into a name. Tables of patterns live in ``rules``, groups of names in ``grouping``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from attrs import field, frozen

from fdsd.data._matcher import Matcher
from fdsd.data._parse import Domain, Hole, parse
from fdsd.data.errors import BadPattern

__all__ = ["Template", "as_template", "bind_together", "escape"]


@frozen(repr=False)
class Template:
    """The pattern of a whole FQN; immutable, equal by its text.

    ========================= ==========================================================================
    ``{name}``                one or more characters without ``.``
    ``{name...}``             one or more whole segments: a ``.`` or an end on both sides
    ``{name:0..31}``          an integer, both ends included
    ``{name|word|word}``      one of these words
    ``{i+8}``, ``{2*i+1}``    an integer that is a sum over ``i``; integers are canonical decimals, from 0 on
    ``{_}``, ``{_...}``       unnamed; in select and drop only
    ``{{``, ``}}``, ``??``    the literals ``{``, ``}`` and ``?``
    ``?`` at the end          the pattern may match nothing
    ========================= ==========================================================================

    >>> t = Template("layers.{i}.{x|wq|wk}.weight")
    >>> t.match("layers.3.wq.weight")
    {'i': '3', 'x': 'wq'}
    >>> t.format({"i": "3", "x": "wk"})
    'layers.3.wk.weight'
    >>> Template("layers.{i+8}").match("layers.11")
    {'i': '3'}

    Args:
        text: the pattern.
        unnamed: whether ``{_}`` and ``{_...}`` may stand in it, as in select and drop.

    Raises:
        BadPattern: the text is no pattern.

    Law: ``t.format(t.match(name)) == name`` for every name that ``t`` matches, if it has no unnamed holes.
    """

    text: str
    unnamed: bool = field(default=False, eq=False)
    _matcher: Matcher = field(init=False, eq=False)
    _is_optional: bool = field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        parsed = parse(self.text, unnamed=self.unnamed)
        object.__setattr__(self, "_matcher", Matcher(self.text, parsed.pieces, parsed.domains))
        object.__setattr__(self, "_is_optional", parsed.is_optional)

    @classmethod
    def selector(cls, text: str) -> Template:
        """Read a pattern of select or drop, where holes may be unnamed.

        >>> Template.selector("layers.{_}.{_...}").match("layers.3.wq.weight")
        {}
        """
        return cls(text, True)

    @classmethod
    def literal(cls, name: str) -> Template:
        """Give the pattern that matches exactly this name.

        >>> Template.literal("a{b}?")
        Template('a{{b}}??')

        Raises:
            BadPattern: the name is empty or holds ``...``, which no pattern can say.
        """
        return cls(escape(name))

    @property
    def holes(self) -> tuple[str, ...]:
        """The names of the holes, each once, in order of first appearance."""
        return tuple(self._matcher.domains)

    @property
    def many(self) -> frozenset[str]:
        """The names of the holes that stand for whole segments, ``{name...}``."""
        return frozenset(name for name, domain in self._matcher.domains.items() if domain.many)

    @property
    def optional(self) -> bool:
        """Whether the pattern ends in ``?``: it may match nothing."""
        return self._is_optional

    @property
    def is_literal(self) -> bool:
        """Whether the pattern has no holes, and so is one name."""
        return self._matcher.literal is not None

    @property
    def pieces(self) -> tuple[str | Hole, ...]:
        """The literals (unescaped) and holes, in turn."""
        return self._matcher.pieces

    @property
    def matcher(self) -> Matcher:
        """What matches and writes the names of this pattern alone; see `bind_together`."""
        return self._matcher

    def unoptional(self) -> Template:
        """Give the pattern without its last ``?``.

        >>> Template("a.{x}?").unoptional()
        Template('a.{x}')
        """
        return Template(self.text[:-1], self.unnamed) if self.optional else self

    def as_optional(self) -> Template:
        """Give the pattern with a ``?`` at its end.

        >>> Template("a.{x}").as_optional()
        Template('a.{x}?')
        """
        return self if self.optional else Template(self.text + "?", self.unnamed)

    def match(self, name: str) -> dict[str, str] | None:
        """Read a whole FQN: the value of each hole, or None if the pattern does not match.

        Holes take the shortest text, left to right, that lets the rest match.

        >>> Template("{a}_{b}").match("x_y_z")
        {'a': 'x', 'b': 'y_z'}
        """
        return self._matcher.match(name)

    def format(self, bindings: Mapping[str, str]) -> str:
        """Write the FQN for the values of the holes; further values are ignored.

        Raises:
            BadPattern: a value is absent, or does not fit its hole.
        """
        return self._matcher.format(bindings)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        has_unnamed = any(isinstance(piece, Hole) and piece.is_unnamed for piece in self.pieces)
        return f"Template.selector({self.text!r})" if has_unnamed else f"Template({self.text!r})"

    def __reduce__(self) -> tuple[functools.partial[Template], tuple[str, bool]]:
        return functools.partial(Template), (self.text, self.unnamed)


def as_template(pattern: str | Template) -> Template:
    """Read a pattern, unless it is one already."""
    return pattern if isinstance(pattern, Template) else Template(pattern)


def escape(name: str) -> str:
    """Double ``{``, ``}`` and ``?``, so that a pattern means the text itself.

    >>> escape("a{b}?")
    'a{{b}}??'
    """
    return name.replace("{", "{{").replace("}", "}}").replace("?", "??")


def bind_together(*templates: Template) -> list[Matcher]:
    """Give matchers that agree on the values of shared holes: a range, words or sum in one holds in all.

    So two patterns are a relation between names that can be read both ways: what one writes, the other reads.

    >>> left, right = bind_together(Template("a.{i}"), Template("b.{i-8}"))
    >>> left.match("a.9"), left.match("a.7"), left.match("a.x")
    ({'i': '9'}, None, None)

    Raises:
        BadPattern: no value fits all uses of a hole.
    """
    domains: dict[str, Domain] = {}
    for template in templates:
        for name, domain in template.matcher.domains.items():
            try:
                domains[name] = domains[name].merge(domain) if name in domains else domain
            except BadPattern as error:
                texts = " and ".join(repr(t.text) for t in templates if name in t.holes)
                raise BadPattern(f"patterns {texts}: hole {name}: {error}.") from None
    return [Matcher(t.text, t.pieces, {name: domains[name] for name in t.holes}) for t in templates]
