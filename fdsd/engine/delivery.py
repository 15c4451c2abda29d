"""`Delivery`: the one mechanism that brings expressions to where they are wanted, in one process or over a group.

What each rank needs is agreed on and planned first, per structure; then it runs, a round of tensors after the other.
How messages travel is ``messages``' business.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from attrs import frozen

from fdsd.algebra.ops.leaves import Origin
from fdsd.data.protocols import World
from fdsd.engine.agreement import Agreed, Statement, agree, state
from fdsd.engine.asking import Step, Watch, ask, leave
from fdsd.engine.failures import failure_of, raise_if_failed
from fdsd.engine.here import Here, plan_here
from fdsd.engine.memory import Delivered, Memory
from fdsd.engine.messages import WINDOW, Buffers, Exchange, Window
from fdsd.engine.overwriting import Kept, is_placed, kept_of, memory_of
from fdsd.engine.request import Request
from fdsd.engine.rounds import PROGRAMS, Rounds
from fdsd.engine.staging import ACCELERATOR, Layer
from fdsd.engine.views import Views
from fdsd.engine.wirings import WIRINGS
from fdsd.layout.program import to_list
from fdsd.layout.structure import LIMITS, Limits
from fdsd.layout.transfer import Traffic, traffic_of
from fdsd.layout.wiring import Wiring

__all__ = ["Delivery", "plan_delivery"]

T = TypeVar("T")


@frozen(eq=False, repr=False)
class Delivery:
    """Tensors on their way to where they are wanted.

    Attributes:
        names: All of them, in the agreed order.
    """

    names: tuple[str, ...]
    _plan: _Plan | Here

    def traffic(self) -> Traffic:
        """Count the bytes that each rank receives from others, and sends to them.

        >>> plan_delivery({}, None).traffic()
        Traffic(received={}, sent={})
        """
        return self._plan.traffic()

    def run(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Deliver. Collective: every rank has to go through all of it, or to close it.

        Yields:
            What this rank wants, in order: each name with the local result, which is complete.

        Raises:
            FdsdError: On all ranks the same: a source, or a function, raised on one of them.

        Law: what is yielded is what one process that holds everything would compute, byte for byte.

        >>> from fdsd.algebra.apply import defer_leaf
        >>> dict(plan_delivery({"w": Request(defer_leaf(torch.ones(2)))}, None).run())
        {'w': tensor([1., 1.])}
        """
        return self._plan.run()

    def __repr__(self) -> str:
        return f"<Delivery of {len(self.names)} tensors>"


@frozen(eq=False)
class _Plan:
    """A delivery over a group."""

    world: World
    agreed: Agreed
    statement: Statement
    requests: Sequence[Request]
    wirings: Sequence[Wiring]
    asked: str
    device: torch.device
    limits: Limits
    window: Window
    layer: Layer
    positions: array[int]  # the names that are no other's tie
    step: Step

    @property
    def kinds(self) -> array[int]:
        """The plan of each tensor that is delivered."""
        return array("q", [self.agreed.kinds[at] for at in self.positions])

    def traffic(self) -> Traffic:
        return traffic_of(self.wirings, self.kinds)

    def run(self) -> Iterator[tuple[str, torch.Tensor]]:
        rounds = PROGRAMS.get(self.world.rank, self.wirings, self.kinds, self.agreed.budget, self.limits)
        run = _Run(self, rounds)
        with Watch() as watch:
            for i in range(len(rounds)):
                if i and any(self.say(False)):
                    return  # another rank has closed
                run.travel(i)
                try:
                    yield from run.results(i)
                except GeneratorExit:
                    if i + 1 < len(rounds):
                        leave(self.world, watch, self._end)
                    raise

    def _end(self) -> None:
        """Tell the others that this rank goes through no more of it; those that were out of step are elsewhere."""
        if not self.step.is_past:
            self.say(True)

    def say(self, said: Any) -> list[Any]:
        """Tell the other ranks something about this very delivery; collective."""
        self.step.check(self.asked)
        return ask(self.world, f"{self.asked}, number {self.agreed.number}", said)


class _Run:
    """One run of a delivery over a group."""

    def __init__(self, plan: _Plan, rounds: Rounds) -> None:
        self._plan = plan
        self._rounds = rounds
        tensors = self._delivered()
        kept, error = self._kept(tensors)
        memory = Memory(tensors, rounds.rows(tensors.views), kept, plan.device, plan.layer)
        layer = plan.layer if plan.world.device.type == "cpu" and memory.has_far else None
        buffers = Buffers(plan.window.buffers, plan.world.device, layer)
        self._exchange = Exchange(plan.world, memory, buffers, plan.window, error)
        self._made: dict[int, torch.Tensor | None] = {}  # what has not been given yet, by the place among names
        uses = Counter(plan.agreed.leaders)
        self._uses = {leader: num for leader, num in uses.items() if num > 1}  # of those that others are tied to

    def _delivered(self) -> Delivered:
        """Give all tensors that are delivered, with what this rank asks for."""
        plan, agreed, statement = self._plan, self._plan.agreed, self._plan.statement
        mine = [agreed.mine[at] for at in plan.positions]
        keys = [
            (agreed.kinds[at], -1 if i < 0 else statement.kinds[i]) for at, i in zip(plan.positions, mine, strict=True)
        ]
        views = {key: self._made_views(*key) for key in dict.fromkeys(keys)}
        return Delivered(
            [agreed.names[at] for at in plan.positions],
            [views[key] for key in keys],
            [None if i < 0 else plan.requests[i] for i in mine],
            [() if i < 0 else statement.origins[i] for i in mine],
        )

    def _made_views(self, kind: int, mine: int) -> Views:
        """Give the views of a structure, which are remembered together with its plan."""
        wiring, rank = self._plan.wirings[kind], self._plan.world.rank
        placements = self._plan.statement.keys[mine].placements if mine >= 0 else None
        found = wiring.notes.get((rank, placements))
        if not isinstance(found, Views):
            found = wiring.notes[rank, placements] = Views(wiring, rank, placements)
        return found

    def _kept(self, tensors: Delivered) -> tuple[Kept, tuple[BaseException, str] | None]:
        """Copy the sources that would be overwritten before they are read."""
        rows = zip(tensors.names, tensors.requests, strict=True)
        requests = {name: request for name, request in rows if request is not None}
        try:
            with torch.no_grad():
                return kept_of(requests, self._plan.world.rank), None
        except BaseException as error:  # told to all at the end of the first round
            return Kept(), (error, next(iter(requests)))

    def travel(self, number: int) -> None:
        """Exchange the messages of a round and do what is to be done with them; then all ranks tell how it went."""
        rounds, exchange, memory = self._rounds, self._exchange, self._exchange.memory
        first, last = rounds.messages[number : number + 2]
        start, stop = rounds.tensors[number : number + 2]
        bounds = rounds.program.bounds
        exchange.begin(rounds.program.part(first, last), memory.rows.items(int(bounds[first]), int(bounds[last])))
        with torch.no_grad():
            exchange.keep_up(start)  # while messages are under way, this rank copies what it keeps
            odd = self._try(start, memory.keep, start, stop) or []
            arrivals, reached = to_list(rounds.arrivals[start:stop]), -1
            for i in sorted([*odd, *memory.rows.to_finish(start, stop)]):
                if arrivals[i - start] - first > reached:
                    reached = arrivals[i - start] - first
                    exchange.advance(reached)
                exchange.keep_up(i)
                self._try(i, memory.finish, i)
            exchange.finish()
            self._try(stop - 1, memory.settle)
            made = self._try(start, memory.take, start, stop)
        memory.forget()
        error, name = exchange.error or (None, "")
        failure = None if error is None else failure_of(error, repr(name))
        raise_if_failed(self._plan.say(failure), self._plan.world.ranks, error)
        self._made.update(zip(self._plan.positions[start:stop], made or (), strict=True))

    def _try(self, i: int, action: Callable[..., T], *given: Any) -> T | None:
        """Do something for a tensor, if nothing has gone wrong yet; what goes wrong is told to all at the end."""
        if self._exchange.error is None:
            try:
                return action(*given)
            except BaseException as error:
                self._exchange.fail(error, i)
        return None

    def results(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Give the results of a round in the order of names, tied ones again."""
        agreed, positions, tensors = self._plan.agreed, self._plan.positions, self._rounds.tensors
        start, stop = tensors[number : number + 2]
        end = positions[stop] if stop < len(positions) else len(agreed.names)
        for at in range(positions[start], end):
            leader = agreed.leaders[at]
            left = self._uses.get(leader, 1) - 1
            if left:
                self._uses[leader] = left
            result = self._made[leader] if left else self._made.pop(leader)
            if result is not None:
                yield agreed.names[at], result
                del result


def _is_copy(request: Request) -> bool:
    """Tell whether a tensor in memory is copied to other memory, as it is or a part of it: then plans are shared."""
    node = request.node
    if node is None or request.out is None or not isinstance(node.op, Origin):
        return False
    return not is_placed(node.op.source) and memory_of(node.op) is not None


def plan_delivery(
    requests: Mapping[str, Request],
    world: World | None,
    *,
    budget: int | None = None,
    device: torch.device | str | None = None,
    error: BaseException | None = None,
    rank: int = 0,
    limits: Limits = LIMITS,
    window: Window = WINDOW,
    layer: Layer = ACCELERATOR,
    asked: str = "a delivery of tensors",
) -> Delivery:
    """Agree on what is to be delivered, and plan it. Collective, if there is a world.

    Args:
        requests: What this rank knows of, and where it is wanted, by FQN.
        world: The processes that work together; ``None`` for this one alone.
        budget: Bytes that may be under way at once beside what the caller keeps; without it all is, or 64 MB where
            values are computed. The smallest of all ranks counts. For one process: bytes for scratch beside the result.
        device: Where fresh results are made; the CPU by default.
        error: What went wrong on this rank before; then all ranks raise it.
        rank: Which rank this process is in the targets, if there is no world.
        limits: The sizes of messages.
        window: How many messages are under way at once.
        layer: The accelerators.
        asked: What is asked for, which has to be the same on all ranks.

    Raises:
        FdsdError: The same on all ranks. Nothing has been written, or read. ``RankDisagreement``: ranks state
            different things; ``SpecMismatch``: layouts that do not fit, or elements that no rank holds.

    >>> from fdsd.algebra.apply import defer_leaf
    >>> plan_delivery({"w": Request(defer_leaf(torch.ones(2)))}, None).names
    ('w',)
    """
    where = torch.device("cpu" if device is None else device)
    if world is not None and len(world.ranks) == 1:
        rank, world = world.rank, None
    if world is None:
        if error is not None:
            raise error
        if not all(map(_is_copy, requests.values())):
            return Delivery(tuple(requests), plan_here(requests, rank, budget, where))
        from fdsd.comms.alone import Alone  # the edge; it is asked for nothing but its rank

        world = Alone(rank)
    statement: Statement | None = None
    if error is None:
        try:
            statement = state(requests, world.rank)
        except BaseException as found:  # told to all
            error = found
    agreed = agree(statement, error, world, asked=asked, budget=budget)
    assert statement is not None
    wirings = WIRINGS.all_of(agreed, world.ranks, limits)
    positions = array("q", [at for at, leader in enumerate(agreed.leaders) if at == leader])
    given = list(requests.values())
    step = Step.of(world)
    plan = _Plan(world, agreed, statement, given, wirings, asked, where, limits, window, layer, positions, step)
    return Delivery(agreed.names, plan)
