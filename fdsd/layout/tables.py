"""Reading what says how the tensors of a state are laid out: one layout for all, rules by name, or a model's spec.

A table gives each name its layout, and tells what is wrong with it; what is done with tensors is not its business.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from fdsd.data.errors import BadFile, BadPattern, SpecMismatch, Unsupported, listing, plural
from fdsd.data.model import ModelSpec
from fdsd.data.naming import nearest_template
from fdsd.data.problem import Problem
from fdsd.data.statedict import StateDict
from fdsd.data.template import Template, escape
from fdsd.data.values import is_mapping
from fdsd.layout.layout import Layout

__all__ = ["Placing", "Table", "layouts_of"]

Placing = Layout | Mapping[str, Layout] | ModelSpec
"""One layout for all tensors; layouts by pattern, or by name (a ``StateDict``); or a model's spec, which has some."""

_SUGGESTED = 10
"""A suggestion looks at every name, so only this many patterns that match nothing get one."""


@frozen
class Table:
    """Which layout each name has.

    Attributes:
        rules: Patterns with layouts; the first that matches a name wins.
        default: The layout of names that no rule matches; ``None`` lets them pass.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Replicate, Shard
    >>> mesh = Mesh({"tp": 2})
    >>> table = Table.of("shard_with", {"{_...}.weight": Layout(mesh, [Shard(0)]), "b": Layout(mesh, [Replicate()])})
    >>> found, problems = table.resolve(["a.weight", "a.bias"])
    >>> found["a.weight"].placements, problems[0].message
    ((Shard(0),), "no name matches 'b' among 2. Correct it, or end it in '?' if it may be absent.")
    """

    rules: tuple[tuple[Template, Layout], ...] = ()
    default: Layout | None = None

    @classmethod
    def of(cls, verb: str, placing: Placing) -> Table:
        """Read what a user gave.

        Args:
            verb: What was called, for errors.
            placing: One layout, a mapping from pattern to layout, a ``StateDict`` of layouts by name, or a
                ``ModelSpec``, of which a state need not hold all.

        Raises:
            BadPattern: A key is no pattern.
            Unsupported: A value is no layout; or ``placing`` is none of these, or has no layout at all.
        """
        given: Any = placing
        if isinstance(given, Layout):
            return cls((), given)
        if isinstance(given, ModelSpec):
            found = layouts_of(given)
            if not found:
                named = plural(len(given.entries), "name")
                raise Unsupported(
                    f"{verb}: this ModelSpec of {named} has no layouts. Describe a sharded model, or give a Layout."
                )
            return cls(tuple([(Template.literal(name).as_optional(), layout) for name, layout in found.items()]))
        if not is_mapping(given):
            raise Unsupported(
                f"{verb}: layouts are given as one Layout, as a mapping from pattern to Layout, or as a ModelSpec, "
                f"not as {type(given).__name__}. Write Layout(mesh, placements), or describe(model)."
            )
        if odd := [key for key, value in given.items() if not isinstance(value, Layout)]:
            raise Unsupported(f"{verb}: these are given no Layout: {listing(odd)}. Write Layout(mesh, placements).")
        if not given:
            raise Unsupported(f"{verb}: there are no layouts. Give one Layout, or some by pattern.")
        is_literal = isinstance(given, StateDict)
        return cls(tuple([(_pattern(verb, key, is_literal), layout) for key, layout in given.items()]))

    def resolve(
        self, names: Sequence[str], ties: Mapping[str, Hashable] | None = None
    ) -> tuple[dict[str, Layout], list[Problem]]:
        """Give each name its layout.

        Args:
            names: The names of tensors.
            ties: What is equal for names that hold the same tensor. They have one layout: what a rule says of one
                of them holds for all.

        Returns:
            The layouts of those names that have one, and what is wrong: rules that win no name, and tied names with
            different layouts.
        """
        found, problems = self._by_rule(names)
        if self.default is not None:
            found = {name: found.get(name, self.default) for name in names}
        elif ties:
            _follow(found, ties, problems)
        return found, problems

    def _by_rule(self, names: Sequence[str]) -> tuple[dict[str, Layout], list[Problem]]:
        literals: dict[str, int] = {}
        others: list[int] = []
        for number, (pattern, _) in enumerate(self.rules):
            if pattern.is_literal:
                literals.setdefault(pattern.format({}), number)
            else:
                others.append(number)
        found: dict[str, Layout] = {}
        used: set[int] = set()
        for name in names:
            known = literals.get(name, len(self.rules))
            winner = next((k for k in others if k < known and self.rules[k][0].match(name) is not None), known)
            if winner < len(self.rules):
                used.add(winner)
                found[name] = self.rules[winner][1]
        idle = [p for k, (p, _) in enumerate(self.rules) if k not in used and not p.optional]
        return found, [self._unmatched(p, names, is_hinted=at < _SUGGESTED) for at, p in enumerate(idle)]

    def _unmatched(self, pattern: Template, names: Sequence[str], *, is_hinted: bool) -> Problem:
        hit = next((name for name in names if pattern.match(name) is not None), None)
        if hit is not None:
            text = f"an earlier rule has every name that matches {pattern.text!r}, such as {hit!r}. Put it first."
            return Problem("shadowed rule", text)
        hint = ""
        if is_hinted:
            close, name = nearest_template(pattern, names)
            if name is not None and (close is None or close.is_literal):
                hint = f"; the nearest name is {name!r}"
            elif close is not None:
                hint = f"; {close.text!r} would match, for example {name!r}"
        remedy = "Correct it, or end it in '?' if it may be absent."
        return Problem("unmatched rule", f"no name matches {pattern.text!r} among {len(names)}{hint}. {remedy}")

    def call_text(self) -> str:
        """Give the source text of the argument.

        >>> from fdsd.layout.mesh import Mesh
        >>> Table((), Layout(Mesh({"dp": 2}), {})).call_text()
        "Layout(Mesh({'dp': 2}), (Replicate(),))"
        """
        if self.default is not None:
            return repr(self.default)
        return "{" + ", ".join([f"{pattern.text!r}: {layout}" for pattern, layout in self.rules]) + "}"

    @property
    def layouts(self) -> Iterable[Layout]:
        """All layouts, each once."""
        every = [layout for _, layout in self.rules] + ([] if self.default is None else [self.default])
        return dict.fromkeys(every)


def _pattern(verb: str, key: Any, is_literal: bool) -> Template:
    if isinstance(key, Template):
        return key
    if not isinstance(key, str):
        raise BadPattern(f"{verb}: names are given as patterns, a str each, not {key!r}.")
    if is_literal:
        return Template.selector(escape(key))
    try:
        return Template.selector(key)
    except BadPattern as error:
        error.args = (f"{verb}: {error}",)
        raise


def _follow(found: dict[str, Layout], ties: Mapping[str, Hashable], problems: list[Problem]) -> None:
    """Give tied names the layout that one of them has."""
    groups: dict[Hashable, list[str]] = {}
    for name, key in ties.items():
        if key is not None:
            groups.setdefault(key, []).append(name)
    for group in groups.values():
        layouts = {found[name] for name in group if name in found}
        if len(layouts) > 1:
            text = f"{listing(group)} are one tensor, but have different layouts. Give them one, or untie() first."
            problems.append(Problem("spec", text, tuple(group)))
        elif layouts:
            found.update(dict.fromkeys(group, layouts.pop()))


def layouts_of(model: ModelSpec) -> StateDict[Layout]:
    """Read the layouts that a model's spec holds as data; a tied name has its owner's.

    Args:
        model: The spec.

    Returns:
        The layouts by FQN, of those entries that have one.

    Raises:
        SpecMismatch: The layout of an entry is none; all such are named.

    >>> import torch
    >>> from fdsd.data.model import TensorEntry
    >>> from fdsd.data.spec import TensorSpec
    >>> from fdsd.layout.mesh import Mesh
    >>> layout = Layout(Mesh({"dp": 2}), {})
    >>> entry = TensorEntry(TensorSpec((2,), torch.int8), layout=layout.to_data())
    >>> layouts_of(ModelSpec({"w": entry}))["w"] == layout
    True
    """
    made: dict[str, Layout] = {}
    wrong: list[str] = []
    for name, entry in model.entries.items():
        data = entry.layout
        if data is None and entry.tied_to is not None:
            data = model.entries[entry.tied_to].layout
        if data is None:
            continue
        try:
            made[name] = Layout.from_data(data)
        except BadFile as error:
            wrong.append(f"{name!r}: {error}")
    if wrong:
        more = f" And {len(wrong) - 10} more." if len(wrong) > 10 else ""
        raise SpecMismatch(f"ModelSpec: layouts that are none: {' '.join(wrong[:10])}{more}")
    return StateDict.trusted(made)
