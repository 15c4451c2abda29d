"""Which elements of a source a result is made of, and how often, counted exactly.

The walk from a region of an expression down to its source elements lives here as well (``trail``): ``why``
asks the same of one element. Nothing here reads data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from attrs import field, frozen

from fdsd.algebra.graph import Graph, producer
from fdsd.algebra.lazy import Computing, Lazy, Op, Structural
from fdsd.algebra.ops import Item, Origin
from fdsd.data.errors import plural
from fdsd.data.naming import fold
from fdsd.data.region import Region
from fdsd.data.statedict import StateDict
from fdsd.pipeline.grids import Grid, grids, spread
from fdsd.pipeline.planning import expressions, lazily
from fdsd.pipeline.step import Step

__all__ = ["Coverage", "End", "Uses", "Way", "coverage", "lazily", "mentioned", "trail"]


class Uses(NamedTuple):
    """How many elements of a tensor are used once, more than once, and never."""

    once: int
    more: int
    never: int

    @property
    def total(self) -> int:
        """The number of elements."""
        return self.once + self.more + self.never


@frozen(repr=False)
class Coverage:
    """How often the elements of a source are used by a result; see ``coverage`` for what counts as a use.

    Attributes:
        counts: For each tensor of the source, under its first name, how many elements are used how often.
        aliases: The further names of tied tensors, by the first name.
        dropped: The names of tensors of which no element is used.
    """

    counts: StateDict[Uses]
    aliases: StateDict[tuple[str, ...]] = field(factory=StateDict[tuple[str, ...]])
    dropped: tuple[str, ...] = ()

    @property
    def unused(self) -> dict[str, int]:
        """The tensors with elements that are never used, and how many those are."""
        return {name: uses.never for name, uses in self.counts.items() if uses.never}

    @property
    def reused(self) -> dict[str, int]:
        """The tensors with elements that are used more than once, and how many those are."""
        return {name: uses.more for name, uses in self.counts.items() if uses.more}

    @property
    def total(self) -> Uses:
        """The counts of all tensors together."""
        every: list[Uses] = list(self.counts.values())
        return Uses(sum([u.once for u in every]), sum([u.more for u in every]), sum([u.never for u in every]))

    @property
    def is_exact_cover(self) -> bool:
        """Whether every element is used exactly once, and no tensor is dropped."""
        return not self.dropped and all(not uses.more and not uses.never for uses in self.counts.values())

    def __str__(self) -> str:
        total, gone = self.total, set(self.dropped)
        left = [(name, uses) for name, uses in self.counts.items() if name not in gone]
        head = f"{plural(len(self.counts), 'tensor')} of {total.total:,} elements"
        lines = [f"{head}: {total.once:,} used once, {total.more:,} more than once, {total.never:,} never"]
        lines += _table("used once", {name: (uses.once, uses.total) for name, uses in left})
        lines += _table("used more than once", {name: (uses.more, uses.total) for name, uses in left})
        lines += _table("never used", {name: (uses.never, uses.total) for name, uses in left})
        lines += _section("dropped", [f"  {found.text}" for found in fold(self.dropped)])
        ties = [f"  {', '.join((name, *others))}" for name, others in self.aliases.items()]
        lines += _section("tied, counted once", ties)
        return "\n".join(lines)

    __repr__ = __str__


def _table(title: str, amounts: Mapping[str, tuple[int, int]]) -> list[str]:
    """Word one class of tensors; names with equal amounts are folded."""
    lines: list[str] = []
    for found in fold([name for name, (part, _) in amounts.items() if part], amounts.__getitem__):
        part, whole = amounts[found.names[0]]
        text = f"all {whole:,}" if part == whole else f"{part:,} of {whole:,}"
        lines.append(f"  {found.text}: {text}" + (" each" if len(found.names) > 1 else ""))
    return _section(title, lines)


def _section(title: str, lines: list[str]) -> list[str]:
    """Put a title before lines, if there are any: ten at most, the rest counted."""
    rest = len(lines) - 10
    more = [f"  and {rest:,} more like these"] if rest > 0 else []
    return [f"{title}:", *lines[:10], *more] if lines else []


def coverage(steps: Iterable[Step], source: Any) -> Coverage:
    """Count for each element of the source how often the result uses it.

    A use is a place of the result that depends on the element, not a read by some run. Each result tensor
    is looked at alone, a tied one once, and the uses are added up:

    * A place that an element was moved to, cast, or computed from place by place, uses that element once. So a
      tensor that goes into two results, ``concat`` of a tensor with itself, and ``index_select`` with repeats use
      elements twice.
    * A function of whole tensors uses every element that it is given once for each result that depends on it,
      however much of its value arrives there, and in how many places.
    * A comparison of tensors that must be equal, as in ``tie``, uses all that it compares.

    Args:
        steps: The steps of a pipeline.
        source: The state to rewrite, or its specs; of a ``TrainState``, the model. Objects that are no
            tensors are not counted.

    Returns:
        The counts by names of the source; tied tensors count as one, under the first name.

    Raises:
        FdsdError: The steps do not run on this source.

    Law: a pipeline of bijections (renames, permutations, splits, joins) is an exact cover.

    >>> coverage((), {"a": torch.ones(2, 3), "b": torch.ones(4)})
    2 tensors of 10 elements: 10 used once, 0 more than once, 0 never
    used once:
      a: all 6
      b: all 4
    """
    states = lazily(steps, source)
    tally = _Tally()
    roots = [root for _, root in expressions(states[-1])]
    for root in roots:
        tally.add(root)
    firsts: dict[int, str] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    counts: dict[str, Uses] = {}
    for name, leaf in states[0].items():
        if isinstance(leaf, Lazy):
            first = firsts.setdefault(id(leaf), name)
            if first != name:
                aliases[first] = (*aliases.get(first, ()), name)
            else:
                counts[name] = tally.uses(leaf.op, leaf.shape)
    dropped = [name for name, uses in counts.items() if not uses.once and not uses.more]
    if any(not counts[name].total for name in dropped):
        reached = {id(op) for op in mentioned(roots)}  # one without elements is dropped if no result mentions it
        dropped = [name for name in dropped if counts[name].total or id(states[0][name].op) not in reached]
    return Coverage(StateDict.trusted(counts), StateDict.trusted(aliases), tuple(dropped))


# -- the walk down to the source ---------------------------------------------------------------------------


class Way(NamedTuple):
    """An operation on the way from the source that does more than move elements, and the rest of the way."""

    op: Op
    after: Way | None


class End(NamedTuple):
    """Where a walk ends: an operation without inputs, the region needed of it, and the way from there."""

    op: Op
    region: Region
    way: Way | None


def trail(root: Lazy, region: Region) -> Iterator[End]:
    """Walk from a region of an expression to all that its elements are made of.

    Elements are followed one by one through what moves them, or computes each from those at the same place.
    Of any other operation, each input is followed once for each region that it needs.

    >>> from fdsd.algebra.apply import apply, defer_leaf
    >>> from fdsd.algebra.ops import Permute
    >>> from fdsd.data.region import Span
    >>> x = apply(Permute((1, 0)), defer_leaf(torch.ones(2, 3), "x"))
    >>> [(end.op, end.region.spans) for end in trail(x, Region((Span(2), Span(1))))]
    [(Origin('x'), (Span(start=1, pairs=()), Span(start=2, pairs=())))]
    """
    stack: list[tuple[Lazy, Region, torch.Tensor, Way | None]] = [(root, region, _memory(region), None)]
    seen: set[tuple[int, int, Region]] = set()
    while stack:
        node, region, out, way = stack.pop()
        op = node.op
        if not region.numel:
            continue
        if isinstance(op, Computing | Item):
            owner, _ = producer(node)
            if not owner.inputs:
                yield End(owner.op, region, way)
            way = Way(owner.op, way)
            needs = list(_needs(owner, region, seen))
            stack.extend([(x, need, _memory(need), way) for x, need in reversed(needs)])
        elif isinstance(op, Structural):
            way = Way(op, way) if op.rounds else way
            pulls = list(op.pull(node.inputs, region, out))
            stack.extend([(x, part, view, way) for x, part, view in reversed(pulls)])
        else:
            yield End(op, region, way)


def _needs(node: Lazy, region: Region, seen: set[tuple[int, int, Region]]) -> Iterator[tuple[Lazy, Region]]:
    op = node.op
    assert isinstance(op, Computing)
    needs: Sequence[Region]
    if op.whole or len(node.outputs) > 1:
        needs = [Region.whole(x.shape) for x in node.inputs]
    else:
        needs = op.needs([x.spec for x in node.inputs], region)
        if all(need == region for need in needs):
            yield from zip(node.inputs, needs, strict=True)
            return
    for i, (x, need) in enumerate(zip(node.inputs, needs, strict=True)):
        if (id(node), i, need) not in seen:
            seen.add((id(node), i, need))
            yield x, need


def _memory(region: Region) -> torch.Tensor:
    return torch.empty(region.shape, device="meta")


def mentioned(roots: Iterable[Lazy]) -> Iterator[Op]:
    """List the operations of expressions, each node's once."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            stack.extend(node.inputs)
            yield node.op


# -- adding up ----------------------------------------------------------------------------------------------


@frozen
class _Tally:
    """The uses found so far by the id of where expressions begin: of whole tensors, and of parts as grids."""

    whole: Counter[int] = field(factory=Counter[int])
    parts: dict[int, Counter[Grid]] = field(factory=dict[int, Counter[Grid]])

    def add(self, root: Lazy) -> None:
        """Count what one result uses."""
        if isinstance(root.op, Origin):
            self.whole[id(root.op)] += 1
            return
        (root,) = Graph([root]).roots  # equal functions of identical inputs are one, as they are in a run
        for end in trail(root, Region.whole(root.shape)):
            if not isinstance(end.op, Origin):
                continue
            key, numel = id(end.op), end.op.spec.numel
            for grid, times in grids(end.region):
                if math.prod([span.numel for span in grid]) == numel:
                    self.whole[key] += times
                else:
                    self.parts.setdefault(key, Counter())[grid] += times

    def uses(self, origin: Op, shape: tuple[int, ...]) -> Uses:
        """Give the counts of one tensor."""
        whole, parts = self.whole[id(origin)], self.parts.get(id(origin))
        if parts is None:
            size = math.prod(shape)
            return Uses(size if whole == 1 else 0, size if whole > 1 else 0, 0 if whole else size)
        found: Counter[int] = Counter()
        for times, elements in spread(parts, shape).items():
            found[times + whole] += elements
        return Uses(found[1], sum([n for times, n in found.items() if times > 1]), found[0])
