"""`Structure`: who sends which boxes to whom, for all tensors of one shape that lie and are wanted in the same way.

Planned once for any number of tensors, whose names are unknown here; in what order messages travel is ``program``'s
business.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from attrs import define, field, frozen

from fdsd.data.errors import SpecMismatch, listing, plural
from fdsd.data.region import Region
from fdsd.layout.pieces import Box, Finder, Pieces, finder_of, intersect, subtract

__all__ = ["ALIGN", "LIMITS", "Limits", "Row", "Structure", "plan_structure"]

ALIGN = 16
"""Items of a packed message begin at multiples of this many bytes, so that they can be viewed in any dtype."""


@frozen
class Limits:
    """The sizes of messages, in bytes.

    Attributes:
        small: What is smaller travels packed together with others.
        bucket: No message is bigger, but for one of a single item that cannot be cut.
    """

    small: int = 1 << 20
    bucket: int = 1 << 24

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.small <= self.bucket or self.bucket < 1:
            raise SpecMismatch(f"Limits: 0 <= small <= bucket, and 1 <= bucket, not {self.small} and {self.bucket}.")


LIMITS = Limits()


class Row(NamedTuple):
    """A part of an overlap that one rank exchanges with another."""

    peer: int
    is_send: bool
    overlap: int
    part: int
    nbytes: int
    is_small: bool


@define(eq=False, slots=False, repr=False)
class Structure:
    """The plan of one structure.

    Attributes:
        ndim: The number of dims.
        itemsize: Bytes of one element on the way.
        limits: The sizes of messages.
        holders: The ranks that hold each piece.
        starts: Where each overlap of a piece and a wanted box begins, one after the other.
        sizes: The sizes of the overlaps.
        piece: The piece of each overlap.
        receives: For each rank the overlaps that others send it.
        keeps: For each rank the overlaps that it wants and holds itself.
    """

    ndim: int
    itemsize: int
    limits: Limits
    holders: tuple[tuple[int, ...], ...]
    starts: array[int] = field(factory=lambda: array("q"))
    sizes: array[int] = field(factory=lambda: array("q"))
    piece: array[int] = field(factory=lambda: array("q"))
    receives: dict[int, array[int]] = field(factory=dict)
    keeps: dict[int, array[int]] = field(factory=dict)

    def __repr__(self) -> str:
        sent = sum(map(len, self.receives.values()))
        return f"<Structure of {plural(len(self.holders), 'piece')}, {plural(len(self.piece), 'overlap')}, {sent} sent>"

    @cached_property
    def period(self) -> int:
        """After how many instances the senders are the same again."""
        return math.lcm(*{len(ranks) for ranks in self.holders})

    @cached_property
    def most_small(self) -> int:
        """The most bytes of small items that any rank receives for one instance."""
        small = self.limits.small
        sizes = [[self.nbytes(overlap) for overlap in overlaps] for overlaps in self.receives.values()]
        return max([sum([size for size in some if size < small]) for some in sizes], default=0)

    def box(self, overlap: int) -> Box:
        """Give an overlap's starts and sizes in the global tensor."""
        at = overlap * self.ndim
        return tuple(self.starts[at : at + self.ndim]), tuple(self.sizes[at : at + self.ndim])

    def nbytes(self, overlap: int) -> int:
        """Give the bytes of an overlap on the way."""
        at = overlap * self.ndim
        return math.prod(self.sizes[at : at + self.ndim]) * self.itemsize

    def parts(self, overlap: int) -> list[Region]:
        """Cut an overlap into the parts that travel by themselves."""
        whole = Region.box(*self.box(overlap))
        if self.nbytes(overlap) <= self.limits.bucket:
            return [whole]
        return [part for part, _ in whole.chunks(self.limits.bucket // self.itemsize)]

    def sender(self, overlap: int, instance: int, target: int) -> int:
        """Choose who sends an overlap: the holders take turns over instances and destinations.

        Args:
            overlap: The overlap.
            instance: The place of the tensor among all that are transferred.
            target: The rank that wants it, and does not hold it.
        """
        ranks = self.holders[self.piece[overlap]]
        return ranks[(instance + target) % len(ranks)]

    @cached_property
    def _sends(self) -> list[dict[int, list[tuple[int, int]]]]:
        """For each piece, by the destination modulo the number of holders: destinations and overlaps."""
        made: list[dict[int, list[tuple[int, int]]]] = [{} for _ in self.holders]
        for target, overlaps in self.receives.items():
            for overlap in overlaps:
                piece = self.piece[overlap]
                made[piece].setdefault(target % len(self.holders[piece]), []).append((target, overlap))
        return made

    @cached_property
    def _held(self) -> dict[int, list[tuple[int, int]]]:
        """For each rank the pieces that others may need of it, and its place among their holders."""
        made: dict[int, list[tuple[int, int]]] = {}
        for piece, (ranks, sends) in enumerate(zip(self.holders, self._sends, strict=True)):
            for place, rank in enumerate(ranks if sends else ()):
                made.setdefault(rank, []).append((piece, place))
        return made

    def _exchanges(self, rank: int, instance: int) -> Iterator[tuple[int, int, int]]:
        for overlap in self.receives.get(rank, ()):
            yield rank, self.sender(overlap, instance, rank), overlap
        for piece, place in self._held.get(rank, ()):
            turn = (place - instance) % len(self.holders[piece])
            for target, overlap in self._sends[piece].get(turn, ()):
                yield target, rank, overlap

    def rows(self, rank: int, instance: int) -> tuple[Row, ...]:
        """Give what a rank sends and receives for one instance, in the total order: chunk, destination, source.

        Args:
            rank: The rank.
            instance: The place of the tensor among all that are transferred.

        Law: what a rank sends to another is, item for item, what that one receives from it.
        """
        exchanges = sorted(self._exchanges(rank, instance))
        if not exchanges:
            return ()
        ordered: list[tuple[int, int, int, int, int, int]] = []
        for (target, source), some in itertools.groupby(exchanges, key=lambda row: row[:2]):
            items = [(overlap, part, size) for _, _, overlap in some for part, size in self._sizes(overlap)]
            ordered += [(chunk, target, source, *item) for chunk, item in enumerate(items)]
        ordered.sort()
        small = self.limits.small
        return tuple(
            [
                Row(target if source == rank else source, source == rank, overlap, part, size, size < small)
                for _, target, source, overlap, part, size in ordered
            ]
        )

    def _sizes(self, overlap: int) -> list[tuple[int, int]]:
        nbytes = self.nbytes(overlap)
        if nbytes <= self.limits.bucket:
            return [(0, nbytes)]
        return [(i, part.numel * self.itemsize) for i, part in enumerate(self.parts(overlap))]

    def _append(self, box: Box, piece: int) -> int:
        self.starts.extend(box[0])
        self.sizes.extend(box[1])
        self.piece.append(piece)
        return len(self.piece) - 1

    def _assign(self, rank: int, overlap: int) -> None:
        keeps = rank in self.holders[self.piece[overlap]]
        (self.keeps if keeps else self.receives).setdefault(rank, array("q")).append(overlap)


def plan_structure(sources: Pieces, wants: Pieces, *, itemsize: int, limits: Limits = LIMITS) -> Structure:
    """Plan who sends what to whom: a pure function, so that every rank makes the same plan.

    A rank that holds what it wants gets it from itself. Each other overlap of a wanted box and a piece travels once to
    each rank that wants it.

    Args:
        sources: The pieces of a tensor, with all ranks that hold each. They may overlap each other.
        wants: The boxes that are wanted, with the ranks that want each.
        itemsize: Bytes of one element on the way.
        limits: The sizes of messages.

    Raises:
        SpecMismatch: Some wanted elements are held by no rank.

    >>> halves = Pieces.of(1, [(((0,), (2,)), [0]), (((2,), (2,)), [1])])
    >>> plan = plan_structure(halves, Pieces.whole((4,), [0]), itemsize=4)
    >>> plan.rows(0, 0)
    (Row(peer=1, is_send=False, overlap=1, part=0, nbytes=8, is_small=True),)
    >>> plan.keeps[0].tolist()
    [0]
    """
    plan = Structure(sources.ndim, itemsize, limits, sources.ranks)
    finder = finder_of(sources)
    holes: list[str] = []
    for box, ranks in wants:
        missing = (_plan_disjoint if finder.is_disjoint else _plan_overlapping)(plan, sources, finder, box, ranks)
        if missing:
            told = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listing(ranks)}"
            holes.append(f"{plural(missing, 'element')} of the box {box} that {told} want")
    if holes:
        raise SpecMismatch(f"No rank holds {listing(holes)}." if len(holes) > 1 else f"No rank holds {holes[0]}.")
    return plan


def _plan_disjoint(plan: Structure, sources: Pieces, finder: Finder, box: Box, ranks: tuple[int, ...]) -> int:
    """Find the overlaps of one box, the same for all ranks that want it; give the number of elements not found."""
    missing = math.prod(box[1])
    for piece in finder.find(box):
        shared = intersect(sources.box(piece), box)
        assert shared is not None
        missing -= math.prod(shared[1])
        overlap = plan._append(shared, piece)  # pyright: ignore[reportPrivateUsage]  # its own planner
        holders = frozenset(plan.holders[piece])
        for rank in ranks:
            (plan.keeps if rank in holders else plan.receives).setdefault(rank, array("q")).append(overlap)
    return missing


def _plan_overlapping(plan: Structure, sources: Pieces, finder: Finder, box: Box, ranks: tuple[int, ...]) -> int:
    """The same where pieces overlap each other: a rank takes what it holds itself, then the rest from others."""
    near = finder.find(box)
    known: dict[tuple[int, Box], int] = {}
    missing = 0
    for rank in ranks:
        left = [box]
        for piece in sorted(near, key=lambda i: (rank not in plan.holders[i], i)):
            rest: list[Box] = []
            for one in left:
                shared = intersect(sources.box(piece), one)
                if shared is None:
                    rest.append(one)
                    continue
                rest += subtract(one, shared)
                key = piece, shared
                if key not in known:
                    known[key] = plan._append(shared, piece)  # pyright: ignore[reportPrivateUsage]  # its own planner
                plan._assign(rank, known[key])  # pyright: ignore[reportPrivateUsage]
            left = rest
        missing = max(missing, sum([math.prod(one[1]) for one in left]))
    return missing
