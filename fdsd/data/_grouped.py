"""Groups of names as data, and the problems that all kinds of groups share.

How names are found lives in ``grouping``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from attrs import define, field, frozen

from fdsd.data.errors import listing, plural
from fdsd.data.naming import nearest, nearest_template
from fdsd.data.problem import Problem
from fdsd.data.template import Template


@frozen
class Group:
    """Names that become one: the target, and its members in order (those present, if it is not complete).

    ``position`` is the place, among all names, of the first member that stands there.
    """

    target: str
    members: tuple[str, ...]
    position: int
    absent: tuple[str, ...] = ()
    is_complete: bool = True

    @property
    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names that go, and those that come."""
        return self.members, (self.target,)


@frozen
class Spread:
    """One name that becomes many: the source at its place among all names, and the targets in order."""

    source: str
    targets: tuple[str, ...]
    position: int

    @property
    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names that go, and those that come."""
        return (self.source,), self.targets


G = TypeVar("G", Group, Spread)


@define
class Groups(Generic[G]):
    """Groups in the order of their positions, with everything that is wrong with them."""

    groups: list[G] = field(factory=list)
    problems: list[Problem] = field(factory=list)

    def rewrite(self, names: Sequence[str]) -> list[str]:
        """Give the names after the rewrite: what comes stands where the first of what goes stood."""
        gone = {name for group in self.groups for name in group.sides[0]}
        comes = {group.position: group.sides[1] for group in self.groups}
        after: list[str] = []
        for at, name in enumerate(names):
            if at in comes:
                after += comes[at]
            elif name not in gone:
                after.append(name)
        return after


def check_groups_round_trip(
    forward: Groups[Group] | Groups[Spread], back: Groups[Group] | Groups[Spread]
) -> list[Problem]:
    """Compare groups with those that the inverse finds in the names that they leave; tell each difference.

    So a name that passed through one way and not the other, and a key that reads back as another, are told.
    """
    there = {group.sides for group in forward.groups}
    returned = {(group.sides[1], group.sides[0]) for group in back.groups}
    remedy = "Make the patterns tell such names apart."
    problems: list[Problem] = []
    for goes, comes in sorted(there - returned):
        pair = f"{listing(goes, sort=False)} to {listing(comes, sort=False)}"
        message = f"{pair} is not undone by the inverse. {remedy}"
        problems.append(Problem("round trip", message, (*goes, *comes)))
    for goes, comes in sorted(returned - there):
        message = (
            f"the inverse would make {listing(goes, sort=False)} of {listing(comes, sort=False)}, "
            f"which did not come from there. {remedy}"
        )
        problems.append(Problem("round trip", message, (*comes, *goes)))
    return problems


def finish(result: Groups[G], sources: Sequence[Template], single: Template, names: Sequence[str]) -> Groups[G]:
    """Order the groups, and add the problems that all kinds of groups share."""
    result.groups.sort(key=lambda group: group.position)
    result.problems += collisions(result.groups, names)
    if not result.groups and not result.problems and not single.optional:
        result.problems.append(unmatched(sources, names, single))
    return result


def partial(groups: Sequence[Group], names: Sequence[str]) -> Iterator[Problem]:
    """Word what each group lacks; a suggestion looks at every name, so only the first group gets one."""
    for told, group in enumerate(g for g in groups if not g.is_complete):
        close = [] if told else nearest(group.absent[0], names)
        hint = f"; the nearest name to {group.absent[0]!r} is {close[0]!r}" if close else ""
        there = f"{listing(group.members, sort=False)} {'is' if len(group.members) == 1 else 'are'} there"
        lacks = f"{group.target!r} lacks {listing(group.absent, sort=False)}"
        message = f"{lacks}; {there}. Each group must be whole{hint}."
        yield Problem("partial group", message, (*group.absent, *group.members))


def collisions(groups: Sequence[Group | Spread], names: Sequence[str]) -> Iterator[Problem]:
    """Find names that come where one stays, or come twice."""
    gone = {name for group in groups for name in group.sides[0]}
    stays = set(names) - gone
    makers: dict[str, list[str]] = {}
    for group in groups:
        for target in group.sides[1]:
            makers.setdefault(target, []).append(listing(group.sides[0], limit=3, sort=False))
    for target, sources in makers.items():
        if target in stays:
            message = f"{sources[0]} would become {target!r}, which is there already. Drop or rename it first."
            yield Problem("collision", message, (target,))
        if len(sources) > 1:
            shown = "; ".join(sources[:10]) + (f" and {len(sources) - 10} more" if len(sources) > 10 else "")
            message = f"{len(sources)} groups map to {target!r}: {shown}. Make the patterns differ."
            yield Problem("collision", message, (target,))


def unmatched(sources: Sequence[Template], names: Sequence[str], single: Template | None = None) -> Problem:
    """Word that no name matches; ``single`` is the pattern that a ``?`` could stand on, if that helps."""
    texts = listing((source.text for source in sources), sort=False)
    found, close = nearest_template(sources[0].unoptional(), names)
    hint = "" if close is None else f"; the nearest name is {close!r}"
    if found is not None:
        count = sum(1 for _ in found.matcher.find(names))
        hint = f"; {found.text!r} would match {plural(count, 'name')}, such as {close!r}"
    verb = "matches" if len(sources) == 1 else "match"
    optional = "" if single is None else f", or write {single.as_optional().text!r} if it may match nothing"
    message = f"{texts} {verb} none of {plural(len(names), 'name')}{hint}. Correct it{optional}."
    return Problem("unmatched rule", message)
