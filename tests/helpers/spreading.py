"""Tensors that lie over real ranks, made without torch's own arithmetic; and counting what ranks send to each other."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh

from fdsd.comms.dtensors import make_dtensor
from fdsd.comms.world import GroupWorld
from fdsd.data.spec import TensorSpec
from fdsd.layout import Layout, Mesh
from tests.helpers.placed import part_of

__all__ = ["counted", "sharded", "spread"]


def spread(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> Any:
    """Make a DTensor of a whole tensor that every rank has, without torch's own arithmetic."""
    names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    layout = Layout(Mesh(list(zip(names, mesh.mesh.shape, strict=True)), mesh.mesh.flatten().tolist()), placements)
    local = part_of(whole, layout, dist.get_rank())
    assert local is not None
    return make_dtensor(local, mesh, placements, TensorSpec(tuple(whole.shape), whole.dtype))


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Count the bytes that this rank sends to each rank, and receives from each."""
    seen: Counter[tuple[str, int]] = Counter()
    for verb in ("send", "receive"):
        real = getattr(GroupWorld, verb)

        def count(self: Any, tensor: torch.Tensor, other: int, real: Any = real, verb: str = verb) -> Any:
            seen[verb, other] += tensor.numel() * tensor.element_size()
            return real(self, tensor, other)

        monkeypatch.setattr(GroupWorld, verb, count)
    return seen


def sharded(whole: torch.Tensor, rows: list[tuple[int, int]], group: Any = None) -> Any:
    """Make a ShardedTensor by rows; a rank may have none."""
    warnings.filterwarnings("ignore", "Please use DTensor instead")
    rank = dist.get_rank()
    start, stop = rows[rank]
    shards = []
    if stop > start:
        offsets = [start, *[0] * (whole.ndim - 1)]
        shards = [LocalShard.from_tensor_and_offsets(whole[start:stop].clone(), offsets, rank)]
    return ShardedTensor._init_from_local_shards(shards, whole.shape, process_group=group)
