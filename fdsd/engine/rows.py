"""`Rows`: which parts of tensors lie in one row of bytes on this rank's side, so that they are moved byte for byte.

Of thousands of small parts, to make a view takes several times as long as to copy what it shows. So they are columns
of integers, worked out once for a program and the views of a rank. Memory and messages are unknown here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from ctypes import memmove
from itertools import compress
from typing import Any, NamedTuple

import torch
from attrs import frozen

from fdsd.engine.views import Part, Views
from fdsd.layout.program import Program, to_list

__all__ = ["Items", "Keeps", "Rows", "move_rows", "rows_of"]


class Items(NamedTuple):
    """What is sent and received, item by item.

    Attributes:
        slots: Where each is, by number: the source tensor that it is of if it is sent, else the result.
        firsts: Its first byte there; -1 if its bytes do not lie there as they travel.
        sizes: Its bytes.
    """

    slots: list[int]
    firsts: list[int]
    sizes: list[int]


class Keeps(NamedTuple):
    """What this rank wants and holds itself, and lies in rows on both sides.

    Attributes:
        tensors: The tensor of each part, ascending.
        slots: The source tensor that it is of.
        firsts: Its first byte there.
        outs: Its first byte in the result.
        sizes: Its bytes.
    """

    tensors: list[int]
    slots: list[int]
    firsts: list[int]
    outs: list[int]
    sizes: list[int]

    def where(self, are_chosen: Sequence[bool]) -> Keeps:
        """Give some of the parts."""
        return Keeps(*[list(compress(column, are_chosen)) for column in self])


@frozen(eq=False)
class Rows:
    """Which parts lie in rows of bytes: columns, of all items of a program and of all that this rank keeps.

    Attributes:
        width: The most source tensors of any tensor; source ``j`` of tensor ``i`` has the number ``i * width + j``.
        keeps: The kept parts of tensors of which nothing else is to be done.
        busy: The tensors of which more is to be done here than to move rows, ascending.
    """

    width: int
    keeps: Keeps
    busy: list[int]
    _items: torch.Tensor

    def items(self, start: int, stop: int) -> Items:
        """Give the items of a program from one place to another."""
        return Items(*[to_list(column[start:stop]) for column in self._items])

    def kept(self, start: int, stop: int) -> Keeps:
        """Give what is kept of the tensors from one place to another."""
        first, last = [bisect_left(self.keeps.tensors, i) for i in (start, stop)]
        return Keeps(*[column[first:last] for column in self.keeps])

    def to_finish(self, start: int, stop: int) -> list[int]:
        """Give those of some tensors of which more is to be done than to move rows."""
        first, last = [bisect_left(self.busy, i) for i in (start, stop)]
        return self.busy[first:last]


def move_rows(outs: Iterable[int], sources: Iterable[int], sizes: Iterable[int]) -> None:
    """Copy rows of bytes in ordinary memory, given by their addresses, without a step of Python for each."""
    deque(map(memmove, outs, sources, sizes), maxlen=0)


def rows_of(program: Program, views: Sequence[Views]) -> Rows:
    """Find which parts lie in rows.

    Args:
        program: The messages of this rank.
        views: For each tensor where its parts lie here.
    """
    distinct = list({id(one): one for one in views}.values())
    number = {id(one): i for i, one in enumerate(distinct)}
    which = [number[id(one)] for one in views]
    width = max([one.num_sources for one in distinct], default=1)
    items = _items_of(program, distinct, torch.tensor(which, dtype=torch.int64), width)
    kept = [_kept(one) for one in distinct]
    rows = [(i, i * width + part.origin, *at) for i, kind in enumerate(which) for part, *at in kept[kind] or ()]
    keeps = Keeps(*[list(column) for column in zip(*rows, strict=True)]) if rows else Keeps([], [], [], [], [])
    return Rows(width, keeps, [i for i, kind in enumerate(which) if kept[kind] is None], items)


def _kept(views: Views) -> list[tuple[Part, int, int, int]] | None:
    """Give the parts that this rank keeps, and where they begin and their bytes; ``None`` if that is not all."""
    recipe = views.recipe
    if recipe is None:
        return []
    rows = [(part, views.source_row(part), views.target_row(part), part.nbytes) for part in views.keeps]
    is_all = not (recipe.again or recipe.steps)
    return rows if is_all and all(row[0].is_short and row[1] >= 0 and row[2] >= 0 for row in rows) else None


def _items_of(program: Program, distinct: Sequence[Views], which: torch.Tensor, width: int) -> torch.Tensor:
    """Give the columns of all items: their slots, first bytes and sizes. Few of them differ but by their tensor."""
    instances, overlaps, parts = [each.long() for each in (program.instances, program.overlaps, program.parts)]
    if not len(instances):
        return torch.empty((3, 0), dtype=torch.int64)
    is_sent = torch.repeat_interleave(program.sends, program.bounds.diff())
    num_overlaps, num_parts = int(overlaps.max()) + 1, int(parts.max()) + 1
    untyped: Any = torch  # its types of unique() are not declared
    # one number for each, since to compare columns takes fifteen times as long
    keys = ((which[instances] * num_overlaps + overlaps) * num_parts + parts) * 2 + is_sent
    differing, place = untyped.unique(keys, return_inverse=True)
    rows: list[tuple[int, int, int]] = []
    for key in to_list(differing):
        rest, sent = divmod(key, 2)
        rest, number = divmod(rest, num_parts)
        kind, overlap = divmod(rest, num_overlaps)
        views = distinct[kind]
        part = views.part(overlap, number)
        rows.append((part.origin, views.source_row(part) if sent else views.target_row(part), part.nbytes))
    origins, firsts, nbytes = torch.tensor(rows, dtype=torch.int64)[place].T
    return torch.stack([torch.where(is_sent, instances * width + origins, instances), firsts, nbytes])
