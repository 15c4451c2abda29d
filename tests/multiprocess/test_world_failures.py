"""Ranks that die or hang: those that are left raise in time, and name them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fdsd.comms import failures
from fdsd.comms.world import world_of
from fdsd.data.errors import RanksLost
from tests.helpers.ranks import RankDied, RankHung, run_ranks

TIMEOUT = 4.0
"""Of the process groups here, in seconds."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look out for others for a shorter time; ranks are forks, so this holds for them too."""
    monkeypatch.setattr(failures, "WAIT", 1.5)


def attempt(work: Any) -> tuple[str, float]:
    """Give the error of a piece of work, and after how many seconds it came."""
    start = time.monotonic()
    with pytest.raises(RanksLost) as caught:
        work()
    return str(caught.value), time.monotonic() - start


def run(fn: Any, n: int, **options: Any) -> list[Any]:
    return run_ranks(fn, n, timeout=30, group_timeout=TIMEOUT, expect_errors=True, **options)


BIG = 1 << 22


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_a_rank_dies_during_a_transfer(store: Any) -> None:
    """Rank 2 dies with a message half-way; rank 0 waits for it, and rank 1 for rank 0 alone.

    gloo sometimes does not see that the connection is closed, and waits for the timeout of the group.
    """

    def fn(rank: int) -> tuple[str, float]:
        world = world_of(dist.group.WORLD)
        world.agree("ready")
        big = torch.zeros(BIG)
        if rank == 2:
            world.send(big, 0)
            os._exit(3)
        return attempt(lambda: [world.receive(big, rank - 1 if rank else 2).wait() for _ in range(2)])

    (first, after_0), (second, after_1), third = run(fn, 3, store=store)
    assert type(third) is RankDied
    start = "receive from rank 2 (16777216 bytes) failed on rank 0 ("
    end = (
        "): rank 2 gave no sign of life. Tensors and files that were being written are undefined now, and the process "
        "group cannot be used any more: start all ranks again, and repeat the call."
    )
    assert first.startswith(start) and first.endswith(end), first
    assert "GLHF" not in first and ".cc" not in first
    assert second.startswith("receive from rank 0 (16777216 bytes) failed on rank 1 (") and second.endswith(end)
    assert max(after_0, after_1) < TIMEOUT + 5


def test_ranks_that_wait_for_living_ones_notice_too() -> None:
    """Rank 3 dies; rank 2 waits for it, rank 1 for rank 2, and rank 0 for rank 1. None waits for its timeout."""

    def fn(rank: int) -> tuple[str, float]:
        world = world_of(dist.group.WORLD)
        world.agree("ready")
        if rank == 3:
            time.sleep(0.5)
            os._exit(3)
        return attempt(lambda: world.receive(torch.zeros(9), rank + 1).wait())

    found = run_ranks(fn, 4, timeout=30, group_timeout=25, expect_errors=True)
    for rank, (told, after) in enumerate(found[:3]):
        assert told.startswith(f"receive from rank {rank + 1} (36 bytes) failed on rank {rank} (")
        assert "): rank 3 gave no sign of life. Tensors" in told
        assert after < 10


def test_two_ranks_die() -> None:
    def fn(rank: int) -> str:
        world = world_of(dist.group.WORLD)
        world.agree("ready")
        if rank in (1, 3):
            os._exit(3)
        return attempt(lambda: world.agree("again"))[0]

    for i in (0, 2):
        assert f"agreement failed on rank {i} (" in (told := run(fn, 4)[i])
        assert "): ranks 1, 3 gave no sign of life. Tensors" in told


def test_a_rank_that_dies_before_it_agrees() -> None:
    def fn(rank: int) -> str:
        if rank == 1:
            os._exit(3)
        return attempt(lambda: world_of(dist.group.WORLD).agree("ready"))[0]

    told, _, other = run(fn, 3)
    assert "): rank 1 gave no sign of life" in told
    assert "): rank 1 gave no sign of life" in other


def test_the_store_dies_with_rank_0() -> None:
    """Who else is missing cannot be found out; the errors say so, and what is known."""

    def fn(rank: int) -> tuple[str, float]:
        world = world_of(dist.group.WORLD)
        world.agree("ready")
        if rank == 0:
            os._exit(3)
        return attempt(lambda: world.receive(torch.zeros(9), 0).wait())

    for told, after in run(fn, 3)[1:]:
        assert told.startswith("receive from rank 0 (36 bytes) failed on rank ")
        assert "): the store of the process group cannot be reached (" in told
        assert "), so nobody can tell who is missing" in told
        assert after < TIMEOUT + 10


def test_the_store_outlives_rank_0() -> None:
    def fn(rank: int) -> str:
        world = world_of(dist.group.WORLD)
        if rank == 0:
            os._exit(3)
        return attempt(lambda: world.receive(torch.zeros(9), 0).wait())[0]

    for told in run(fn, 3, store="file")[1:]:
        assert "): rank 0 gave no sign of life. " in told


def test_a_rank_that_hangs() -> None:
    """Its connections live, so nobody notices before the timeout of the group; then all do."""

    def fn(rank: int) -> tuple[str, float]:
        world = world_of(dist.group.WORLD)
        world.agree("ready")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return attempt(lambda: world.receive(torch.zeros(9), 1 if rank == 0 else 0).wait())

    (first, after_0), hung, (third, after_2) = run_ranks(fn, 3, timeout=12, group_timeout=TIMEOUT, expect_errors=True)
    assert type(hung) is RankHung
    assert "Timed out waiting 4000ms" in first
    for told, after in ((first, after_0), (third, after_2)):
        assert "): rank 1 gave no sign of life. " in told
        assert TIMEOUT - 0.5 < after < TIMEOUT + 10


def test_a_lost_connection_with_all_ranks_there() -> None:
    """Rank 1 has closed its own."""

    def fn(rank: int) -> str:
        world = world_of(dist.group.WORLD)
        world.agree("ready")
        if rank == 1:
            failures.close_connections(world.group)  # type: ignore[attr-defined]
        return attempt(lambda: world.agree("again"))[0]

    for told in run(fn, 2):
        assert "): all ranks are still there, so the connection between them failed. " in told


def test_what_comes_after_a_failure_fails_at_once_with_the_same_error() -> None:
    def fn(rank: int) -> tuple[str, list[str], float]:
        world = world_of(dist.group.WORLD)
        world.agree("ready")
        if rank == 1:
            os._exit(3)
        pending = [world.receive(torch.zeros(9), 1), world.receive(torch.zeros(9), 1)]
        first = attempt(pending[0].wait)[0]
        start = time.monotonic()
        later = [
            attempt(pending[1].wait)[0],
            attempt(lambda: world.agree(1))[0],
            attempt(lambda: world.send(torch.zeros(9), 1))[0],
            attempt(lambda: world.receive(torch.zeros(9), 1))[0],
        ]
        return first, later, time.monotonic() - start

    first, later, took = run(fn, 2)[0]
    assert later == [first] * 4
    assert took < 0.5


def test_only_members_of_the_group_are_looked_out_for() -> None:
    """A group of ranks 1 and 3; rank 3 dies. The numbers in the message are those of the default group."""

    def fn(rank: int) -> str | None:
        group = dist.new_group([1, 3])
        if rank not in (1, 3):
            return None
        world = world_of(group)
        world.agree("ready")
        if rank == 3:
            os._exit(3)
        return attempt(lambda: world.receive(torch.zeros(9), 3).wait())[0]

    told = run(fn, 4)[1]
    assert told.startswith("receive from rank 3 (36 bytes) failed on rank 1 (")
    assert "): rank 3 gave no sign of life. " in told
