"""`Views`: where the overlaps of one structure lie in the memory of one rank, as strided views; worked out once.

Integers only, until a tensor is given. Messages and names are unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fdsd.data.errors import SpecMismatch
from fdsd.data.region import Region
from fdsd.data.strides import row_major
from fdsd.layout.cutting import Spot
from fdsd.layout.layout import Block
from fdsd.layout.wants import Target, blocks_of, local_shape_of
from fdsd.layout.wiring import Recipe, Wiring

__all__ = ["Views"]

Strided = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a view, relative to a tensor."""


class Views:
    """The views of one rank.

    Args:
        wiring: The structure.
        rank: The rank.
        placements: How the source tensors lie, as this rank states it; ``None`` if it does not know them.
    """

    def __init__(self, wiring: Wiring, rank: int, placements: Sequence[Target] | None) -> None:
        self.wiring = wiring
        which = wiring.recipe_of.get(rank)
        self.recipe: Recipe | None = None if which is None else wiring.recipes[which]
        self.keeps: tuple[int, ...] = tuple(wiring.keeps.get(rank, ()))
        self._blocks: Sequence[Block] = () if self.recipe is None else self.recipe.want.blocks
        specs = wiring.expression.origins
        self._held: list[Sequence[Block]] = []
        self._shapes: list[tuple[int, ...] | None] = []
        for spec, placement in zip(specs, placements or (), strict=False):
            self._held.append(blocks_of(placement, spec.shape, rank))
            self._shapes.append(local_shape_of(placement, spec.shape, rank))
        self._parts: dict[int, list[tuple[Region, Spot]]] = {}
        self._packed: dict[tuple[int, int], tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]] = {}
        self._sources: dict[tuple[int, int, tuple[int, ...]], Strided] = {}
        self._targets: dict[tuple[int, int, tuple[int, ...]], Strided] = {}

    def part(self, overlap: int, part: int) -> tuple[Region, Spot]:
        """Give the region of a part of an overlap, and where it goes; of part -1: of all of it."""
        if part < 0:
            return self.wiring.regions[overlap], self.wiring.spots[overlap]
        found = self._parts.get(overlap)
        if found is None:
            found = self._parts[overlap] = self.wiring.parts(overlap)
        return found[part]

    def packed(self, overlap: int, part: int) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
        """Give the dtype, shape and strides of a part of an overlap on the way."""
        found = self._packed.get((overlap, part))
        if found is None:
            shape = self.part(overlap, part)[0].shape
            found = self._packed[overlap, part] = self.wiring.wires[overlap], shape, row_major(shape)
        return found

    def check(self, origin: int, memory: torch.Tensor) -> None:
        """Raise if the memory of a source tensor is not what its placement says.

        Raises:
            SpecMismatch: It has another shape or dtype.
        """
        spec, shape = self.wiring.expression.origins[origin], self._shapes[origin]
        if tuple(memory.shape) != shape or memory.dtype != spec.dtype:
            raise SpecMismatch(
                f"the local tensor of its source has {memory.dtype} and the shape {tuple(memory.shape)}; by its layout "
                f"it has {spec.dtype} and {shape}."
            )
        if memory.is_meta:
            raise SpecMismatch("its source is on the meta device and has no data. Materialize the module first.")

    def source(self, overlap: int, part: int, memory: torch.Tensor) -> torch.Tensor:
        """View a part of an overlap in the memory of its source tensor."""
        strides = memory.stride()
        key = overlap, part, strides
        found = self._sources.get(key)
        if found is None:
            found = self._sources[key] = self._source(overlap, part, strides)
        return memory.as_strided(found[0], found[1], found[2] + memory.storage_offset())

    def _source(self, overlap: int, part: int, strides: tuple[int, ...]) -> Strided:
        region, _ = self.part(overlap, part)
        for block in self._held[self.wiring.origins[overlap]]:
            if all(
                start <= span.start and span.start + span.extent < start + size
                for span, start, size in zip(region.spans, block.starts, block.sizes, strict=True)
            ):
                steps, offset = region.strides(strides)
                moved = [at - start for at, start in zip(block.offset, block.starts, strict=True)]
                return region.shape, steps, offset + sum([m * s for m, s in zip(moved, strides, strict=True)])
        raise SpecMismatch(f"this rank does not hold the {region} of its source.")

    def target(self, overlap: int, part: int, memory: torch.Tensor) -> torch.Tensor:
        """View where a part of an overlap goes in this rank's result, or in the buffer that it goes to."""
        strides = memory.stride()
        key = overlap, part, strides
        found = self._targets.get(key)
        if found is None:
            found = self._targets[key] = self._place(self.part(overlap, part)[1], strides)
        return memory.as_strided(found[0], found[1], found[2] + memory.storage_offset())

    def spot(self, spot: Spot, memory: torch.Tensor) -> torch.Tensor:
        """View a spot in the memory of its buffer: the result, for a block of it."""
        shape, strides, offset = self._place(spot, memory.stride())
        return memory.as_strided(shape, strides, offset + memory.storage_offset())

    def is_result(self, buffer: int) -> bool:
        """Whether a buffer is a part of the result."""
        return buffer < len(self._blocks)

    def _place(self, spot: Spot, strides: tuple[int, ...]) -> Strided:
        """Find a spot of a block, which counts in row-major order, in memory with other strides.

        Each dim of a spot moves along one dim of the block: it has one digit, if written in the sizes of the block.
        """
        if spot.buffer >= len(self._blocks):
            return spot.shape, spot.strides, spot.offset
        block = self._blocks[spot.buffer]
        offset = sum([at * stride for at, stride in zip(block.offset, strides, strict=True)])
        offset += _carry(spot.offset, block.sizes, strides)
        steps = [0 if size == 1 else _carry(s, block.sizes, strides) for size, s in zip(*spot[3:], strict=True)]
        return spot.shape, tuple(steps), offset


def _carry(number: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Carry an offset in row-major memory over to memory with other strides."""
    made = 0
    for base, stride in zip(row_major(sizes), strides, strict=True):
        digit, number = divmod(number, base)
        made += digit * stride
    return made
