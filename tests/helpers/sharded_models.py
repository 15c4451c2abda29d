"""Small models that FSDP2, tensor parallelism and their nestings shard, on real ranks. No test lives here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fdsd.comms.dtensors import make_dtensor
from fdsd.comms.mesh_ranks import mesh_of_groups
from fdsd.data.spec import TensorSpec
from fdsd.layout.layout import Layout
from fdsd.layout.local import local_of

__all__ = ["dtensor", "fsdp2", "fsdp2_over_tp", "hsdp", "mesh_of", "on_dim_1", "tp", "wrapped"]


class Net(nn.Module):
    """Sizes that nothing divides, unless told otherwise; all values are different."""

    def __init__(self, width: int = 5, hidden: int = 13) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, 7, bias=False)
        self.scale = nn.Parameter(torch.ones(3))
        start = 0
        with torch.no_grad():
            for value in self.parameters():
                value.copy_(torch.arange(start, start + value.numel()).reshape(value.shape))
                start += value.numel()


def wrapped(wrap: Callable[[nn.Module], None]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Give a wrapped model, and what its parameters were; of even sizes where this torch can do no other."""
    for sizes in ((5, 13), (4, 12)):
        model = Net(*sizes)
        whole = {name: value.detach().clone() for name, value in model.named_parameters()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own deprecations
            try:
                wrap(model)
            except NotImplementedError:
                continue
        return model, whole
    raise AssertionError(wrap)


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...] | None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def parallel(model: nn.Module, mesh: Any) -> None:
    """Shard the linears by columns and rows; without a source rank where torch can, since all ranks hold the same."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp2(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh_of((dist.get_world_size(),), ("dp",)))


def tp(model: nn.Module) -> None:
    parallel(model, mesh_of((dist.get_world_size(),), ("tp",)))


def two_axes(names: tuple[str, ...]) -> Any:
    return mesh_of((2, dist.get_world_size() // 2), names)


def fsdp2_over_tp(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = two_axes(("dp", "tp"))
    parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])


def hsdp(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=two_axes(("replicas", "dp")))


def on_dim_1(model: nn.Module) -> None:
    """FSDP2 along the last dim, where it can: a dim that the ranks divide."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard as TorchShard

    def choose(value: nn.Parameter) -> Any:
        return TorchShard(1) if value.ndim == 2 and value.shape[1] % dist.get_world_size() == 0 else None

    fully_shard(model, mesh=mesh_of((dist.get_world_size(),), ("dp",)), shard_placement_fn=choose)


def dtensor(whole: torch.Tensor, mesh: Any, placements: list[Any]) -> Any:
    """Cut a DTensor out of a whole tensor by our own layouts, which need no rank to send anything."""
    spec = TensorSpec(whole.shape, whole.dtype)
    layout = Layout(mesh_of_groups(mesh, placements), placements)
    return make_dtensor(local_of(whole, layout, dist.get_rank()).clone(), mesh, placements, spec)
