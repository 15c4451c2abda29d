"""What ranks say of the same model: the same, but for tensors over a slice of a mesh, of which each tells its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fdsd
from fdsd.layout import Layout
from tests.helpers.dtensors import Replicate, Shard
from tests.helpers.ranks import run_ranks


def described(rank: int) -> dict[str, tuple[Any, Any]]:
    from torch.distributed.tensor import DTensor

    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    model = nn.Module()

    def put(name: str, over: Any, placements: Any, size: int) -> None:
        local = torch.ones(2 if rank < 4 else 0)
        made = DTensor.from_local(local, over, placements, run_check=False, shape=torch.Size((size,)), stride=(1,))
        model.register_parameter(name, nn.Parameter(made))

    put("over_all", mesh, [Replicate(), Shard(0)], 4)
    if rank < 4:  # torch has no slices for ranks that are not in the mesh
        put("over_tp", mesh["tp"], [Shard(0)], 4)
        put("over_dp", mesh["dp"], [Shard(0)], 4)
    entries = fdsd.describe(model).entries
    layouts = {name: Layout.from_data(entry.layout) for name, entry in entries.items()}
    return {name: (tuple(layout.mesh.axes), tuple(layout.mesh.ranks)) for name, layout in layouts.items()}


def test_the_same_on_all_ranks_but_for_slices() -> None:
    found = run_ranks(described, 5)
    assert len({rank["over_all"] for rank in found}) == 1
    assert [rank["over_tp"][1] for rank in found[:4]] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [rank["over_dp"][1] for rank in found[:4]] == [(0, 2), (1, 3), (0, 2), (1, 3)]
