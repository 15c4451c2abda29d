"""Tensors over different ranks in one load: each set of ranks meets by itself, and nobody waits for one that failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fdsd.data.errors import FdsdError
from fdsd.engine.meetings import Meetings
from fdsd.engine.request import Request
from fdsd.layout import Layout, Mesh, Replicate, Shard
from tests.helpers.placed import ShardedTensors, shard
from tests.helpers.ranks import run_ranks

MEMBERS = {"a": (0, 1), "b": (1, 2), "c": (2,)}


class Refusing(ShardedTensors):
    """Cannot be read on rank 0."""

    def local(self, fqn: str) -> torch.Tensor | None:
        if self._rank == 0:
            raise ValueError("bad sector")
        return super().local(fqn)


def meetings_of(rank: int, kind: type[ShardedTensors]) -> Meetings:
    """Ask for each tensor as a whole, on the ranks over which it lies."""
    for members in MEMBERS.values():
        dist.new_group(list(members))  # as meshes make them, on all ranks
    made = Meetings()
    for name, members in MEMBERS.items():
        if rank in members:
            mesh = Mesh({"dp": len(members)}, members)
            rows = {name: Layout(mesh, [Shard(0)])}
            good = shard({name: torch.arange(5.0)}, rows, rank)
            source: Any = kind(good.specs(), rows, {name: good.local(name)}, rank)
            made.add(name, Request(source.lazy(name), Layout(mesh, [Replicate()])))
    return made


def test_each_set_of_ranks_meets_by_itself() -> None:
    def ranks(rank: int) -> list[str]:
        meetings = meetings_of(rank, ShardedTensors)
        made = meetings.run(meetings.collective)
        assert all(value.tolist() == [0, 1, 2, 3, 4] for value in made.values())
        return sorted(made)

    assert run_ranks(ranks, 3) == [["a"], ["a", "b"], ["b", "c"]]


def test_a_failure_is_told_in_the_meetings_that_follow() -> None:
    """Rank 2 does not meet rank 0, which fails, but rank 1, which does."""

    def ranks(rank: int) -> str:
        meetings = meetings_of(rank, Refusing)
        with pytest.raises(FdsdError) as caught:
            meetings.run(meetings.collective)
        return str(caught.value)

    for told in run_ranks(ranks, 3, timeout=60, group_timeout=30):
        assert "bad sector" in told
