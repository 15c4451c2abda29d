"""ShardedTensors, as FSDP1 and recommendation models make them: sources of lazy tensors, and made of local tensors.

torch's private names for ShardedTensors are in this module alone. Nothing is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fdsd.algebra.apply import apply
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import Slice
from fdsd.comms.boxes import BoxSource
from fdsd.data.errors import SpecMismatch, Unsupported, listing, plural
from fdsd.data.spec import TensorSpec, is_exact
from fdsd.layout.joining import join_cells
from fdsd.layout.layout import Layout
from fdsd.layout.pieces import Box, Pieces, intersect
from fdsd.layout.placed import Placement

__all__ = ["lazy_sharded_tensor", "make_sharded_tensor", "pieces_of_sharded_tensor", "spec_of_sharded_tensor"]


def pieces_of_sharded_tensor(tensor: Any) -> Pieces:
    """Say which rank of the default process group holds which box of a ShardedTensor.

    Args:
        tensor: A ShardedTensor.

    Raises:
        Unsupported: A shard lies on a worker of torch's RPC, which has no rank.
    """
    return Pieces.of(spec_of_sharded_tensor(tensor).ndim, [(box, [rank]) for box, rank in _boxes_of(tensor)])


def spec_of_sharded_tensor(tensor: Any) -> TensorSpec:
    """Give the spec of a ShardedTensor, without the warning that torch has for its attributes."""
    metadata = tensor.metadata()
    return TensorSpec(tuple(metadata.size), metadata.tensor_properties.dtype)


def _boxes_of(tensor: Any) -> list[tuple[Box, int]]:
    found: list[tuple[Box, int]] = []
    for shard in tensor.metadata().shards_metadata:
        rank = None if shard.placement is None else shard.placement.rank()
        if rank is None:
            raise Unsupported(
                f"A ShardedTensor has a shard on {shard.placement}, and not on a rank: what lies on workers of RPC "
                "cannot be rewritten. Gather it first."
            )
        found.append(((tuple(shard.shard_offsets), tuple(shard.shard_sizes)), rank))
    return found


def lazy_sharded_tensor(tensor: Any) -> Lazy:
    """Make a lazy tensor of a ShardedTensor; it reads the local shards when it is materialized.

    Args:
        tensor: A ShardedTensor; a rank may have any number of shards.

    Raises:
        Unsupported: A shard has no rank, or is of a class that fdsd does not know.
    """
    spec = spec_of_sharded_tensor(tensor)
    boxes = _boxes_of(tensor)
    local = {
        tuple(shard.metadata.shard_offsets): _plain(shard.tensor)
        for shard in tensor._local_shards
        if shard.tensor.numel()
    }
    ranks = [rank for (_, sizes), rank in boxes if 0 not in sizes]
    if len(set(ranks)) == len(ranks):
        starts, here = next(iter(local.items()), ((0,) * spec.ndim, None))
        return BoxSource(spec, pieces_of_sharded_tensor(tensor), here, starts).lazy()
    return _joined(spec, [(box, rank) for box, rank in boxes if 0 not in box[1]], local)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if not is_exact(tensor):
        raise Unsupported(
            f"A shard of a ShardedTensor is of class {type(tensor).__module__}.{type(tensor).__qualname__}: fdsd does "
            "not know how its elements are laid out. Convert it to a plain tensor first."
        )
    return tensor.detach()


def _joined(spec: TensorSpec, boxes: list[tuple[Box, int]], local: dict[tuple[int, ...], torch.Tensor]) -> Lazy:
    """Join the shards of ranks that have several: a source each, cut along a grid that goes through all edges."""
    cells: dict[tuple[int, ...], Any] = {}
    edges = [
        sorted({edge for (starts, sizes), _ in boxes for edge in (starts[dim], starts[dim] + sizes[dim])})
        for dim in range(spec.ndim)
    ]
    for box, rank in boxes:
        starts, sizes = box
        here = local.get(starts) if rank == dist.get_rank() else None
        source = BoxSource(spec.with_shape(sizes), Pieces.whole(sizes, [rank]), here, (0,) * spec.ndim)
        shard = source.lazy()
        for cell in _cells(edges, box):
            made: Any = shard
            for dim, (at, size) in enumerate(zip(*cell, strict=True)):
                if size != sizes[dim]:
                    made = apply(Slice(dim, at - starts[dim], size), made)
            cells[cell[0]] = made
    joined: Lazy = join_cells(cells, spec)
    return joined


def _cells(edges: list[list[int]], box: Box) -> Iterator[Box]:
    for corner in itertools.product(*[itertools.pairwise(some) for some in edges]):
        cell = tuple([a for a, _ in corner]), tuple([b - a for a, b in corner])
        if intersect(cell, box) == cell:
            yield cell


def make_sharded_tensor(
    local: torch.Tensor | None, placement: Placement, spec: TensorSpec, process_group: Any = None
) -> Any:
    """Make a ShardedTensor of the shard of this rank, which it shares; nothing is sent or checked elsewhere.

    Args:
        local: The shard of this rank; ``None`` or an empty tensor if it has none.
        placement: Which rank of the default process group holds which box; one rank a box, one box a rank.
        spec: Shape and dtype of the whole tensor.
        process_group: The group of those ranks; the default group if left out.

    Raises:
        Unsupported: A box is held by several ranks, or a rank holds several.
        SpecMismatch: The shard has not the shape of its box, or not the dtype of ``spec``.

    Law: ``pieces_of_sharded_tensor(make_sharded_tensor(x, pieces, spec)) == pieces``.
    """
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard

    pieces = placement.holders(spec.shape) if isinstance(placement, Layout) else placement
    here = _own_box(local, pieces, spec)
    device = "cpu" if local is None else str(local.device)
    shards = [ShardMetadata(list(at), list(size), f"rank:{ranks[0]}/{device}") for (at, size), ranks in pieces]
    properties = TensorProperties(dtype=spec.dtype, pin_memory=local is not None and local.is_pinned())
    metadata = ShardedTensorMetadata(shards, torch.Size(spec.shape), properties)
    own = [Shard(local.detach(), shards[here])] if here is not None and local is not None else []
    made: Any = ShardedTensor
    return made._init_from_local_shards_and_global_metadata(own, metadata, process_group=process_group)


def _own_box(local: torch.Tensor | None, pieces: Pieces, spec: TensorSpec) -> int | None:
    """Find the piece of this rank, and check its shard."""
    if several := [some for _, some in pieces if len(some) != 1]:
        raise Unsupported(
            f"make_sharded_tensor: each box of a ShardedTensor lies on one rank, and a tensor {spec} would have boxes "
            f"on the ranks {listing(several)}. Make a DTensor, or choose one rank for each box."
        )
    ranks = [some[0] for _, some in pieces]
    if twice := {rank for rank in ranks if ranks.count(rank) > 1}:
        raise Unsupported(
            f"make_sharded_tensor: {plural(len(twice), 'rank')} would have several boxes of a tensor {spec}: "
            f"{listing(twice)}. Give each rank one."
        )
    rank = dist.get_rank()
    here = ranks.index(rank) if rank in ranks else None
    wanted = None if here is None else pieces.box(here)[1]
    held = None if local is None or not local.numel() else tuple(local.shape)
    if held != wanted or (local is not None and held and local.dtype != spec.dtype):
        told = "nothing" if local is None else str(TensorSpec(tuple(local.shape), local.dtype))
        should = "nothing" if wanted is None else str(spec.with_shape(wanted))
        raise SpecMismatch(
            f"make_sharded_tensor: rank {rank} holds {told}, and by the pieces of a tensor {spec} should hold {should}."
        )
    return here
