"""Rounds: which tensors are under way at the same time, and the messages of each round; remembered from run to run."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field, frozen

from fdsd.layout.program import Program, program_of, to_list
from fdsd.layout.structure import Limits
from fdsd.layout.wiring import Wiring

__all__ = ["PROGRAMS", "Round", "cut_rounds", "rounds_of"]

_ROUND = 64 << 20
"""The bytes of a round where no budget is given and values are computed."""


@frozen(eq=False)
class Round:
    """Tensors that are under way at the same time.

    Attributes:
        start: The first of them, by its place.
        stop: The place after the last of them.
        program: This rank's messages; instances count from ``start``.
        last: For each of them the last message that brings a part of it to this rank; -1 for none.
    """

    start: int
    stop: int
    program: Program
    last: list[int]


def cut_rounds(wirings: Sequence[Wiring], kinds: Sequence[int], budget: int | None) -> list[tuple[int, int]]:
    """Cut tensors into rounds, the same on every rank.

    Args:
        wirings: The plans.
        kinds: The plan of each tensor, in order.
        budget: The bytes that may be under way; no rank takes more than half of it in a round, but for one tensor.

    Returns:
        The start and the end of each round.

    >>> cut_rounds([], [], None)
    []
    """
    if budget is not None:
        most = max(1, budget // 2)
    elif all(wiring.expression.is_structural for wiring in wirings):
        return [(0, len(kinds))] if len(kinds) else []
    else:
        most = _ROUND
    loads = [wiring.load for wiring in wirings]
    made: list[tuple[int, int]] = []
    start, load = 0, 0
    for i, kind in enumerate(kinds):
        if i > start and load + loads[kind] > most:
            made.append((start, i))
            start, load = i, 0
        load += loads[kind]
    if len(kinds):
        made.append((start, len(kinds)))
    return made


def rounds_of(
    rank: int, wirings: Sequence[Wiring], kinds: array[int], budget: int | None, limits: Limits
) -> list[Round]:
    """Cut tensors into rounds and write this rank's messages of each."""
    made: list[Round] = []
    for start, stop in cut_rounds(wirings, kinds, budget):
        program = program_of(rank, wirings, kinds[start:stop], limits)
        made.append(Round(start, stop, program, _last(program, stop - start)))
    return made


def _last(program: Program, num: int) -> list[int]:
    last = [-1] * num
    bounds, sends, instances = (to_list(column) for column in (program.bounds, program.sends, program.instances))
    for message, is_send in enumerate(sends):
        if not is_send:
            for i in instances[bounds[message] : bounds[message + 1]]:
                last[i] = message
    return last


@define
class Programs:
    """Rounds by what they are rounds of; of the least recently used ones, some are forgotten.

    Args:
        most: How many are remembered.
        items: How many messages' items are remembered in all.
    """

    most: int = 8
    items: int = 1 << 20
    _made: OrderedDict[object, tuple[tuple[Wiring, ...], list[Round]]] = field(factory=OrderedDict, init=False)

    def get(
        self, rank: int, wirings: Sequence[Wiring], kinds: array[int], budget: int | None, limits: Limits
    ) -> list[Round]:
        """Give the rounds of a rank; see ``rounds_of``."""
        key = rank, tuple(map(id, wirings)), kinds.tobytes(), budget, limits
        found = self._made.get(key)
        if found is not None:
            self._made.move_to_end(key)
            return found[1]
        rounds = rounds_of(rank, wirings, kinds, budget, limits)
        self._made[key] = tuple(wirings), rounds  # the plans stay alive, so that no other one gets an id of theirs
        while len(self._made) > self.most or (self._made and self._num_items() > self.items):
            self._made.popitem(last=False)
        return rounds

    def _num_items(self) -> int:
        return sum(
            [len(each.program.instances) + len(each.last) for _, rounds in self._made.values() for each in rounds]
        )

    def clear(self) -> None:
        """Forget all rounds."""
        self._made.clear()


PROGRAMS = Programs()
