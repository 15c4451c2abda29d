"""Ranks as threads of one process, for tests of deliveries: as strict as real ones, and told at once when they hang.

A message is copied when both sides have posted it, straight from the sender's memory into the receiver's: who uses
memory again too early is found out.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field

__all__ = ["MemoryWorld", "Network", "run_world"]


@define(eq=False)
class _Posted:
    memory: torch.Tensor
    network: Network
    is_done: bool = False

    def wait(self) -> None:
        with self.network.changed:
            if not self.network.changed.wait_for(lambda: self.is_done or self.network.broken, self.network.timeout):
                raise TimeoutError("a message never met its other side")
            if not self.is_done:
                raise ConnectionError("another rank is gone")


@define(eq=False)
class Network:
    """What the ranks share."""

    ranks: tuple[int, ...]
    timeout: float
    changed: threading.Condition = field(factory=threading.Condition)
    broken: bool = False
    pairs: dict[tuple[int, int], tuple[deque[_Posted], deque[_Posted]]] = field(factory=dict)
    statements: list[bytes | None] = field(factory=list)
    turn: int = 0
    answers: dict[int, list[bytes]] = field(factory=dict)

    def post(self, source: int, to: int, memory: torch.Tensor, *, is_send: bool) -> _Posted:
        assert memory.is_contiguous() and memory.dtype is torch.uint8 and memory.ndim == 1
        posted = _Posted(memory, self)
        with self.changed:
            sends, receives = self.pairs.setdefault((source, to), (deque(), deque()))
            (sends if is_send else receives).append(posted)
            while sends and receives:
                sent, received = sends.popleft(), receives.popleft()
                assert len(sent.memory) == len(received.memory), "the two sides of a message differ in size"
                received.memory.copy_(sent.memory)
                sent.is_done = received.is_done = True
            self.changed.notify_all()
        return posted

    def agree(self, rank: int, statement: Any) -> list[Any]:
        packed = pickle.dumps(statement)
        with self.changed:
            if not self.statements:
                self.statements = [None] * len(self.ranks)
            turn = self.turn
            self.statements[self.ranks.index(rank)] = packed
            if None not in self.statements:
                self.answers[turn] = [one for one in self.statements if one is not None]
                self.statements, self.turn = [], turn + 1
                self.changed.notify_all()
            if not self.changed.wait_for(lambda: turn in self.answers or self.broken, self.timeout):
                raise TimeoutError("not all ranks came to an agreement")
            if turn not in self.answers:
                raise ConnectionError("another rank is gone")
            return [pickle.loads(one) for one in self.answers[turn]]


@define(eq=False)
class MemoryWorld:
    """One rank."""

    network: Network
    rank: int
    received: int = 0
    sent: int = 0
    agreements: int = 0
    statements: list[Any] = field(factory=list)
    under_way: int = 0
    device: torch.device = field(factory=lambda: torch.device("cpu"))

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.network.ranks

    def agree(self, statement: Any) -> list[Any]:
        self.agreements += 1
        self.statements.append(statement)
        return self.network.agree(self.rank, statement)

    def send(self, tensor: torch.Tensor, to: int) -> _Posted:
        assert to != self.rank
        self.sent += len(tensor)
        return self.network.post(self.rank, to, tensor, is_send=True)

    def receive(self, tensor: torch.Tensor, source: int) -> _Posted:
        assert source != self.rank
        self.received += len(tensor)
        return self.network.post(source, self.rank, tensor, is_send=False)


def run_world(
    fn: Callable[[MemoryWorld], Any], ranks: int | Sequence[int], *, timeout: float = 10, expect_errors: bool = False
) -> list[Any]:
    """Run a function on each rank of a group, at the same time.

    Args:
        fn: What each rank does.
        ranks: How many, or their numbers in the order of the group.
        timeout: The seconds that a rank waits for others at most.
        expect_errors: Give what a rank raised as its result.

    Returns:
        For each rank its result.
    """
    numbers = tuple(range(ranks)) if isinstance(ranks, int) else tuple(ranks)
    network = Network(numbers, timeout)
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = fn(MemoryWorld(network, rank))
        except BaseException as error:
            errors[rank] = error
            if not expect_errors:
                with network.changed:
                    network.broken = True
                    network.changed.notify_all()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(6 * timeout)
    if hung := [rank for rank, thread in zip(numbers, threads, strict=True) if thread.is_alive()]:
        raise TimeoutError(f"ranks {hung} hang")
    if errors and not expect_errors:
        first = next((e for e in errors.values() if not isinstance(e, ConnectionError)), next(iter(errors.values())))
        raise first
    left = [pair for pair, (sends, receives) in network.pairs.items() if sends or receives]
    assert errors or not left, f"messages that nobody took: {left}"
    return [errors.get(rank, results.get(rank)) for rank in numbers]
