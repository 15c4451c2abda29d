"""Rounds: which tensors are under way at the same time, and the messages of each round; remembered from run to run."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import torch
from attrs import Factory, define, field

from fdsd.engine.recent import Recent
from fdsd.engine.rows import Rows, rows_of
from fdsd.engine.views import Views
from fdsd.layout.program import Program, program_of, to_list
from fdsd.layout.structure import Limits
from fdsd.layout.wiring import Wiring

__all__ = ["PROGRAMS", "Programs", "Rounds", "cut_rounds", "rounds_of"]

_ROUND = 64 << 20
"""The bytes of a round where no budget is given and values are computed."""


@define(eq=False)
class Rounds:
    """Tensors in rounds, and this rank's messages.

    Attributes:
        program: The messages of all rounds.
        arrivals: For each tensor the last message that brings a part of it to this rank; -1 for none.
        tensors: The first tensor of each round, and at last their number.
        messages: The first message of each round, and at last their number.
    """

    program: Program
    arrivals: torch.Tensor
    tensors: list[int]
    messages: list[int]
    _rows: tuple[bytes, Sequence[Views], Rows] | None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self.tensors) - 1

    def rows(self, views: Sequence[Views]) -> Rows:
        """Give which parts lie in rows of bytes here; remembered with the views that they were found by.

        Args:
            views: For each tensor where its parts lie on this rank.
        """
        key = array("q", map(id, views)).tobytes()
        known = self._rows
        if known is None or known[0] != key:
            known = self._rows = key, views, rows_of(self.program, views)
        return known[2]


def cut_rounds(wirings: Sequence[Wiring], kinds: Sequence[int], budget: int | None) -> list[int]:
    """Cut tensors into rounds, the same on every rank.

    Args:
        wirings: The plans.
        kinds: The plan of each tensor, in order.
        budget: The bytes that may be under way; no rank takes more than half of it in a round, but for one tensor.

    Returns:
        The first tensor of each round, and at last the number of tensors.

    >>> cut_rounds([], [], None)
    [0]
    """
    if budget is not None:
        most = max(1, budget // 2)
    elif all(wiring.expression.is_structural for wiring in wirings):
        return [0, len(kinds)] if len(kinds) else [0]
    else:
        most = _ROUND
    loads = [wiring.load for wiring in wirings]
    made: list[int] = [0]
    load = 0
    for i, kind in enumerate(kinds):
        if i > made[-1] and load + loads[kind] > most:
            made.append(i)
            load = 0
        load += loads[kind]
    return [*made, len(kinds)] if len(kinds) else made


def rounds_of(rank: int, wirings: Sequence[Wiring], kinds: Sequence[int], budget: int | None, limits: Limits) -> Rounds:
    """Cut tensors into rounds and write this rank's messages.

    Args:
        rank: The rank.
        wirings: The plans.
        kinds: The plan of each tensor, in order.
        budget: The bytes that may be under way.
        limits: The sizes of messages.
    """
    tensors = cut_rounds(wirings, kinds, budget)
    sizes = [stop - start for start, stop in itertools.pairwise(tensors)]
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    program = program_of(rank, wirings, kinds, limits, rounds=numbers)
    heads = program.instances[program.bounds[:-1]]
    messages = torch.searchsorted(heads, torch.tensor(tensors, dtype=heads.dtype))
    return Rounds(program, program.arrivals(len(kinds)), tensors, to_list(messages))


@define
class Programs:
    """Rounds by what they are rounds of; of the least recently used ones, some are forgotten.

    Args:
        most: How many are remembered.
        items: How many messages' items are remembered in all.
    """

    most: int = 8
    items: int = 1 << 20
    _recent: Recent[object, tuple[tuple[Wiring, ...], Rounds]] = field(
        default=Factory(lambda self: Recent(self.most, _num_items, self.items), takes_self=True), init=False
    )

    def get(
        self, rank: int, wirings: Sequence[Wiring], kinds: array[int], budget: int | None, limits: Limits
    ) -> Rounds:
        """Give the rounds of a rank; see ``rounds_of``."""
        key = rank, tuple(map(id, wirings)), kinds.tobytes(), budget, limits
        # the plans stay alive, so that no other one gets an id of theirs
        return self._recent.get(key, lambda: (tuple(wirings), rounds_of(rank, wirings, kinds, budget, limits)))[1]

    def clear(self) -> None:
        """Forget all rounds."""
        self._recent.clear()


def _num_items(made: tuple[object, Rounds]) -> int:
    return len(made[1].program.instances) + len(made[1].arrivals)


PROGRAMS = Programs()
