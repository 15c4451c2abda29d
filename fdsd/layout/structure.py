"""`Structure`: who sends what to whom, for all tensors that lie and are wanted in the same way; and that of boxes.

Planned once for any number of tensors, whose names are unknown here; in what order messages travel is ``program``'s
business, and expressions are ``wiring``'s.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from attrs import define, field, frozen

from fdsd.data.errors import SpecMismatch, listing, plural
from fdsd.data.region import Region
from fdsd.layout.pieces import Box, Finder, Pieces, finder_of, intersect, subtract

__all__ = ["ALIGN", "LIMITS", "Boxes", "Limits", "Row", "Structure", "plan_structure", "wire_dtype"]

ALIGN = 16
"""Items of a packed message begin at multiples of this many bytes, so that they can be viewed in any dtype."""


def wire_dtype(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """Choose the dtype in which elements travel: the narrower one; the sender casts, or the receiver.

    >>> wire_dtype(torch.float32, torch.bfloat16), wire_dtype(torch.bfloat16, torch.float32)
    (torch.bfloat16, torch.bfloat16)
    """
    return target if target.itemsize < source.itemsize else source


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


@define(eq=False, slots=False, repr=False, kw_only=True)
class Structure:
    """Who sends what to whom, for all tensors of one structure.

    Attributes:
        limits: The sizes of messages.
        holders: The ranks that hold each piece.
        piece: The piece that each overlap is a part of.
        receives: For each rank the overlaps that others send it.
        keeps: For each rank the overlaps that it wants and holds itself.
    """

    limits: Limits
    holders: tuple[tuple[int, ...], ...]
    piece: array[int] = field(factory=lambda: array("q"))
    receives: dict[int, array[int]] = field(factory=dict)
    keeps: dict[int, array[int]] = field(factory=dict)

    def __repr__(self) -> str:
        sent = sum(map(len, self.receives.values()))
        kind = type(self).__name__
        return f"<{kind} of {plural(len(self.holders), 'piece')}, {plural(len(self.piece), 'overlap')}, {sent} sent>"

    def nbytes(self, overlap: int) -> int:
        """Give the bytes of an overlap on the way."""
        raise NotImplementedError

    def part_sizes(self, overlap: int) -> list[int]:
        """Give the bytes of the parts of an overlap that is bigger than a message."""
        raise NotImplementedError

    @cached_property
    def period(self) -> int:
        """After how many instances the senders are the same again."""
        return math.lcm(*{len(ranks) for ranks, sends in zip(self.holders, self._sends, strict=True) if sends})

    @cached_property
    def most_small(self) -> int:
        """The most bytes of small items that any rank receives for one instance."""
        small = self.limits.small
        sizes = [[self.nbytes(overlap) for overlap in overlaps] for overlaps in self.receives.values()]
        return max([sum([size for size in some if size < small]) for some in sizes], default=0)

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
        return [(0, nbytes)] if nbytes <= self.limits.bucket else list(enumerate(self.part_sizes(overlap)))

    def assign(self, ranks: Iterable[int], overlap: int) -> None:
        """Have some ranks want an overlap: those that hold it keep it, the others receive it."""
        holders = frozenset(self.holders[self.piece[overlap]])
        for rank in ranks:
            (self.keeps if rank in holders else self.receives).setdefault(rank, array("q")).append(overlap)


@define(eq=False, slots=False, repr=False, kw_only=True)
class Boxes(Structure):
    """The structure of tensors of one shape that lie, and are wanted, as boxes.

    Attributes:
        ndim: The number of dims.
        itemsize: Bytes of one element on the way.
        starts: Where each overlap of a piece and a wanted box begins, one after the other.
        sizes: The sizes of the overlaps.
    """

    ndim: int
    itemsize: int
    starts: array[int] = field(factory=lambda: array("q"))
    sizes: array[int] = field(factory=lambda: array("q"))

    def box(self, overlap: int) -> Box:
        """Give an overlap's starts and sizes in the global tensor."""
        at = overlap * self.ndim
        return tuple(self.starts[at : at + self.ndim]), tuple(self.sizes[at : at + self.ndim])

    def nbytes(self, overlap: int) -> int:
        at = overlap * self.ndim
        return math.prod(self.sizes[at : at + self.ndim]) * self.itemsize

    def parts(self, overlap: int) -> list[Region]:
        """Cut an overlap into the parts that travel by themselves."""
        whole = Region.box(*self.box(overlap))
        if self.nbytes(overlap) <= self.limits.bucket:
            return [whole]
        return [part for part, _ in whole.chunks(self.limits.bucket // self.itemsize)]

    def part_sizes(self, overlap: int) -> list[int]:
        return [part.numel * self.itemsize for part in self.parts(overlap)]

    def append(self, box: Box, piece: int) -> int:
        """Add an overlap, and give its number."""
        self.starts.extend(box[0])
        self.sizes.extend(box[1])
        self.piece.append(piece)
        return len(self.piece) - 1


def plan_structure(sources: Pieces, wants: Pieces, *, itemsize: int, limits: Limits = LIMITS) -> Boxes:
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
    plan = Boxes(ndim=sources.ndim, itemsize=itemsize, limits=limits, holders=sources.ranks)
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


def _plan_disjoint(plan: Boxes, sources: Pieces, finder: Finder, box: Box, ranks: tuple[int, ...]) -> int:
    """Find the overlaps of one box, the same for all ranks that want it; give the number of elements not found."""
    missing = math.prod(box[1])
    for piece in finder.find(box):
        shared = intersect(sources.box(piece), box)
        assert shared is not None
        missing -= math.prod(shared[1])
        overlap = plan.append(shared, piece)
        plan.assign(ranks, overlap)
    return missing


def _plan_overlapping(plan: Boxes, sources: Pieces, finder: Finder, box: Box, ranks: tuple[int, ...]) -> int:
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
                    known[key] = plan.append(shared, piece)
                plan.assign((rank,), known[key])
            left = rest
        missing = max(missing, sum([math.prod(one[1]) for one in left]))
    return missing
