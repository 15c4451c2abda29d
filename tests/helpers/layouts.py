"""Strategies of meshes, layouts and moves, and what is simple to say of them element by element. No test lives here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from hypothesis import strategies as st

from fdsd.layout import Block, Layout, Mesh, Replicate, Shard
from fdsd.layout.placement import Placement

AXES = ("dp", "tp", "ep")
Shape = tuple[int, ...]


def shapes(max_ndim: int = 3, max_size: int = 9) -> st.SearchStrategy[Shape]:
    return st.lists(st.integers(0, max_size), max_size=max_ndim).map(tuple)


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 3, max_size: int = 4) -> Mesh:
    """Meshes of up to 24 ranks, which are any numbers in any order."""
    sizes = draw(st.lists(st.integers(1, max_size), max_size=max_axes))
    while torch.Size(sizes).numel() > 24:
        sizes[sizes.index(max(sizes))] -= 1
    num = torch.Size(sizes).numel()
    ranks = draw(st.none() | st.permutations(range(num + 2)).map(lambda some: some[:num]))
    return Mesh(list(zip(AXES, sizes, strict=False)), ranks)


@st.composite
def layouts(draw: st.DrawFn, shape: Shape, mesh: Mesh | None = None) -> Layout:
    """Layouts of every kind that fit a shape: orders, negative dims, fused parts by number and by size."""
    mesh = draw(meshes()) if mesh is None else mesh
    order = draw(st.permutations(mesh.names))
    placements: dict[str, Placement] = {}
    seen: set[int] = set()
    for name in order:
        if not shape or draw(st.booleans()):
            placements[name] = Replicate()
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        choices: list[st.SearchStrategy[object]] = [st.none(), st.integers(1, 3)]
        if dim not in seen:  # later axes cut what differs from rank to rank
            cuts = st.lists(st.integers(0, shape[dim]), max_size=2).map(sorted)
            choices.append(cuts.map(lambda c, n=shape[dim]: [b - a for a, b in itertools.pairwise([0, *c, n])]))
        seen.add(dim)
        parts = draw(st.one_of(choices))
        placements[name] = Shard(draw(st.sampled_from([dim, dim - len(shape)])), parts=parts)  # type: ignore[arg-type]
    sharding = [name for name in order if isinstance(placements[name], Shard)]
    return Layout(mesh, placements, order=sharding)


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
