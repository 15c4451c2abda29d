"""Local tensors in one process: cutting a whole tensor for a place of a layout, and putting it together again.

Views where one box serves. No mesh of processes is needed, and nothing travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from fdsd.algebra.dtypes import copy_elements
from fdsd.data.errors import SpecMismatch, listing
from fdsd.data.region import Region
from fdsd.layout.layout import Block, Layout
from fdsd.layout.mesh import At

__all__ = ["assemble", "local_of", "view_in"]


def local_of(tensor: torch.Tensor, layout: Layout, at: At) -> torch.Tensor:
    """Cut the local tensor of a place out of a whole one; a view of it, but for fused parts.

    Args:
        tensor: The whole tensor.
        layout: How it is laid out.
        at: A rank of the mesh, or a coordinate.

    Raises:
        SpecMismatch: The rank is not in the mesh, or the layout does not fit the shape.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> fused = Layout(Mesh({"tp": 2}), [Shard(0, parts=2)])
    >>> local_of(torch.arange(8), fused, 1)
    tensor([2, 3, 6, 7])
    """
    shape = tuple(tensor.shape)
    local = layout.local_shape(shape, at)
    blocks = layout.blocks(shape, at)
    if not blocks:
        return tensor.new_empty(local)
    if len(blocks) == 1:
        return _box(tensor, *blocks[0][:2])
    made = torch.empty(local, dtype=tensor.dtype, device=tensor.device)
    for block in blocks:
        copy_elements(_box(tensor, block.starts, block.sizes), _box(made, block.offset, block.sizes))
    return made


def assemble(locals_: Mapping[int, torch.Tensor], layout: Layout, shape: Iterable[int]) -> torch.Tensor:
    """Put a whole tensor together from the local tensors of the ranks.

    Args:
        locals_: The local tensor of each rank of the mesh; of ranks that hold the same, the first is read.
        layout: How it is laid out.
        shape: The shape of the whole tensor.

    Raises:
        SpecMismatch: Ranks are missing, or a local tensor has another shape than the layout says.

    Law: ``assemble({r: local_of(x, l, r) for r in l.mesh.ranks}, l, x.shape)`` equals ``x``.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> layout = Layout(Mesh({"dp": 2}), [Shard(0)])
    >>> assemble({0: torch.tensor([1, 2]), 1: torch.tensor([3])}, layout, (3,))
    tensor([1, 2, 3])
    """
    shape = tuple(shape)
    if missing := [rank for rank in layout.mesh.ranks if rank not in locals_]:
        raise SpecMismatch(f"assemble: no local tensor of the ranks {listing(missing)}; the layout is {layout}.")
    wrong = [
        f"rank {rank} has {tuple(locals_[rank].shape)} and should have {local}"
        for rank in layout.mesh.ranks
        if tuple(locals_[rank].shape) != (local := layout.local_shape(shape, rank))
    ]
    if wrong:
        raise SpecMismatch(f"assemble: local shapes that {layout} does not give for {shape}: {listing(wrong)}.")
    first = locals_[layout.mesh.ranks[0]]
    made = torch.empty(shape, dtype=first.dtype, device=first.device)
    for region, ranks in layout.holders(shape):
        rank = ranks[0]
        part = view_in(locals_[rank], layout.blocks(shape, rank), Region.box(*region))
        copy_elements(part, _box(made, *region))
    return made


def view_in(local: torch.Tensor, blocks: Sequence[Block], region: Region) -> torch.Tensor:
    """View the box of a global tensor that lies within one block of a local tensor.

    Args:
        local: The local tensor.
        blocks: The boxes that it holds.
        region: A box of the global tensor.

    Raises:
        SpecMismatch: No block holds it wholly.

    >>> view_in(torch.tensor([10, 11, 12]), [Block((4,), (3,), (0,))], Region.box((5,), (2,)))
    tensor([11, 12])
    """
    starts, sizes = [span.start for span in region.spans], region.shape
    for block in blocks:
        within = [at - start for at, start in zip(starts, block.starts, strict=True)]
        if all(w >= 0 and w + n <= size for w, n, size in zip(within, sizes, block.sizes, strict=True)):
            return _box(local, [w + at for w, at in zip(within, block.offset, strict=True)], sizes)
    raise SpecMismatch(f"No block of the local tensor holds the box at {tuple(starts)} of {sizes}.")


def _box(tensor: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    return tensor[tuple([slice(at, at + size) for at, size in zip(starts, sizes, strict=True)])]
