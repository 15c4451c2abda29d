"""How random meshes, layouts and tables of layouts are drawn; hypothesis is imported here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from fdsd.data.spec import spec_of
from fdsd.data.statedict import StateDict
from fdsd.data.ties import tie_key
from fdsd.layout.layout import Layout
from fdsd.layout.mesh import Mesh
from fdsd.layout.placement import Placement, Replicate, Shard

__all__ = ["any_layouts", "layouts_for", "meshes", "tables_for"]

AXES = ("dp", "tp", "ep")
Shape = tuple[int, ...]


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 3, max_size: int = 4) -> Mesh:
    """Meshes of up to 24 ranks, which are any numbers in any order."""
    sizes = draw(st.lists(st.integers(1, max_size), max_size=max_axes))
    while math.prod(sizes) > 24:
        sizes[sizes.index(max(sizes))] -= 1
    num = math.prod(sizes)
    ranks: Sequence[int] | None = None
    if draw(st.booleans()):
        ranks = draw(st.permutations(range(num + 2)))[:num]
    return Mesh(list(zip(AXES, sizes, strict=False)), ranks)


@st.composite
def layouts_for(draw: st.DrawFn, shape: Shape, mesh: Mesh | None = None) -> Layout:
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
        parts = draw(_parts(shape[dim], by_size=dim not in seen))  # later axes cut what differs from rank to rank
        seen.add(dim)
        placements[name] = Shard(draw(st.sampled_from([dim, dim - len(shape)])), parts=parts)
    sharding = [name for name in order if isinstance(placements[name], Shard)]
    return Layout(mesh, placements, order=sharding)


def _parts(size: int, *, by_size: bool) -> st.SearchStrategy[Any]:
    cuts = st.lists(st.integers(0, size), max_size=2).map(sorted)
    sizes = cuts.map(lambda c: [b - a for a, b in itertools.pairwise([0, *c, size])])
    return st.one_of(st.none(), st.integers(1, 3), *([sizes] if by_size else []))


@st.composite
def any_layouts(draw: st.DrawFn, mesh: Mesh | None = None) -> Layout:
    """Layouts that fit every tensor of three or more dims."""
    mesh = draw(meshes()) if mesh is None else mesh
    placements: list[Placement] = [
        draw(st.one_of(st.just(Replicate()), st.builds(Shard, st.integers(-3, 2)))) for _ in mesh.names
    ]
    sharding = [name for name, p in zip(mesh.names, placements, strict=True) if isinstance(p, Shard)]
    return Layout(mesh, placements, order=draw(st.permutations(sharding)))


@st.composite
def tables_for(draw: st.DrawFn, state: Mapping[str, Any], mesh: Mesh | None = None) -> StateDict[Layout]:
    """A layout for each tensor of a state."""
    made: dict[str, Layout] = {}
    tied: dict[Hashable, Layout] = {}
    for name, leaf in state.items():
        spec, key = spec_of(leaf), tie_key(leaf)
        if spec is None:
            continue
        made[name] = tied[key] if key is not None and key in tied else draw(layouts_for(spec.shape, mesh))
        if key is not None:
            tied[key] = made[name]
    return StateDict(made)
