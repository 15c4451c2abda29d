"""Cutting the shard of a rank out of a leaf of any kind, and joining shards to the whole: views, expressions or specs.

The kind of the leaves decides: tensors give tensors, lazy tensors expressions, specs specs. ``local`` does the same for
tensors alone. What is not here raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fdsd.algebra.apply import apply, constant
from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.ops import Concat, Slice
from fdsd.data.errors import FdsdError, listing, plural
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec, is_exact
from fdsd.layout.layout import Block, Layout
from fdsd.layout.local import local_of, view_in
from fdsd.layout.pieces import Box

__all__ = ["cell_of", "cut_shard", "join_cells", "join_shards", "not_here"]


def cut_shard(leaf: Any, spec: TensorSpec, layout: Layout, rank: int) -> Any:
    """Cut the shard of a rank out of a whole leaf; a view of a tensor, but for fused parts.

    Args:
        leaf: A tensor, a lazy tensor or a spec.
        spec: Its spec.
        layout: How it is cut.
        rank: A rank of the mesh.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> spec = TensorSpec((8,), torch.int8)
    >>> cut_shard(spec, spec, Layout(Mesh({"tp": 2}), [Shard(0, parts=2)]), 1)
    TensorSpec((4,), torch.int8)
    """
    if is_exact(leaf):
        whole: torch.Tensor = leaf
        is_all = layout.local_shape(spec.shape, rank) == spec.shape
        return whole if is_all else local_of(whole.detach(), layout, rank)
    if isinstance(leaf, TensorSpec):
        return spec.with_shape(layout.local_shape(spec.shape, rank))
    made = leaf
    for dim, runs in enumerate(_runs_of(spec, layout, rank)):
        if runs == [(0, spec.shape[dim])]:
            continue
        cuts = [apply(Slice(dim, start, length), made) for start, length in runs]
        made = cuts[0] if len(cuts) == 1 else apply(Concat(dim), *cuts)
    return made


def _runs_of(spec: TensorSpec, layout: Layout, rank: int) -> list[list[tuple[int, int]]]:
    """Give for each dim the indices that a rank holds, as starts and lengths; a run of length 0 for none."""
    blocks = layout.blocks(spec.shape, rank)
    if not blocks:  # an empty shard: some dim has no indices, the others need not be whole
        return [[(0, size)] for size in layout.local_shape(spec.shape, rank)]
    found: list[dict[tuple[int, int], None]] = [{} for _ in spec.shape]
    for block in blocks:
        for runs, start, size in zip(found, block.starts, block.sizes, strict=True):
            runs[start, size] = None
    return [list(runs) for runs in found]


def join_shards(shards: Mapping[int, Any], spec: TensorSpec, layout: Layout) -> Any:
    """Join the shards of ranks to the whole.

    Args:
        shards: The shard of each rank; of ranks that hold the same, one suffices.
        spec: The spec of the whole.
        layout: How it is cut.

    Returns:
        A tensor of fresh memory if all are tensors (the shard itself, where it is the whole), a spec if all are specs,
        else a lazy tensor.

    Raises:
        FdsdError: Some pieces are held by ranks whose shards are not here.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> shards = {0: torch.tensor([1, 2]), 1: torch.tensor([3])}
    >>> join_shards(shards, TensorSpec((3,), torch.int64), Layout(Mesh({"dp": 2}), [Shard(0)]))
    tensor([1, 2, 3])
    """
    for rank, shard in shards.items():
        if layout.local_shape(spec.shape, rank) == spec.shape:
            return shard
    holders: dict[Box, int] = {}
    missing: set[int] = set()
    for box, ranks in layout.holders(spec.shape):
        here = [rank for rank in ranks if rank in shards]
        holders[box] = here[0] if here else ranks[0]
        missing.update([] if here else ranks[:1])
    if missing:
        raise FdsdError(
            f"A tensor {spec} lies over {plural(layout.mesh.size, 'rank')}, and {not_here(missing)}. Work on the state "
            "with group=, or give the shards of all ranks."
        )
    leaves = list(shards.values())
    if leaves and all(isinstance(leaf, TensorSpec) for leaf in leaves):
        return TensorSpec(spec.shape, spec.dtype)
    if leaves and all(map(is_exact, leaves)):
        return _filled(shards, holders, spec, layout)
    return join_cells({box[0]: cell_of(shards[rank], layout, spec, rank, box) for box, rank in holders.items()}, spec)


def not_here(ranks: Iterable[int]) -> str:
    """Say whose shards are missing.

    >>> not_here([3, 1])
    'the shards of ranks 1, 3 are not here'
    """
    some = sorted(ranks)
    return (
        f"the shard of rank {some[0]} is not here"
        if len(some) == 1
        else f"the shards of ranks {listing(some)} are not here"
    )


def _filled(shards: Mapping[int, Any], holders: Mapping[Box, int], spec: TensorSpec, layout: Layout) -> torch.Tensor:
    made = torch.empty(spec.shape, dtype=spec.dtype, device=next(iter(shards.values())).device)
    for (starts, sizes), rank in holders.items():
        part = view_in(shards[rank].detach(), layout.blocks(spec.shape, rank), Region.box(starts, sizes))
        copy_elements(part, made[Block(starts, sizes, starts).place])
    return made


def cell_of(shard: Any, layout: Layout, spec: TensorSpec, rank: int, box: Box) -> Any:
    """Cut a box of the whole tensor out of the lazy shard of a rank that holds it."""
    made = shard
    local = layout.local_shape(spec.shape, rank)
    for block in layout.blocks(spec.shape, rank):
        within = [at - start for at, start in zip(box[0], block.starts, strict=True)]
        if all(w >= 0 and w + n <= size for w, n, size in zip(within, box[1], block.sizes, strict=True)):
            for dim, (at, offset, size) in enumerate(zip(within, block.offset, box[1], strict=True)):
                if size != local[dim]:
                    made = apply(Slice(dim, offset + at, size), made)
    return made


def join_cells(cells: Mapping[tuple[int, ...], Any], spec: TensorSpec) -> Any:
    """Join the cells of a grid, known by where they start, to one lazy tensor; of none, a tensor without elements."""
    return _joined(cells, spec.ndim) if cells else constant(spec, 0)


def _joined(cells: Mapping[tuple[int, ...], Any], ndim: int, begin: tuple[int, ...] = ()) -> Any:
    if len(begin) == ndim:
        return cells[begin]
    dim = len(begin)
    starts = sorted({key[dim] for key in cells if key[:dim] == begin})
    parts = [_joined({k: v for k, v in cells.items() if k[dim] == at}, ndim, (*begin, at)) for at in starts]
    return parts[0] if len(parts) == 1 else apply(Concat(dim), *parts)
