"""A source whose tensors lie over ranks, for tests: a placement for each tensor and this rank's part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import Origin
from fdsd.algebra.spans import view_of
from fdsd.data.errors import FdsdError
from fdsd.data.protocols import Piece
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict
from fdsd.layout import Layout, Pieces
from fdsd.layout.cutting import Cutter, Spot
from fdsd.layout.wants import blocks_of, local_shape_of
from tests.helpers.tensors import carried, slots

__all__ = ["ShardedTensors", "part_of", "shard"]

Placement = Layout | Pieces


def part_of(tensor: torch.Tensor, placement: Placement | None, rank: int) -> torch.Tensor | None:
    """Cut a rank's local tensor out of a whole one, block by block; a copy."""
    shape = tuple(tensor.shape)
    local = local_shape_of(placement, shape, rank)
    if local is None:
        return None
    bits = carried(tensor.detach())
    made = torch.zeros(local, dtype=bits.dtype)
    for block in blocks_of(placement, shape, rank):
        made[block.place] = bits[tuple([slice(a, a + n) for a, n in zip(block.starts, block.sizes, strict=True)])]
    return slots(made, tensor.dtype)


class ShardedTensors:
    """The parts of some tensors that one rank holds.

    Args:
        specs: The specs of the whole tensors.
        placements: How each lies.
        locals_: This rank's local tensors.
        rank: The rank.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        placements: Mapping[str, Placement],
        locals_: Mapping[str, torch.Tensor | None],
        rank: int,
    ) -> None:
        self._specs = specs
        self._placements = placements
        self._locals = dict(locals_)
        self._rank = rank

    def specs(self) -> StateDict[TensorSpec]:
        return StateDict(self._specs)

    def pieces(self, fqn: str) -> Sequence[Piece]:
        placement, shape = self._placements[fqn], self._specs[fqn].shape
        held = placement.holders(shape) if isinstance(placement, Layout) else placement
        return [Piece(Region.box(*box), ranks[0]) for box, ranks in held]

    def placement(self, fqn: str) -> Placement:
        return self._placements[fqn]

    def local(self, fqn: str) -> torch.Tensor | None:
        return self._locals[fqn]

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        blocks = blocks_of(self._placements[fqn], self._specs[fqn].shape, self._rank)
        pieces = Pieces.of(len(region.spans), [((block.starts, block.sizes), [self._rank]) for block in blocks])
        spot = Spot(0, out.dtype, 0, tuple(out.shape), out.stride())
        local = self._locals[fqn]
        for i, part, where in Cutter(pieces).cut(region, spot):
            if i is None or local is None:
                raise FdsdError(f"{fqn!r} is held by other ranks; give group=.")
            moved = [at - start for at, start in zip(blocks[i].offset, blocks[i].starts, strict=True)]
            there = Region(tuple([span.shift(by) for span, by in zip(part.spans, moved, strict=True)]))
            view = out.as_strided(where.shape, where.strides, out.storage_offset() + where.offset)
            copy_elements(view_of(local, there), view)

    def lazy(self, fqn: str) -> Lazy:
        """Give a tensor of this source."""
        return Lazy(Origin(self, fqn, self._specs[fqn]), (), [self._specs[fqn]])


def shard(tensors: Mapping[str, torch.Tensor], placements: Mapping[str, Placement], rank: int) -> ShardedTensors:
    """Cut whole tensors for one rank."""
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    locals_ = {name: part_of(tensor, placements[name], rank) for name, tensor in tensors.items()}
    return ShardedTensors(specs, placements, locals_, rank)
