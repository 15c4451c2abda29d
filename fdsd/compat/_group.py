"""Which ranks work together on a state dict: those over whose meshes its tensors lie. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from fdsd.algebra.graph import walk
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops.leaves import Origin
from fdsd.comms.alone import this_rank
from fdsd.data.errors import Unsupported
from fdsd.data.protocols import World
from fdsd.engine.overwriting import placement_of
from fdsd.layout.layout import Layout
from fdsd.layout.placed import Placement

__all__ = ["default_world", "has_group", "placements_in", "ranks_of", "world_of_ranks"]


def has_group() -> bool:
    """Tell whether there is a default process group.

    >>> has_group()
    False
    """
    return dist.is_available() and dist.is_initialized()


def default_world() -> World | None:
    """Give the world of the default process group; ``None`` without one."""
    if not has_group():
        return None
    from fdsd.comms.world import world_of

    return world_of(dist.group.WORLD)


def ranks_of(placements: Iterable[Placement | None]) -> frozenset[int]:
    """Give the ranks that hold something of tensors that lie over ranks.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> sorted(ranks_of([None, Layout(Mesh({"dp": 2}), [Shard(0)])]))
    [0, 1]
    """
    found: set[int] = set()
    for placement in {id(placement): placement for placement in placements}.values():
        if isinstance(placement, Layout):
            found.update(placement.mesh.ranks)
        elif placement is not None:
            found.update(rank for ranks in placement.ranks for rank in ranks)
    return frozenset(found)


def placements_in(node: Lazy) -> list[Placement]:
    """Say how the source tensors of an expression lie over ranks; nothing of those that do not."""
    origins = [each.op for each in (walk([node]) if node.inputs else (node,)) if isinstance(each.op, Origin)]
    found = [placement_of(origin) for origin in origins]
    return [placement for placement in found if placement is not None]


def world_of_ranks(ranks: frozenset[int]) -> World | None:
    """Give the world of some ranks, this one among them: that of any process group which has exactly these.

    Args:
        ranks: Their numbers in the default group; none, or this one alone, need no world.

    Raises:
        Unsupported: No process group has them.
    """
    if ranks <= {this_rank()} or not has_group():
        return None
    from fdsd.comms.world import world_of

    if len(ranks) == dist.get_world_size():
        return world_of(dist.group.WORLD)
    groups: Any = dist.distributed_c10d._world.pg_group_ranks  # pyright: ignore[reportPrivateUsage]  # no public list
    for group, members in groups.items():
        if members.keys() == ranks:
            return world_of(group)
    raise Unsupported(
        f"Tensors lie over the ranks {sorted(ranks)}, and no process group has exactly these. Make one with "
        "torch.distributed.new_group(ranks) on all of them."
    )
