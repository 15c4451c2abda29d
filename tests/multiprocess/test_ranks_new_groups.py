"""Groups made for tensors over some ranks, in whatever groups these are; what torch counts stays as it was."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fdsd
from fdsd.comms.worlds import world_over
from fdsd.compat.state_dict import StateDictOptions, get_model_state_dict
from fdsd.data.errors import RanksLost
from tests.helpers.dtensors import Shard
from tests.helpers.ranks import run_ranks

WEIGHT = torch.arange(16.0).view(4, 4)


def counted() -> tuple[int, int]:
    c10d: Any = dist.distributed_c10d
    return c10d._world.group_count, len(c10d._world.pg_names)


def model_over(mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.tensor import DTensor

    rows, columns = mesh.mesh.shape
    at: Any = mesh.get_coordinate()
    local = WEIGHT.chunk(rows, 0)[at[0]].chunk(columns, 1)[at[1]].contiguous()
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0), Shard(1)], run_check=False))
    return model


def test_ranks_in_different_numbers_of_groups() -> None:
    def run(rank: int) -> None:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        make: Any = dist.new_group
        for some in ([0, 1], [0, 1]):
            if rank in some:
                dist.barrier(make(some, use_local_synchronization=True))
        if rank < 4:
            model = model_over(mesh)
            for _ in range(2):
                got: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
                assert torch.equal(got["weight"], WEIGHT)
            fdsd.restore(fdsd.snapshot(fdsd.capture(model)), model)

    run_ranks(run, 5, group_timeout=20)


def test_later_groups_get_the_names_that_they_would_have() -> None:
    def run(rank: int) -> None:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        before, groups = counted()
        if rank < 4:
            get_model_state_dict(model_over(mesh), options=StateDictOptions(full_state_dict=True))
        assert counted() == (before, groups + (rank < 4))
        dist.barrier(dist.new_group())

    run_ranks(run, 5, group_timeout=20)


def test_a_group_is_made_once_and_used_again() -> None:
    def run(rank: int) -> None:
        if rank < 3:
            first = world_over([0, 1, 2])
            assert first is not None and first.agree(rank) == [0, 1, 2]
            count = counted()
            again = world_over([2, 1, 0])
            assert again is not None and again.agree(rank) == [0, 1, 2]
            assert counted() == count

    run_ranks(run, 4, group_timeout=20)


def test_ranks_that_do_not_come_are_named() -> None:
    def run(rank: int) -> None:
        if rank in (0, 2):
            world_over([0, 1, 2])

    first, *_, third, fourth = run_ranks(run, 4, expect_errors=True, group_timeout=3, timeout=40)
    assert fourth is None
    for error in (first, third):
        assert isinstance(error, RanksLost)
        assert "Making a process group of the ranks [0, 1, 2] failed" in str(error)
        assert "rank 1 gave no sign of life" in str(error)
