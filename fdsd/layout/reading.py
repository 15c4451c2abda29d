"""How the placements of all axes are read together: torch's strided shards, and the order in which axes cut.

Shapes are unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fdsd.data.errors import SpecMismatch, listing
from fdsd.data.values import is_sequence
from fdsd.layout.mesh import Mesh
from fdsd.layout.placement import Placement, Replicate, Shard, Strided, placement_of

__all__ = ["canonical_order", "read_order", "read_placements"]


def read_placements(mesh: Mesh, values: Sequence[object]) -> tuple[tuple[Placement, ...], tuple[str, ...] | None]:
    """Read one placement for each axis, and the order in which the axes cut if strided shards say it.

    Args:
        mesh: The ranks.
        values: Placements, ours or torch's.

    Returns:
        Placements of ours, and the axes that shard in order (``None`` without strided shards).

    Raises:
        Unsupported: A placement is ``Partial``, or none at all.

    >>> read_placements(Mesh({"dp": 3, "tp": 2}), [Strided(0, 2), Shard(0)])
    ((Shard(0), Shard(0)), ('tp', 'dp'))
    """
    names = mesh.names
    read = [
        placement_of(value, f"Layout: the placement of {name!r}") for name, value in zip(names, values, strict=True)
    ]
    if not any(isinstance(value, Strided) for value in read):
        return tuple([value for value in read if not isinstance(value, Strided)]), None
    placements: list[Placement] = [Replicate()] * len(read)
    order: list[int] = []
    for dim in dict.fromkeys([value.dim for value in read if not isinstance(value, Replicate)]):
        axes = [axis for axis, value in enumerate(read) if not isinstance(value, Replicate) and value.dim == dim]
        found = _order_of_factors(mesh, read, axes)
        order += axes if found is None else found
        for axis in axes:
            placements[axis] = _as_shard(read[axis], literal=found is None)
    return tuple(placements), tuple([names[axis] for axis in order])


def _as_shard(value: Placement | Strided, *, literal: bool) -> Placement:
    if not isinstance(value, Strided):
        return value
    return Shard(value.dim, parts=value.split_factor if literal else None)


def _order_of_factors(mesh: Mesh, read: Sequence[Placement | Strided], axes: Sequence[int]) -> list[int] | None:
    """Find the order in which axes cut one dim: a factor is the number of shards that are there before.

    Right to left, each axis stands behind those axes to its right that have as many shards together as its factor
    says (torch, ``DTensorSpec._maybe_convert_StridedShard_to_shard_order``).
    """
    order: list[int] = []
    for axis in reversed(axes):
        value = read[axis]
        factor = value.split_factor if isinstance(value, Strided) else 1
        shards, at = 1, 0
        while shards != factor and at < len(order):
            shards *= mesh.sizes[order[at]]
            at += 1
        if shards != factor:
            return None
        order.insert(at, axis)
    return order


def read_order(sharding: tuple[str, ...], given: Any, strided: tuple[str, ...] | None) -> tuple[str, ...]:
    """Choose the order in which axes cut: the given one, that of strided shards, or left to right.

    Raises:
        SpecMismatch: The given order names other axes than those that shard, or there are strided shards too.

    >>> read_order(("dp", "tp"), ["tp", "dp"], None)
    ('tp', 'dp')
    """
    if given is None:
        return sharding if strided is None else strided
    if strided is not None:
        raise SpecMismatch("Layout: _StridedShard says in which order the axes cut. Leave order out, or give Shard.")
    if not is_sequence(given) or sorted(map(str, given)) != sorted(sharding):
        raise SpecMismatch(
            f"Layout: order={given!r} does not name the axes that shard, once each: {listing(sharding, sort=False)}."
        )
    return tuple(given)


def canonical_order(names: tuple[str, ...], placements: Sequence[Placement], order: tuple[str, ...]) -> tuple[str, ...]:
    """Write an order so that equal ones are equal: axes that shard different dims stand as in the mesh.

    >>> canonical_order(("a", "b", "c"), [Shard(0), Shard(1), Shard(0)], ("c", "b", "a"))
    ('c', 'b', 'a')
    >>> canonical_order(("a", "b", "c"), [Shard(0), Shard(1), Shard(0)], ("b", "a", "c"))
    ('a', 'b', 'c')
    """
    dims = {name: p.dim for name, p in zip(names, placements, strict=True) if isinstance(p, Shard)}
    if min(dims.values(), default=0) < 0 <= max(dims.values(), default=0):
        return order  # 0 and -2 may be one dim, or two
    queues = {dim: [name for name in order if dims[name] == dim] for dim in set(dims.values())}
    return tuple([queues[dims[name]].pop(0) for name in names if name in dims])
