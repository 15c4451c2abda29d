"""Which elements of a source a result is made of, and how often, counted exactly.

The walk from a region of an expression down to its source elements lives here as well (``trail``), since ``why``
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
from fdsd.data.errors import FdsdError, Unsupported, plural
from fdsd.data.model import ModelSpec
from fdsd.data.naming import fold
from fdsd.data.optim import OptimState
from fdsd.data.region import Region
from fdsd.data.statedict import StateDict
from fdsd.data.train import TrainState
from fdsd.pipeline.check import abstract
from fdsd.pipeline.grids import Grid, grids, spread
from fdsd.pipeline.planning import deferred, expressions
from fdsd.pipeline.run import note_step, run_step
from fdsd.pipeline.step import Step

__all__ = ["Coverage", "End", "Uses", "Way", "coverage", "lazily", "trail"]

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
        total = self.total
        lines = [
            f"{plural(len(self.counts), 'tensor')}, {plural(total.total, 'element')}: {total.once:,} used once, "
            f"{total.more:,} more than once, {total.never:,} never"
        ]
        gone = set(self.dropped)
        left = {name: uses for name, uses in self.counts.items() if name not in gone}
        for title, amounts in (
            ("used once", {name: (uses.once, uses.total) for name, uses in left.items() if uses.once}),
            ("used more than once", {name: (uses.more, uses.total) for name, uses in left.items() if uses.more}),
            ("never used", {name: (uses.never, uses.total) for name, uses in left.items() if uses.never}),
            ("dropped", {name: (self.counts[name].total,) * 2 for name in self.dropped}),
        ):
            lines.extend(_table(title, amounts))
        for name, others in list(self.aliases.items())[:10]:
            lines.append(f"tied, counted once: {name}, {', '.join(others)}")
        if len(self.aliases) > 10:
            lines.append(f"and {len(self.aliases) - 10} more ties")
        return "\n".join(lines)

    __repr__ = __str__


def _table(title: str, amounts: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Word one class of tensors, names folded where the amounts are equal: ten lines at most, the rest counted."""
    if not amounts:
        return
    yield f"{title}:"
    folds = fold(amounts, amounts.__getitem__)
    for found in folds[:10]:
        part, whole = amounts[found.names[0]]
        text = f"all {whole:,}" if part == whole else f"{part:,} of {whole:,}"
        yield f"  {found.text}: {text}" + (" each" if len(found.names) > 1 else "")
    if rest := sum([len(found.names) for found in folds[10:]]):
        yield f"  and {rest:,} more"


def coverage(steps: Iterable[Step], source: Any) -> Coverage:
    """Count for each element of the source how often the result uses it.

    Uses are of elements by places, not reads by a run: each result tensor is looked at alone (a tied one once), and
    its uses are added up.

    * A place of a result that is moved, cast or computed place by place from an element is one use of it; so
      ``concat`` of a tensor with itself, and ``index_select`` with repeats, use elements twice.
    * A function of whole tensors uses every element that it is given once for each result that depends on it,
      however much of its value arrives there, and in how many places.
    * A comparison of values (of tied or joined tensors that must agree) uses all that it compares.

    Args:
        steps: The steps of a pipeline.
        source: The state to rewrite, or its specs; of a ``TrainState``, the model. Objects that are no tensors are
            not counted.

    Law: ``uses.total`` is the number of elements; a pipeline of renames and other bijections is an exact cover.

    >>> coverage((), {"a": torch.ones(2, 3), "b": torch.ones(4)}).is_exact_cover
    True
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
                counts[name] = tally.uses(name, leaf.shape)
    dropped = [name for name, uses in counts.items() if not uses.once and not uses.more]
    if any(not counts[name].total for name in dropped):  # tensors without elements are dropped if nothing needs them
        reached = _reached(roots)
        dropped = [name for name in dropped if counts[name].total or name not in reached]
    return Coverage(StateDict.trusted(counts), StateDict.trusted(aliases), tuple(dropped))


def lazily(steps: Iterable[Step], source: Any) -> list[StateDict[Any]]:
    """Run steps on the specs of a source, made lazy: the source's own names are where all expressions begin.

    Returns:
        The source, and the state after each step.

    Raises:
        Unsupported: The source or a state on the way is no state dict.
    """
    if not isinstance(source, Mapping | TrainState | OptimState | ModelSpec):
        raise Unsupported(
            f"{type(source).__name__} is no state. Give a mapping of names to tensors or specs; for a module, its "
            "state_dict()."
        )
    every = tuple(steps)
    given, state = deferred((), abstract(source))
    states = [given]
    for number, step in enumerate(every, start=1):
        try:
            state = run_step(step, state)
        except FdsdError as error:
            note_step(error, number, len(every), step)
            raise
        if not isinstance(state, StateDict):
            raise Unsupported(
                f"{step.verb} gives {type(state).__name__}: where elements come from is known for state dicts only. "
                "Ask about the steps before it."
            )
        states.append(state)
    return states


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

    Elements are followed one by one through what moves them or computes each from those at the same place. Of any
    other operation each input is followed once for each region that it needs.

    >>> from fdsd.algebra.apply import apply, defer_leaf
    >>> from fdsd.algebra.ops import Permute
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
            way = Way(owner.op, way)
            if not owner.inputs:
                yield End(owner.op, region, way)
            stack.extend(
                reversed([(x, need, _memory(need), way) for x, need in _needs(owner, region, seen)])
            )
        elif isinstance(op, Structural):
            way = Way(op, way) if op.rounds else way
            stack.extend(reversed([(x, part, view, way) for x, part, view in op.pull(node.inputs, region, out)]))
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


def _reached(roots: Iterable[Lazy]) -> set[str]:
    """List the source tensors that expressions mention."""
    found: set[str] = set()
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            stack.extend(node.inputs)
            if isinstance(node.op, Origin):
                found.add(node.op.fqn)
    return found


# -- adding up ----------------------------------------------------------------------------------------------


@frozen
class _Tally:
    """The uses found so far: whole tensors, and parts of tensors as grids, with how often."""

    whole: Counter[str] = field(factory=Counter[str])
    parts: dict[str, Counter[Grid]] = field(factory=dict[str, "Counter[Grid]"])

    def add(self, root: Lazy) -> None:
        """Count what one result uses."""
        if isinstance(root.op, Origin):
            self.whole[root.op.fqn] += 1
            return
        (root,) = Graph([root]).roots  # a run makes equal operations on identical inputs one node; so do the counts
        for end in trail(root, Region.whole(root.shape)):
            if not isinstance(end.op, Origin):
                continue
            fqn, numel = end.op.fqn, end.op.spec.numel
            for grid, times in grids(end.region):
                if math.prod([span.numel for span in grid]) == numel:
                    self.whole[fqn] += times
                else:
                    self.parts.setdefault(fqn, Counter())[grid] += times

    def uses(self, fqn: str, shape: tuple[int, ...]) -> Uses:
        """Give the counts of one tensor."""
        found: Counter[int] = Counter()
        for times, elements in spread(self.parts.get(fqn, {}), shape).items():
            found[times + self.whole[fqn]] += elements
        return Uses(found[1], sum([n for times, n in found.items() if times > 1]), found[0])
