"""Which names belong together: many to one for concat and stack, one to many for split and unstack.

A group's key is the values of the holes that both sides share. Every function gives all groups that it can
and all problems that it finds; shapes, sizes and tensors are the verbs' business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from fdsd.data._grouped import Group, Groups, Spread, check_groups_round_trip, finish, partial, unmatched
from fdsd.data._matcher import Matcher
from fdsd.data._parse import Hole
from fdsd.data.errors import BadPattern, listing, plural
from fdsd.data.problem import Problem
from fdsd.data.template import Template, bind_together

__all__ = [
    "Group",
    "Groups",
    "Spread",
    "check_groups_round_trip",
    "check_indexed",
    "check_many",
    "group_indexed",
    "group_many",
    "group_split",
    "group_unindexed",
]

_MAX_ABSENT = 1000
"""A wrong ``num`` must not fill the memory with names that are absent."""

Key = tuple[str, ...]


def _found(reader: Matcher, names: Sequence[str], positions: Mapping[str, int]) -> Iterable[tuple[int, dict[str, str]]]:
    """Find names; of thousands of names written out, each would walk through all."""
    if reader.literal is None:
        return reader.find(names)
    at = positions.get(reader.literal)
    return [] if at is None else [(at, {})]


def check_many(sources: Sequence[Template], target: Template) -> None:
    """Check that patterns can be grouped: all have the holes of the single one, and none stands twice.

    The law: each source names one tensor for each target, so that groups can be undone.

    Raises:
        BadPattern: they cannot; the message names the pattern and the holes.
    """
    texts = f"{listing((s.text for s in sources), sort=False)} and {target.text!r}"
    if not sources:
        raise BadPattern(f"{target.text!r}: no patterns go with it; give one or more.")
    _check_named(*sources, target)
    twice = [text for text, count in Counter(s.text for s in sources).items() if count > 1]
    if twice:
        raise BadPattern(f"{texts}: {listing(twice)} stands more than once; a name goes to one place.")
    for source in sources:
        if source.optional:
            raise BadPattern(
                f"{source.text!r}: the '?' stands on the single pattern; write {target.as_optional().text!r}."
            )
        lacks, more = set(target.holes) - set(source.holes), set(source.holes) - set(target.holes)
        if lacks:
            raise BadPattern(f"{texts}: {source.text!r} lacks {_braced(lacks)}; all patterns share their holes.")
        if more:
            raise BadPattern(
                f"{texts}: {_braced(more)} of {source.text!r} is not in {target.text!r}, so a group could "
                "hold several of its names. Add the hole there, or use stack() and unstack() for an index."
            )
    bind_together(*sources, target)


def check_indexed(many: Template, one: Template, index: str | None = None) -> str:
    """Check that one pattern has exactly one hole more than the other, and give its name: the index.

    >>> check_indexed(Template("experts.{e}.{p}"), Template("experts.{p}"))
    'e'

    Raises:
        BadPattern: there is no such hole, several, or not the one that was asked for.
    """
    _check_named(many, one)
    texts = f"{many.text!r} and {one.text!r}"
    if many.optional:
        raise BadPattern(f"{many.text!r}: the '?' stands on the single pattern; write {one.as_optional().text!r}.")
    lacks, more = set(one.holes) - set(many.holes), set(many.holes) - set(one.holes)
    if lacks:
        raise BadPattern(f"{texts}: {many.text!r} lacks {_braced(lacks)}, which the single pattern has.")
    if len(more) != 1:
        what = f"there are {len(more)}: {_braced(more)}" if more else "there is none"
        raise BadPattern(f"{texts}: one hole more, the index, must be in {many.text!r}, but {what}.")
    (name,) = more
    if index not in (None, name):
        raise BadPattern(f"{texts}: the index is {{{name}}}, as the single pattern lacks it, not index={index!r}.")
    if name in many.many:
        raise BadPattern(f"{texts}: the index {{{name}...}} stands for whole segments; an index is one integer.")
    _bind_indexed(many, one, name)
    return name


def group_many(sources: Sequence[Template], target: Template, names: Sequence[str]) -> Groups[Group]:
    """Group names for concat: for each key, the name of every source, in the order of the sources.

    >>> found = group_many([Template("{i}.q"), Template("{i}.k")], Template("{i}.qk"), ["0.k", "0.q", "1.q"])
    >>> found.groups[0].target, found.groups[0].members
    ('0.qk', ('0.q', '0.k'))
    >>> print(found.problems[0].message)
    '1.qk' lacks '1.k'; '1.q' is there. Each group must be whole; the nearest name to '1.k' is '0.k'.

    Raises:
        BadPattern: the patterns cannot be grouped.
    """
    check_many(sources, target)
    *readers, writer = bind_together(*sources, target)
    found: dict[Key, dict[int, int]] = {}
    winners: dict[int, list[int]] = {}
    positions = {name: at for at, name in enumerate(names)}
    for which, reader in enumerate(readers):
        for at, bound in _found(reader, names, positions):
            found.setdefault(tuple(bound[hole] for hole in target.holes), {})[which] = at
            winners.setdefault(at, []).append(which)
    result = Groups[Group]()
    for at, won in sorted(winners.items()):
        if len(won) > 1:
            result.problems.append(_two_patterns(names[at], [sources[which].text for which in won]))
    for key, places in found.items():
        bindings = dict(zip(target.holes, key, strict=True))
        absent = [reader.format(bindings) for which, reader in enumerate(readers) if which not in places]
        members = tuple(names[places[which]] for which in places)
        result.groups.append(Group(writer.format(bindings), members, min(places.values()), tuple(absent), not absent))
    if found:
        busy = {which for won in winners.values() for which in won}
        idle = [which for which in range(len(sources)) if which not in busy]
        result.problems += [unmatched([sources[which]], names) for which in idle]
    result.problems += partial(result.groups, names)
    return finish(result, sources, target, names)


def group_indexed(
    source: Template,
    target: Template,
    names: Sequence[str],
    *,
    index: str | None = None,
    num: int | None = None,
) -> Groups[Group]:
    """Group names for stack: for each key, the names in the order of the index, which must be ``0..n-1``.

    >>> group_indexed(Template("e.{x}.w"), Template("e.w"), ["e.1.w", "e.0.w"]).groups[0].members
    ('e.0.w', 'e.1.w')
    >>> found = group_indexed(Template("e.{x}.w"), Template("e.w"), ["e.0.w", "e.1.w", "e.2.w", "e.7.w"])
    >>> print(found.problems[0].message)
    'e.w': index x must be 0..3; it lacks 3, and 7 is a stray.

    Args:
        source: the pattern of the members; it has one hole more than the target, the index.
        target: the pattern of the result.
        names: all names.
        index: the name of that hole, if the reader should see it.
        num: how many members each group must have; otherwise what most groups have.

    Raises:
        BadPattern: the patterns do not fit, or ``num`` is below 1.
    """
    name = check_indexed(source, target, index)
    if num is not None and num < 1:
        raise BadPattern(f"{source.text!r}: num={num}, but a stack has 1 member or more.")
    reader, writer = _bind_indexed(source, target, name)
    found: dict[Key, dict[int, int]] = {}
    for at, bound in reader.find(names):
        found.setdefault(tuple(bound[hole] for hole in target.holes), {})[int(bound[name])] = at
    count = num if num is not None else _count(found.values())
    result = Groups[Group]()
    result.problems += _odd_digits(source, reader, name, names)
    for key, places in found.items():
        bindings = dict(zip(target.holes, key, strict=True))
        _add_indexed(result, (reader, writer), (name, count), bindings, places, names)
    return finish(result, [source], target, names)


def group_split(source: Template, targets: Sequence[Template], names: Sequence[str]) -> Groups[Spread]:
    """Give, for each name that the source matches, the name of every target, in their order.

    >>> group_split(Template("{i}.qk"), [Template("{i}.q"), Template("{i}.k")], ["0.qk", "norm"]).groups
    [Spread(source='0.qk', targets=('0.q', '0.k'), position=0)]

    Raises:
        BadPattern: the patterns cannot be grouped.
    """
    check_many(targets, source)
    reader, *writers = bind_together(source, *targets)
    result = Groups[Spread]()
    for at, bound in reader.find(names):
        result.groups.append(Spread(names[at], tuple(writer.format(bound) for writer in writers), at))
    return finish(result, [source], source, names)


def group_unindexed(
    source: Template,
    target: Template,
    names: Sequence[str],
    num: int | Callable[[str], int],
    *,
    index: str | None = None,
) -> Groups[Spread]:
    """Give, for each name that the source matches, its targets for the indices ``0..num-1``.

    >>> group_unindexed(Template("e.w"), Template("e.{x}.w"), ["e.w"], 2).groups
    [Spread(source='e.w', targets=('e.0.w', 'e.1.w'), position=0)]

    Args:
        source: the pattern of the stacked name.
        target: the pattern of its parts; it has one hole more, the index.
        names: all names.
        num: how many parts, or a function that tells it for a name.
        index: the name of that hole, if the reader should see it.

    Raises:
        BadPattern: the patterns do not fit.
    """
    name = check_indexed(target, source, index)
    writer, reader = _bind_indexed(target, source, name)
    result = Groups[Spread]()
    for at, bound in reader.find(names):
        count = num if isinstance(num, int) else num(names[at])
        try:
            if count < 1:
                raise BadPattern(f"num={count}, but a stack has 1 member or more.")
            parts = tuple(writer.format({**bound, name: str(i)}) for i in range(count))
        except BadPattern as error:
            result.problems.append(Problem("ragged indices", f"{names[at]!r}: {error}", (names[at],)))
        else:
            result.groups.append(Spread(names[at], parts, at))
    return finish(result, [source], source, names)


def _check_named(*templates: Template) -> None:
    for template in templates:
        if any(isinstance(piece, Hole) and piece.is_unnamed for piece in template.pieces):
            raise BadPattern(f"{template.text!r}: unnamed holes are for select and drop only; give them names.")


def _bind_indexed(many: Template, one: Template, index: str) -> tuple[Matcher, Matcher]:
    """Bind both patterns, where the index is an integer even if the pattern does not say so."""
    reader, writer = bind_together(many, one, Template(f"{{{index}+0}}"))[:2]
    return reader, writer


def _add_indexed(
    result: Groups[Group],
    patterns: tuple[Matcher, Matcher],
    index: tuple[str, int],
    bindings: dict[str, str],
    places: dict[int, int],
    names: Sequence[str],
) -> None:
    """Add the group of one key, and what is wrong with its indices; ``places`` is where each index stands."""
    (reader, writer), (name, count) = patterns, index
    missing = list(islice((i for i in range(count) if i not in places), _MAX_ABSENT))
    strays = sorted(i for i in places if i >= count)
    absent = tuple(_written(reader, bindings, name, missing))
    inside = {i: at for i, at in places.items() if i < count}
    target = writer.format(bindings)
    if inside:
        members = tuple(names[inside[i]] for i in sorted(inside))
        result.groups.append(Group(target, members, min(inside.values()), absent, not missing))
    if missing or strays:
        message = _ragged(target, name, count, missing, strays, count - len(inside))
        stray_names = tuple(names[places[i]] for i in strays)
        result.problems.append(Problem("ragged indices", message, absent + stray_names))


def _count(groups: Iterable[dict[int, int]]) -> int:
    """Give the number of members that groups are meant to have.

    It is that of most whole groups (the larger of two as frequent). Where none is whole, it is the number
    that leaves the fewest indices absent or stray.
    """
    every = list(groups)
    whole = Counter(len(indices) for indices in every if max(indices) == len(indices) - 1)
    if whole:
        return max(whole, key=lambda n: (whole[n], n))
    numbers = {len(indices) for indices in every} | {max(indices) + 1 for indices in every}

    def faults(number: int) -> int:
        strays = [sum(1 for i in indices if i >= number) for indices in every]
        return sum(number - len(indices) + 2 * stray for indices, stray in zip(every, strays, strict=True))

    return min(numbers, key=lambda n: (faults(n), -n), default=0)


def _odd_digits(source: Template, reader: Matcher, index: str, names: Sequence[str]) -> Iterator[Problem]:
    """Find names whose index is a number written in another way, such as ``07``."""
    for at, bound in source.matcher.find(names):
        digits = bound[index]
        if digits.isdecimal() and digits != (plain := _plain(digits)) and reader.match(names[at]) is None:
            if reader.match(source.matcher.format({**bound, index: plain})) is None:
                continue  # it would be none of ours in any case
            message = f"{names[at]!r}: index {index} is {digits!r}; write indices without leading zeros."
            yield Problem("ragged indices", message, (names[at],))


def _plain(digits: str) -> str:
    """Write a number as indices are written: without leading zeros, in the digits of ASCII."""
    return "".join([str(int(digit)) for digit in digits]).lstrip("0") or "0"


def _written(reader: Matcher, bindings: dict[str, str], index: str, missing: Iterable[int]) -> Iterator[str]:
    for i in missing:
        if not reader.domains[index].misfit(str(i)):
            yield reader.format({**bindings, index: str(i)})


def _ragged(target: str, index: str, count: int, missing: list[int], strays: list[int], num_missing: int) -> str:
    wrong: list[str] = []
    if missing:
        more = f" and {num_missing - 10} more" if num_missing > 10 else ""
        wrong.append(f"it lacks {', '.join(map(str, missing[:10]))}{more}")
    if strays:
        wrong.append(f"{listing(strays)} {'is a stray' if len(strays) == 1 else 'are strays'}")
    wanted = "0" if count == 1 else f"0..{count - 1}"
    return f"{target!r}: index {index} must be {wanted}; {', and '.join(wrong)}."


def _two_patterns(name: str, texts: list[str]) -> Problem:
    matches = f"{name!r} matches {plural(len(texts), 'pattern')}: {listing(texts, sort=False)}"
    message = f"{matches}. Make them exclude each other."
    return Problem("two patterns", message, (name,))


def _braced(holes: Iterable[str]) -> str:
    return ", ".join(f"{{{hole}}}" for hole in sorted(holes))
