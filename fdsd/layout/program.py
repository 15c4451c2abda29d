"""`Program`: the messages of one rank, in the one total order that all ranks share.

Small items of one pair of ranks travel packed, in the place of the first of them. Columns of integers, made without a
loop over items, since one rank that gathers a big model receives millions. Nothing is sent here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from attrs import frozen

from fdsd.data.errors import plural
from fdsd.layout.structure import ALIGN, Limits, Row, Structure

__all__ = ["Item", "Message", "Program", "program_of"]


class Item(NamedTuple):
    """A part of an overlap, and where it lies in its message, in bytes."""

    instance: int
    overlap: int
    part: int
    offset: int


class Message(NamedTuple):
    """What one rank sends to another at once."""

    peer: int
    is_send: bool
    nbytes: int
    items: tuple[Item, ...]


@frozen(eq=False, repr=False)
class Program:
    """The messages of one rank, in order.

    Law: any number of ranks that each run down their program within any window, even of 1, come to its end, since
    the messages of all ranks are in one total order.

    Attributes:
        rank: Whose messages they are.
        peers: The other rank of each message.
        sends: Whether each message is sent, or received.
        nbytes: The size of each message.
        bounds: The items of message ``i`` are ``bounds[i]`` to ``bounds[i + 1]``.
        instances: The tensor of each item, by its place.
        overlaps: The overlap of each item, within the plan of its structure.
        parts: The part of the overlap, if it travels in several.
        offsets: Where each item lies in its message, in bytes.
    """

    rank: int
    peers: torch.Tensor
    sends: torch.Tensor
    nbytes: torch.Tensor
    bounds: torch.Tensor
    instances: torch.Tensor
    overlaps: torch.Tensor
    parts: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.peers)

    def __getitem__(self, i: int) -> Message:
        if i < 0 or i >= len(self):
            raise IndexError(f"the program of rank {self.rank} has {plural(len(self), 'message')}, and no {i}.")
        first, last = int(self.bounds[i]), int(self.bounds[i + 1])
        columns = self.instances, self.overlaps, self.parts, self.offsets
        cells = [to_list(column[first:last]) for column in columns]
        items = tuple([Item(*row) for row in zip(*cells, strict=True)])
        return Message(int(self.peers[i]), bool(self.sends[i]), int(self.nbytes[i]), items)

    def part(self, start: int, stop: int) -> Program:
        """Give some of the messages, which come one after the other; the columns are views.

        Args:
            start: The first one.
            stop: The one after the last one.
        """
        bounds = self.bounds[start : stop + 1]
        messages, items = slice(start, stop), slice(int(bounds[0]), int(bounds[-1]))
        return Program(
            self.rank,
            self.peers[messages],
            self.sends[messages],
            self.nbytes[messages],
            bounds - bounds[0],
            *[column[items] for column in (self.instances, self.overlaps, self.parts, self.offsets)],
        )

    def arrivals(self, num: int) -> torch.Tensor:
        """Give for each of ``num`` instances the last message that brings a part of it; -1 if none does.

        >>> from fdsd.layout.pieces import Pieces
        >>> from fdsd.layout.structure import LIMITS, plan_structure
        >>> plan = plan_structure(Pieces.whole((2,), [0]), Pieces.whole((2,), [1]), itemsize=4)
        >>> [program_of(rank, [plan], [0, 0], LIMITS).arrivals(2).tolist() for rank in range(2)]
        [[-1, -1], [0, 0]]
        """
        message = torch.repeat_interleave(torch.arange(len(self)), self.bounds.diff())
        received = ~self.sends[message]
        last = torch.full((num,), -1, dtype=torch.int64)
        return last.scatter_reduce_(0, self.instances[received].long(), message[received], "amax")

    def __repr__(self) -> str:
        return f"<Program of rank {self.rank}: {plural(len(self), 'message')}, {plural(len(self.instances), 'item')}>"


def to_list(column: torch.Tensor) -> list[int]:
    """Give a column as integers.

    >>> to_list(torch.tensor([3, 1]))
    [3, 1]
    """
    untyped: Any = column
    return list(untyped.tolist())


class _Expanded(NamedTuple):
    """All items of one rank in the total order; columns."""

    instances: torch.Tensor
    pairs: torch.Tensor  # twice the peer, and one more for what is sent
    overlaps: torch.Tensor
    parts: torch.Tensor
    nbytes: torch.Tensor
    is_small: torch.Tensor


def program_of(
    rank: int,
    structures: Sequence[Structure],
    kinds: Sequence[int],
    limits: Limits,
    lookahead: int | None = None,
    rounds: Sequence[int] | None = None,
) -> Program:
    """Write the messages of one rank.

    Args:
        rank: The rank.
        structures: The plans.
        kinds: The structure of each instance, in the order of instances.
        limits: The sizes of messages.
        lookahead: How many bytes of later instances a rank may receive packed with earlier ones, about; no limit
            if left out. What is streamed needs one, or the packed items of many ranks pile up.
        rounds: The round of each instance, ascending: no message holds items of two. Instead of ``lookahead``.

    >>> from fdsd.layout.pieces import Pieces
    >>> from fdsd.layout.structure import LIMITS, plan_structure
    >>> plan = plan_structure(Pieces.whole((2,), [0]), Pieces.whole((2,), [1]), itemsize=4)
    >>> program_of(0, [plan], [0, 0, 0], LIMITS)[0].nbytes
    40
    """
    items = _expand(rank, structures, kinds)
    if lookahead is not None:
        rounds = _rounds(structures, kinds, lookahead)
    leaders, offsets = _pack(items, None if rounds is None else torch.tensor(rounds, dtype=torch.int64), limits)
    is_head = leaders == torch.arange(len(leaders))
    heads = is_head.nonzero().view(-1)
    messages = (is_head.cumsum(0) - 1)[leaders]
    order = torch.argsort(messages, stable=True)
    counts = torch.bincount(messages, minlength=len(heads))
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    tails = order[bounds[1:] - 1]
    pairs = items.pairs[heads].long()
    columns = items.instances, items.overlaps, items.parts, offsets
    return Program(
        rank,
        pairs // 2,
        pairs % 2 == 1,
        offsets[tails] + items.nbytes[tails].long(),
        bounds,
        *[column[order] for column in columns],
    )


def _expand(rank: int, structures: Sequence[Structure], kinds: Sequence[int]) -> _Expanded:
    """List the items of all instances, from the rows of those that differ."""
    known: dict[tuple[int, int], int] = {}
    rows: list[Row] = []
    starts: list[int] = []
    counts: list[int] = []
    which: list[int] = []
    for instance, kind in enumerate(kinds):
        key = kind, instance % structures[kind].period
        place = known.get(key)
        if place is None:
            place = known[key] = len(known)
            some = structures[kind].rows(rank, instance)
            starts.append(len(rows))
            counts.append(len(some))
            rows += some
        which.append(place)
    places = torch.tensor(which, dtype=torch.int64)
    num = torch.tensor(counts, dtype=torch.int64)[places]
    before = num.cumsum(0) - num
    instances = torch.repeat_interleave(torch.arange(len(which), dtype=torch.int32), num)
    at = torch.repeat_interleave(torch.tensor(starts, dtype=torch.int64)[places] - before, num)
    at += torch.arange(len(at))
    table = torch.tensor(
        [(2 * row.peer + row.is_send, row.overlap, row.part, row.nbytes, row.is_small) for row in rows],
        dtype=torch.int64,
    ).reshape(-1, 5)
    narrow = [table[:, i].to(torch.int32) for i in range(3)]
    return _Expanded(instances, *[column[at] for column in (*narrow, table[:, 3], table[:, 4].bool())])


def _rounds(structures: Sequence[Structure], kinds: Sequence[int], lookahead: int) -> list[int]:
    """Give the round of each instance: no message holds items of two."""
    made: list[int] = []
    ahead, number = 0, 0
    for kind in kinds:
        ahead += structures[kind].most_small
        if ahead > lookahead:
            ahead, number = structures[kind].most_small, number + 1
        made.append(number)
    return made


def _pack(items: _Expanded, rounds: torch.Tensor | None, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
    """Give for each item the first item of its message, and where it lies in that message.

    The small items of one pair (and round) lie one after the other, each aligned; the message of an item is told by
    where it begins, such that none is bigger than a bucket.
    """
    leaders = torch.arange(len(items.pairs))
    offsets = torch.zeros(len(items.pairs), dtype=torch.int64)
    small = items.is_small.nonzero().view(-1)
    if not len(small):
        return leaders, offsets
    group = items.pairs[small].long()
    if rounds is not None:
        group += rounds[items.instances[small].long()] * (int(items.pairs.max()) + 1)
    order = torch.argsort(group, stable=True)
    group, small = group[order], small[order]
    sizes = (items.nbytes[small] + ALIGN - 1) // ALIGN * ALIGN
    begins = sizes.cumsum(0) - sizes
    is_first = torch.ones(len(group), dtype=torch.bool)
    is_first[1:] = group[1:] != group[:-1]
    begins -= _carried(begins, is_first)
    bucket = begins // max(ALIGN, limits.bucket - limits.small)
    is_first[1:] |= bucket[1:] != bucket[:-1]
    offsets[small] = begins - _carried(begins, is_first)
    leaders[small] = _carried(small, is_first)
    return leaders, offsets


def _carried(values: torch.Tensor, is_first: torch.Tensor) -> torch.Tensor:
    """Give each place the value of the last place that is marked, itself included."""
    return values[is_first][is_first.cumsum(0) - 1]
