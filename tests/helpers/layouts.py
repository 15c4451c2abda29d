"""Strategies of meshes, layouts and moves, and what is simple to say of them element by element. No test lives here."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hypothesis import strategies as st

from fdsd.layout import Block, Layout, Shard
from fdsd.testing._layouts import layouts_for as layouts
from fdsd.testing._layouts import meshes

__all__ = ["by_hand", "from_blocks", "indices", "layouts", "meshes", "shapes", "states_of"]

Shape = tuple[int, ...]


def shapes(max_ndim: int = 3, max_size: int = 9) -> st.SearchStrategy[Shape]:
    return st.lists(st.integers(0, max_size), max_size=max_ndim).map(tuple)


def indices(shape: Shape) -> torch.Tensor:
    """Give a tensor whose elements are all different: each one's place."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def by_hand(tensor: torch.Tensor, layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """Shard a tensor with torch's own ``chunk`` and ``cat``, axis after axis."""
    names = layout.mesh.names
    for name in layout.order:
        axis = names.index(name)
        placement = layout.placements[axis]
        assert isinstance(placement, Shard)
        dim, num = placement.dim, layout.mesh.sizes[axis]
        size = tensor.shape[dim]
        if isinstance(placement.parts, tuple):
            parts = torch.split(tensor, list(placement.parts), dim)
        elif placement.parts is None or not size:
            parts = (tensor,)
        else:
            parts = torch.chunk(tensor, placement.parts, dim)
        taken = [_chunk(part, num, dim, coordinate[axis]) for part in parts]
        tensor = torch.cat(taken, dim)
    return tensor


def _chunk(tensor: torch.Tensor, num: int, dim: int, which: int) -> torch.Tensor:
    chunks = torch.chunk(tensor, num, dim) if tensor.shape[dim] else ()
    return chunks[which] if which < len(chunks) else tensor.narrow(dim, 0, 0)


def from_blocks(tensor: torch.Tensor, blocks: tuple[Block, ...], local: Shape) -> torch.Tensor:
    """Build a local tensor from its boxes; what they leave out is -1."""
    made = torch.full(local, -1, dtype=tensor.dtype)
    for block in blocks:
        box = tuple([slice(at, at + size) for at, size in zip(block.starts, block.sizes, strict=True)])
        made[block.place] = tensor[box]
    return made


def states_of(
    tensors: Mapping[str, torch.Tensor], layout_of: Mapping[str, Layout]
) -> dict[int, dict[str, torch.Tensor]]:
    """Cut whole tensors for all ranks, by hand."""
    made: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layout = layout_of[name]
        for coordinate, rank in zip(layout.mesh.coordinates(), layout.mesh.ranks, strict=True):
            made.setdefault(rank, {})[name] = by_hand(tensor, layout, coordinate).clone()
    return made
