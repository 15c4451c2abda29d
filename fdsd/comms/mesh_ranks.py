"""Which rank of a DeviceMesh holds which part: by the order of its process groups, in which torch sends and receives.

torch makes the group of each row of a mesh with its ranks in ascending order, whatever their order in the mesh is.
What FSDP2 and ``distribute_tensor`` cut, and ``full_tensor`` joins, follows the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fdsd.data.errors import Unsupported, listing
from fdsd.layout.mesh import Mesh

__all__ = ["is_ascending", "mesh_of", "mesh_of_groups"]


def mesh_of(mesh: Any) -> Mesh:
    """Read a DeviceMesh as it is."""
    return _named(mesh, mesh.mesh)


def is_ascending(mesh: Any) -> bool:
    """Tell whether ranks ascend along each axis of a DeviceMesh, so that its groups have the order of the mesh."""
    ranks: torch.Tensor = mesh.mesh
    return all(bool((ranks.diff(dim=axis) > 0).all()) for axis in range(ranks.ndim))


def mesh_of_groups(mesh: Any, placements: Sequence[Any]) -> Mesh:
    """Read a DeviceMesh with the ranks of each axis that shards in the order of their group.

    Args:
        mesh: A DeviceMesh whose ranks do not ascend along each axis.
        placements: What lies over it, one for each axis.

    Raises:
        Unsupported: Several axes shard, and by their groups some ranks would have the same part.
    """
    ranks: Any = mesh.mesh
    sharding = [axis for axis, one in enumerate(placements) if hasattr(one, "dim") and _is_sorted(mesh, axis)]
    at = list(torch.meshgrid([torch.arange(size) for size in ranks.shape], indexing="ij"))
    for axis in sharding:
        at[axis] = ranks.argsort(dim=axis).argsort(dim=axis)
    made = torch.full_like(ranks, -1)
    made[tuple(at)] = ranks
    if bool((made < 0).any()):
        axes = listing([_names(mesh)[axis] for axis in sharding])
        raise Unsupported(
            f"A DTensor is sharded over the axes {axes} of a DeviceMesh of the ranks {ranks.tolist()}. torch numbers "
            "the ranks of an axis in ascending order, by which several of these have the same part. Make the mesh with "
            "ranks that ascend along each axis."
        )
    return _named(mesh, made)


def _is_sorted(mesh: Any, axis: int) -> bool:
    """Tell whether the groups along an axis are in ascending order, as torch makes them unless it is told otherwise."""
    try:
        group = dist.get_process_group_ranks(mesh.get_group(axis))
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, ValueError):  # this rank has none
        return True
    return group == sorted(group)


def _names(mesh: Any) -> Sequence[str]:
    return mesh.mesh_dim_names or [f"dim{axis}" for axis in range(mesh.ndim)]


def _named(mesh: Any, ranks: Any) -> Mesh:
    numbers: list[int] = ranks.flatten().tolist()
    return Mesh(list(zip(_names(mesh), ranks.shape, strict=True)), numbers)
