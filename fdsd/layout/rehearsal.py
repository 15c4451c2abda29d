"""A rehearsal of a plan in one process: every rank runs down its program over tensors in memory.

Messages meet as they would between processes, in any interleaving and within any window: the check of a plan before
an edge runs it. No process group is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from random import Random

import torch
from attrs import define, field, frozen

from fdsd.algebra.dtypes import copy_elements, movable
from fdsd.data.errors import RankDisagreement, SpecMismatch, Unsupported, listing
from fdsd.data.region import Region
from fdsd.layout.layout import Layout
from fdsd.layout.local import view_in
from fdsd.layout.program import Message, Program
from fdsd.layout.transfer import Transfers

__all__ = ["Access", "rehearse", "run_programs"]

Access = Callable[[int, str, Region], torch.Tensor]
"""Gives the memory of a region of a tensor on a rank."""


@frozen
class _Data:
    """Packs items into the bytes of a message, and takes them out."""

    plan: Transfers
    source: Access
    target: Access

    def _region(self, instance: int, overlap: int, part: int) -> Region:
        return self.plan.structures[self.plan.kinds[instance]].parts(overlap)[part]

    def pack(self, rank: int, message: Message) -> torch.Tensor:
        made = torch.zeros(message.nbytes, dtype=torch.uint8)
        for instance, overlap, part, offset in message.items:
            region = self._region(instance, overlap, part)
            wire = self.plan.moves[self.plan.kinds[instance]].wire
            buffer = torch.empty(region.shape, dtype=wire)
            copy_elements(self.source(rank, self.plan.names[instance], region), buffer)
            raw = movable(buffer).reshape(-1).view(torch.uint8)
            made[offset : offset + raw.numel()] = raw
        return made

    def unpack(self, rank: int, message: Message, packed: torch.Tensor) -> None:
        for instance, overlap, part, offset in message.items:
            region = self._region(instance, overlap, part)
            wire = self.plan.moves[self.plan.kinds[instance]].wire
            raw = packed[offset : offset + region.numel * wire.itemsize].clone()
            buffer = torch.empty(region.shape, dtype=wire)
            movable(buffer).reshape(-1).view(torch.uint8).copy_(raw)
            copy_elements(buffer, self.target(rank, self.plan.names[instance], region))

    def keep(self, ranks: Iterable[int]) -> None:
        for name, kind in zip(self.plan.names, self.plan.kinds, strict=True):
            structure = self.plan.structures[kind]
            for rank in ranks:
                for overlap in structure.keeps.get(rank, ()):
                    region = Region.box(*structure.box(overlap))
                    copy_elements(self.source(rank, name, region), self.target(rank, name, region))


@define(eq=False)
class _Posted:
    """A message that one side has posted."""

    message: Message
    packed: torch.Tensor | None
    is_done: bool = False


@define(eq=False)
class _Rank:
    """How far one rank has come."""

    program: Program
    window: int
    next: int = 0
    pending: deque[_Posted] = field(factory=deque)

    def can_post(self) -> bool:
        while self.pending and self.pending[0].is_done:  # the strictest of ranks: it waits for its oldest message
            self.pending.popleft()
        return len(self.pending) < self.window and self.next < len(self.program)


def run_programs(
    plan: Transfers,
    ranks: Iterable[int],
    source: Access,
    target: Access,
    *,
    window: int = 2,
    lookahead: int | None = None,
    rng: Random | None = None,
) -> None:
    """Run the programs of all ranks in one process.

    A message completes when both sides have posted it, and not before; a rank posts no more than ``window`` messages
    at once.

    Args:
        plan: The plan.
        ranks: All ranks that hold or want something.
        source: Gives the memory of what a rank holds.
        target: Gives the memory where a rank wants it.
        window: How many messages a rank has under way, at least 1.
        lookahead: See ``Transfers.program``.
        rng: Chooses which rank comes next; in turn if left out.

    Raises:
        SpecMismatch: ``window`` is no whole number from 1 on.
        RankDisagreement: The ranks wait for each other, or the sides of a message differ: a fault of the plan.
    """
    if window < 1:
        raise SpecMismatch(f"run_programs: a window is at least 1 message, not {window}.")
    states = {rank: _Rank(plan.program(rank, lookahead=lookahead), window) for rank in ranks}
    data = _Data(plan, source, target)
    data.keep(states)
    posted: dict[tuple[int, int], tuple[deque[_Posted], deque[_Posted]]] = {}
    while ready := [rank for rank, state in states.items() if state.can_post()]:
        for rank in ready if rng is None else [rng.choice(ready)]:
            _post(rank, states[rank], data, posted)
    waiting = [rank for rank, state in states.items() if state.pending or state.next < len(state.program)]
    if waiting:
        raise RankDisagreement(f"run_programs: the ranks {listing(waiting)} wait for each other within {window}.")


def _post(
    rank: int,
    state: _Rank,
    data: _Data,
    posted: dict[tuple[int, int], tuple[deque[_Posted], deque[_Posted]]],
) -> None:
    message = state.program[state.next]
    state.next += 1
    pair = (rank, message.peer) if message.is_send else (message.peer, rank)
    sends, receives = posted.setdefault(pair, (deque(), deque()))
    mine = _Posted(message, data.pack(rank, message) if message.is_send else None)
    state.pending.append(mine)
    (sends if message.is_send else receives).append(mine)
    while sends and receives:
        sent, received = sends.popleft(), receives.popleft()
        if (sent.message.nbytes, sent.message.items) != (received.message.nbytes, received.message.items):
            raise RankDisagreement(
                f"run_programs: {pair[0]} sends {sent.message}; {pair[1]} awaits {received.message}."
            )
        assert sent.packed is not None
        data.unpack(pair[1], received.message, sent.packed)
        sent.is_done = received.is_done = True
        sent.packed = None


def rehearse(
    plan: Transfers,
    states: Mapping[int, Mapping[str, torch.Tensor]],
    *,
    window: int = 2,
    lookahead: int | None = None,
    rng: Random | None = None,
) -> dict[int, dict[str, torch.Tensor]]:
    """Run a plan between layouts over the local tensors of every rank.

    Args:
        plan: A plan whose moves are between layouts.
        states: The local tensors of each rank, by FQN.
        window: How many messages a rank has under way, at least 1.
        lookahead: See ``Transfers.program``.
        rng: Chooses which rank comes next; in turn if left out.

    Returns:
        For each rank of a target the local tensors as they are wanted, in fresh memory.

    Raises:
        Unsupported: A move is between pieces that are no layout's; use ``run_programs``.
        SpecMismatch, RankDisagreement: As for ``run_programs``.

    >>> from fdsd.data.spec import TensorSpec
    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> from fdsd.layout.transfer import Move, plan_transfers
    >>> two, three = (Layout(Mesh({"dp": n}), [Shard(0)]) for n in (2, 3))
    >>> plan = plan_transfers({"w": Move(TensorSpec((6,), torch.int64), two, three)})
    >>> states = {0: {"w": torch.tensor([0, 1, 2])}, 1: {"w": torch.tensor([3, 4, 5])}}
    >>> [state["w"].tolist() for state in rehearse(plan, states, window=1).values()]
    [[0, 1], [2, 3], [4, 5]]
    """
    layouts: dict[str, tuple[Layout, Layout]] = {}
    results: dict[int, dict[str, torch.Tensor]] = {}
    for name, kind in zip(plan.names, plan.kinds, strict=True):
        move = plan.moves[kind]
        if not isinstance(move.source, Layout) or not isinstance(move.target, Layout):
            raise Unsupported(f"rehearse: {name!r} moves between pieces that are no layout's; use run_programs().")
        layouts[name] = move.source, move.target
        for rank in move.target.mesh.ranks:
            local = move.target.local_shape(move.spec.shape, rank)
            results.setdefault(rank, {})[name] = torch.empty(local, dtype=move.result.dtype)
    shapes = {name: plan.moves[kind].spec.shape for name, kind in zip(plan.names, plan.kinds, strict=True)}

    def source(rank: int, name: str, region: Region) -> torch.Tensor:
        return view_in(states[rank][name], layouts[name][0].blocks(shapes[name], rank), region)

    def target(rank: int, name: str, region: Region) -> torch.Tensor:
        return view_in(results[rank][name], layouts[name][1].blocks(shapes[name], rank), region)

    ranks = sorted({*results, *[rank for pair in layouts.values() for rank in pair[0].mesh.ranks]})
    run_programs(plan, ranks, source, target, window=window, lookahead=lookahead, rng=rng)
    return dict(sorted(results.items()))
