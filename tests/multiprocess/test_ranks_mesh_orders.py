"""Meshes whose ranks are in another order than their process groups: what torch cuts and joins by the groups is read,
gathered and set as it is.

The oracle is torch's own ``full_tensor``, and the whole tensor that FSDP2 and ``distribute_tensor`` were given.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fdsd
from fdsd.compat.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from fdsd.errors import Unsupported
from tests.helpers.dtensors import Replicate, Shard
from tests.helpers.ranks import run_ranks


def sharded(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model with even, uneven and empty shards, and what it was before it was sharded."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 7), nn.Linear(7, 1))
    whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    fully_shard(model, mesh=mesh)
    return model, whole


def assert_whole(model: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        live: Any = param.detach()
        assert torch.equal(live.full_tensor(), whole[name]), name


@pytest.mark.parametrize("ranks", [[2, 0, 1], [2, 1, 0]])
def test_fsdp2(ranks: list[int]) -> None:
    def run(rank: int) -> None:
        warnings.simplefilter("ignore")  # versions warn of DTensors on the CPU
        model, whole = sharded(DeviceMesh("cpu", ranks), 0)
        other, different = sharded(DeviceMesh("cpu", [0, 1, 2]), 1)
        assert_whole(model, whole)
        state = fdsd.snapshot(fdsd.capture(model).model)
        read = fdsd.materialize(state, group=dist.group.WORLD)
        got: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for name, value in whole.items():
            assert torch.equal(read[name], value) and torch.equal(got[name], value)
        fdsd.restore(state, other, group=dist.group.WORLD)
        assert_whole(other, whole)
        fdsd.restore(different, model)
        assert_whole(model, different)
        set_model_state_dict(model, got if rank == 0 else {}, options=from_zero)
        assert_whole(model, whole)

    from_zero = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    run_ranks(run, 3)


@pytest.mark.parametrize("ranks", [[[1, 0], [3, 2]], [[0, 1], [2, 3]]])
def test_hybrid_fsdp1(ranks: list[list[int]]) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def run(rank: int) -> None:
        warnings.simplefilter("ignore")  # FSDP1 warns of the CPU
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 7))
        whole = {name: param.detach().clone() for name, param in model.named_parameters()}
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicas", "shards"))
        made = FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        read = fdsd.materialize(fdsd.capture(made).model, group=dist.group.WORLD)
        assert all(torch.equal(read[name], value) for name, value in whole.items())

    run_ranks(run, 4)


@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(1))])
@pytest.mark.parametrize("ranks", [[[3, 2], [1, 0]], [[1, 0], [3, 2]]])
def test_distribute_tensor(ranks: list[list[int]], placements: Any) -> None:
    def run(rank: int) -> None:
        from torch.distributed.tensor import distribute_tensor

        warnings.simplefilter("ignore")  # versions warn of DTensors on the CPU
        whole = torch.arange(64.0).view(8, 8)
        made = distribute_tensor(whole, DeviceMesh("cpu", ranks), placements)
        assert torch.equal(made.full_tensor(), whole)
        assert torch.equal(fdsd.materialize({"w": made}, group=dist.group.WORLD)["w"], whole)

    run_ranks(run, 4)


def test_groups_that_contradict_each_other() -> None:
    """By the groups ranks 0 and 1 have one part, ranks 2 and 3 the other; one axis alone tells who has what."""

    def run(rank: int) -> str:
        from torch.distributed.tensor import DTensor

        mesh = DeviceMesh("cpu", [[3, 1], [0, 2]])

        def over(placements: Any, local: torch.Tensor) -> Any:
            return DTensor.from_local(local, mesh, placements, run_check=False)

        part = torch.tensor([0.0, 1.0] if rank in (0, 1) else [2.0, 3.0])
        for placements in ((Shard(0), Replicate()), (Replicate(), Shard(0))):
            read = fdsd.materialize({"w": over(placements, part)}, group=dist.group.WORLD)["w"]
            assert torch.equal(read, torch.arange(4.0))
        whole = fdsd.materialize({"w": over((Replicate(), Replicate()), part)})["w"]
        assert torch.equal(whole.to_local() if isinstance(whole, DTensor) else whole, part)
        with pytest.raises(Unsupported) as caught:
            fdsd.materialize({"w": over((Shard(0), Shard(0)), part)}, group=dist.group.WORLD)
        return str(caught.value)

    found = run_ranks(run, 4)
    assert len(set(found)) == 1
    assert "'dim0', 'dim1' of a DeviceMesh of the ranks [[3, 1], [0, 2]]" in found[0]
    assert "Make the mesh with ranks that ascend" in found[0]
