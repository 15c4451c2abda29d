"""What torch's own DTensor says of layouts, without processes; all of torch's private names are here."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import _utils
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = [
    "Partial",
    "Replicate",
    "Shard",
    "StridedShard",
    "cuts_locally",
    "fake_ranks",
    "fsdp_over_tp",
    "local_box",
    "local_tensor",
    "reads_orders",
]

Shape = tuple[int, ...]


def StridedShard(dim: int, split_factor: int) -> Placement:
    """Give the placement that FSDP2 makes over tensor parallelism."""
    made: Placement = _StridedShard(dim, split_factor=split_factor)
    return made


class _Mesh:
    """The little of a DeviceMesh that older versions of torch ask for."""

    def __init__(self, sizes: Shape, coordinate: Shape) -> None:
        self._sizes, self._coordinate, self.ndim = sizes, coordinate, len(sizes)

    def get_coordinate(self) -> list[int]:
        return list(self._coordinate)

    def size(self, axis: int) -> int:
        return self._sizes[axis]


_order: Any = getattr(_utils, "_explicit_order_placements", None)


def reads_orders() -> bool:
    """Tell whether this torch takes a strided shard for an order of axes, as 2.9 does, and not for so many parts."""
    return _order is not None


def local_box(
    shape: Shape, sizes: Shape, coordinate: Shape, placements: Sequence[Placement]
) -> tuple[Shape, Shape | None] | None:
    """Ask torch for the shape of a local tensor and where its first element stands; ``None`` where it has no answer.

    The place of an empty shard says nothing. Older versions know strided shards of even sizes only.
    """
    plain: Any = getattr(_utils, "_compute_local_shape_and_global_offset", None)
    if _order is not None:
        try:
            told = _order(sizes, placements)
        except RuntimeError:
            return None
        if len(told) < len(placements):  # strided shards that no axis explains are forgotten
            return None
    try:
        if plain is not None and list(inspect.signature(plain).parameters)[1] == "mesh_shape":
            local, offset = plain(shape, sizes, list(coordinate), placements)
        elif _is_uneven(shape, sizes, placements):
            return None
        else:
            fake: Any = _Mesh(sizes, coordinate)
            local, offset = _utils.compute_local_shape_and_global_offset(shape, fake, placements)
    except NotImplementedError:
        return None
    return tuple(local), None if 0 in local else tuple(offset)


def _is_uneven(shape: Shape, sizes: Shape, placements: Sequence[Any]) -> bool:
    strided = [placement for placement in placements if isinstance(placement, _StridedShard)]
    num = torch.Size(sizes).numel()
    return any(num % p.split_factor or not shape[p.dim] or shape[p.dim] % num for p in strided) or (
        bool(strided) and len(placements) < 2
    )


def cuts_locally() -> bool:
    """Tell whether this torch can shard without a source rank, which is how a fake group gives true data."""
    from torch.distributed.tensor import distribute_tensor

    return "src_data_rank" in inspect.signature(distribute_tensor).parameters


@contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[None]:
    """Be one rank of a process group that sends nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_tensor(
    tensor: torch.Tensor, sizes: Shape, rank: int, placements: Sequence[Placement], *, ranks: Shape | None = None
) -> torch.Tensor:
    """Let ``distribute_tensor`` cut the local tensor of a rank; ``ranks`` are those of the mesh, row by row."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    with fake_ranks(rank, torch.Size(sizes).numel()):
        mesh = init_device_mesh("cpu", sizes) if ranks is None else DeviceMesh("cpu", torch.tensor(ranks).view(sizes))
        made: Any = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        local: torch.Tensor = made.to_local()
        return local.clone()


def fsdp_over_tp(weight: torch.Tensor, dp: int, tp: int, rank: int) -> tuple[torch.Tensor, tuple[Placement, ...]]:
    """Give what a rank holds of the weight of a column-parallel Linear under ``fully_shard``, and its placements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with fake_ranks(rank, dp * tp), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        with torch.no_grad():
            linear.weight.copy_(weight)
        # without a source rank every rank cuts its own, and nothing of the fake group's data is seen
        parallelize_module(linear, mesh["tp"], ColwiseParallel(), src_data_rank=None)
        fully_shard(linear, mesh=mesh["dp"])
        made: Any = linear.weight
        return made.to_local().detach().clone(), tuple(made.placements)
