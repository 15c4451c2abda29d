"""`Views`: where the overlaps of one structure lie in the memory of one rank, as strided views; worked out once.

Integers only, until a tensor is given. Messages and names are unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fdsd.algebra.dtypes import movable
from fdsd.data.errors import SpecMismatch
from fdsd.data.region import Region
from fdsd.data.strides import row_major
from fdsd.layout.cutting import Spot
from fdsd.layout.layout import Block
from fdsd.layout.wants import Target, blocks_of, local_shape_of
from fdsd.layout.wiring import Recipe, Wiring

__all__ = ["ALL", "Part", "Views"]

ALL = -1
"""The part of an overlap that is all of it."""

_Strided = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a view, relative to a tensor."""

_Found = tuple[tuple[int, ...], "_Strided | None"]
"""The strides of a tensor, and a view of it; ``None`` for all of it."""

_SHORT = 1 << 14
"""Parts of fewer elements are copied many at once."""

_PLAIN: dict[torch.dtype, bool] = {}


def _found(memory: torch.Tensor, view: _Strided) -> _Found:
    is_all = view == (memory.shape, memory.stride(), 0)
    return memory.stride(), None if is_all else view


def _is_plain(dtype: torch.dtype) -> bool:
    """Whether every kernel that moves elements knows a dtype."""
    if dtype not in _PLAIN:
        _PLAIN[dtype] = movable(torch.empty(0, dtype=dtype)).dtype is dtype
    return _PLAIN[dtype]


class Part:
    """A part of an overlap: what it is of its source, and where it goes. There are few of them, used very often.

    Attributes:
        region: The region of the source tensor.
        spot: Where it goes, in the buffers of the recipe.
        origin: The source tensor.
        wire: The dtype in which it travels.
        shape: Its shape on the way.
        strides: Its strides on the way.
        is_plain: Whether every kernel that moves elements knows the dtypes on both of its sides.
        is_short: Whether it had better be copied together with others.
        nbytes: Its bytes on the way.
    """

    __slots__ = (
        "_source",
        "_target",
        "_views",
        "is_plain",
        "is_short",
        "nbytes",
        "origin",
        "region",
        "shape",
        "spot",
        "strides",
        "wire",
    )

    def __init__(self, views: Views, overlap: int, region: Region, spot: Spot) -> None:
        wiring = views.wiring
        self._views = views
        self.region = region
        self.spot = spot
        self.origin: int = wiring.origins[overlap]
        self.wire = wiring.wires[overlap]
        self.shape = region.shape
        self.strides = row_major(region.shape)
        self.is_plain = _is_plain(spot.dtype) and _is_plain(wiring.expression.origins[self.origin].dtype)
        self.is_short = region.numel < _SHORT
        self.nbytes = region.numel * self.wire.itemsize
        self._source: _Found | None = None
        self._target: _Found | None = None

    def source(self, memory: torch.Tensor) -> torch.Tensor:
        """View it in the memory of its source tensor."""
        strides = memory.stride()
        found = self._source
        if found is None or found[0] != strides:
            found = self._source = _found(memory, self._views.find(self.origin, self.region, strides))
        at = found[1]
        return memory if at is None else memory.as_strided(at[0], at[1], at[2] + memory.storage_offset())

    def target(self, memory: torch.Tensor) -> torch.Tensor:
        """View where it goes, in the memory of the result, or of the buffer that it goes to."""
        strides = memory.stride()
        found = self._target
        if found is None or found[0] != strides:
            found = self._target = _found(memory, self._views.place(self.spot, strides))
        at = found[1]
        return memory if at is None else memory.as_strided(at[0], at[1], at[2] + memory.storage_offset())


def _row(view: _Strided, dtype: torch.dtype) -> int:
    """Give the first byte of a view whose elements lie in one row; -1 if they do not."""
    shape, steps, offset = view
    is_row = all(n == 1 or step == own for n, step, own in zip(shape, steps, row_major(shape), strict=True))
    return offset * dtype.itemsize if is_row else -1


class Views:
    """The views of one rank.

    Args:
        wiring: The structure.
        rank: The rank.
        placements: How the source tensors lie, as this rank states it; ``None`` if it does not know them.

    Attributes:
        wiring: The structure.
        recipe: What this rank wants, if anything.
        keeps: What it wants and holds itself.
        num_blocks: The buffers below this number are the result's blocks.
        num_sources: How many source tensors there are.
    """

    def __init__(self, wiring: Wiring, rank: int, placements: Sequence[Target] | None) -> None:
        self.wiring = wiring
        which = wiring.recipe_of.get(rank)
        self.recipe: Recipe | None = None if which is None else wiring.recipes[which]
        self._blocks: Sequence[Block] = () if self.recipe is None else self.recipe.want.blocks
        self.num_blocks = len(self._blocks)
        self._specs = wiring.expression.origins
        self.num_sources = len(self._specs)
        self._held: list[Sequence[Block]] = []
        self._shapes: list[tuple[int, ...] | None] = []
        for spec, placement in zip(self._specs, placements or (), strict=False):
            self._held.append(blocks_of(placement, spec.shape, rank))
            self._shapes.append(local_shape_of(placement, spec.shape, rank))
        self._parts: dict[tuple[int, int], Part] = {}
        self.keeps: tuple[Part, ...] = tuple([self.part(overlap, ALL) for overlap in wiring.keeps.get(rank, ())])

    def part(self, overlap: int, part: int) -> Part:
        """Give a part of an overlap."""
        found = self._parts.get((overlap, part))
        if found is not None:
            return found
        wiring = self.wiring
        if part == ALL:
            self._parts[overlap, ALL] = Part(self, overlap, wiring.regions[overlap], wiring.spots[overlap])
        else:  # all of them: to cut an overlap takes as long as it has parts
            for i, (region, spot) in enumerate(wiring.parts(overlap)):
                self._parts[overlap, i] = Part(self, overlap, region, spot)
        return self._parts[overlap, part]

    def source_row(self, part: Part) -> int:
        """Give the first byte of a part in its source tensor, if that is contiguous; -1 if it is no row of bytes."""
        shape = self._shapes[part.origin] if part.origin < len(self._shapes) else None
        if shape is None or not part.is_plain or self._specs[part.origin].dtype != part.wire:
            return -1
        return _row(self.find(part.origin, part.region, row_major(shape)), part.wire)

    def target_row(self, part: Part) -> int:
        """Give the first byte of a part in its result, if that is contiguous; -1 if it is no row of bytes."""
        if self.recipe is None or not part.is_plain or part.spot.dtype != part.wire:
            return -1
        if part.spot.buffer >= self.num_blocks:
            return -1
        return _row(self.place(part.spot, row_major(self.recipe.want.shape)), part.wire)

    def check(self, origin: int, memory: torch.Tensor) -> None:
        """Raise if the memory of a source tensor is not what its placement says.

        Raises:
            SpecMismatch: It has another shape or dtype, or no data.
        """
        spec, shape = self._specs[origin], self._shapes[origin]
        if memory.shape != shape or memory.dtype != spec.dtype:
            raise SpecMismatch(
                f"the local tensor of its source has {memory.dtype} and the shape {tuple(memory.shape)}; by its layout "
                f"it has {spec.dtype} and {shape}."
            )
        if memory.is_meta:
            raise SpecMismatch("its source is on the meta device and has no data. Materialize the module first.")

    def find(self, origin: int, region: Region, strides: tuple[int, ...]) -> _Strided:
        """Find a region of a source tensor, within one block of this rank's local tensor of such strides.

        Raises:
            SpecMismatch: This rank does not hold it.
        """
        for block in self._held[origin]:
            if all(
                start <= span.start and span.start + span.extent < start + size
                for span, start, size in zip(region.spans, block.starts, block.sizes, strict=True)
            ):
                steps, offset = region.strides(strides)
                moved = [at - start for at, start in zip(block.offset, block.starts, strict=True)]
                return region.shape, steps, offset + sum([m * s for m, s in zip(moved, strides, strict=True)])
        raise SpecMismatch(f"this rank does not hold the {region} of its source.")

    def spot(self, spot: Spot, memory: torch.Tensor) -> torch.Tensor:
        """View a spot in the memory of its buffer: the result, for a block of it."""
        shape, strides, offset = self.place(spot, memory.stride())
        return memory.as_strided(shape, strides, offset + memory.storage_offset())

    def place(self, spot: Spot, strides: tuple[int, ...]) -> _Strided:
        """Find a spot of a block, which counts in row-major order, in memory with other strides.

        Each dim of a spot moves along one dim of the block: it has one digit, if written in the sizes of the block.
        """
        if spot.buffer >= self.num_blocks:
            return spot.shape, spot.strides, spot.offset
        block = self._blocks[spot.buffer]
        offset = sum([at * stride for at, stride in zip(block.offset, strides, strict=True)])
        offset += _carry(spot.offset, block.sizes, strides)
        steps = [
            0 if size == 1 else _carry(step, block.sizes, strides)
            for size, step in zip(spot.shape, spot.strides, strict=True)
        ]
        return spot.shape, tuple(steps), offset


def _carry(number: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Carry an offset in row-major memory over to memory with other strides."""
    made = 0
    for base, stride in zip(row_major(sizes), strides, strict=True):
        digit, number = divmod(number, base)
        made += digit * stride
    return made
