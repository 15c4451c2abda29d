"""FSDP1 over tensor parallelism: how a parameter lies of whose DTensor FSDP has flattened the local tensor.

An element lies on the ranks of one coordinate of tensor parallelism, in an interval of the flattened local tensor that
they cut among them. Only meshes are read here; what a flat parameter is, ``fsdp1`` knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

from attrs import field, frozen

from fdsd.comms.mesh_ranks import is_ascending, mesh_of
from fdsd.data.errors import Unsupported, listing
from fdsd.layout.flattening import Flattening
from fdsd.layout.layout import Layout
from fdsd.layout.mesh import Coordinate, Mesh

__all__ = ["Across", "Meshes", "Place", "places_of", "shown_placements"]

_REMEDY = "Use fully_shard() over tensor parallelism, whose parameters say how they lie."


@frozen
class Place:
    """Where a parameter lies in the flat parameter of one coordinate of tensor parallelism.

    Args:
        start: Where it begins.
        numel: How many elements have been flattened.
        shard: The size of a shard of the flat parameter.
    """

    start: int
    numel: int
    shard: int

    def interval(self, coordinate: int) -> tuple[int, int]:
        """Say where in what has been flattened the part of a shard begins and ends.

        >>> Place(3, 4, 5).interval(0), Place(3, 4, 5).interval(1), Place(3, 4, 5).interval(2)
        ((0, 2), (2, 4), (4, 4))
        """
        low, high = coordinate * self.shard - self.start, (coordinate + 1) * self.shard - self.start
        begin = min(max(low, 0), self.numel)
        return begin, max(begin, min(high, self.numel))


def places_of(numels: Sequence[int], alignment: int, num_shards: int) -> list[Place]:
    """Say where parameters lie in a flat parameter, by the rules of FSDP.

    Args:
        numels: How many elements of each are flattened.
        alignment: Each begins at a multiple of this; 0 if there is no padding between them.
        num_shards: The number of shards.

    >>> places_of([3, 2], 4, 2)
    [Place(start=0, numel=3, shard=3), Place(start=4, numel=2, shard=3)]
    """
    starts: list[int] = []
    total = 0
    for numel in numels:
        starts.append(total + (-total % alignment if alignment else 0))
        total = starts[-1] + numel
    shard = -(-total // num_shards)
    return [Place(start, numel, shard) for start, numel in zip(starts, numels, strict=True)]


@frozen(eq=False)
class Across:
    """How a parameter lies over data and tensor parallelism.

    Args:
        mesh: The DeviceMesh of both, over which torch shows it.
        shape: The shape of the whole.
        layout: How torch shows it.
        shard_axis: The axis of the mesh over which FSDP shards.
        tensor_axis: The axis of tensor parallelism.
        tensor_placement: torch's placement over that axis.
        parts: The shape of what is flattened at each coordinate along it.
        places: Where that lies.
    """

    mesh: Any = field(repr=False)
    shape: tuple[int, ...]
    layout: Layout
    shard_axis: int
    tensor_axis: int
    tensor_placement: Any
    parts: tuple[tuple[int, ...], ...]
    places: tuple[Place, ...]

    def flattening(self, order: tuple[int, ...]) -> Flattening:
        """Say how the whole is flattened: part by part.

        Args:
            order: The dims in the order in which elements of each part lie; empty for their own.
        """
        if not is_cut(self.tensor_placement):
            return Flattening(order)
        dim: int = self.tensor_placement.dim % len(self.shape)
        return Flattening(order, dim, tuple([part[dim] for part in self.parts]))

    def is_at(self, start: int, rank: int) -> bool:
        """Tell whether the place of a rank of the mesh begins where FSDP says it does."""
        coordinate = self.layout.mesh.coordinate_at(rank)
        return coordinate is not None and self.places[coordinate[self.tensor_axis]].start == start

    def interval(self, coordinate: Coordinate) -> tuple[int, int]:
        """Say where in the flattened whole the part of a coordinate of the mesh begins and ends."""
        at = coordinate[self.tensor_axis]
        before = sum([place.numel for place in self.places[:at]]) if is_cut(self.tensor_placement) else 0
        begin, end = self.places[at].interval(coordinate[self.shard_axis])
        return before + begin, before + end


def is_cut(placement: Any) -> bool:
    """Tell whether a placement of torch's cuts one block for each rank."""
    from torch.distributed.tensor import Shard

    return placement.__class__ is Shard


@frozen(eq=False, slots=False)
class Meshes:
    """The meshes of one flat parameter over tensor parallelism.

    Args:
        data: The DeviceMesh that FSDP was given.
        tensor: That of tensor parallelism, of one axis.
        names: The names of the parameters, for errors.
    """

    data: Any = field(repr=False)
    tensor: Any = field(repr=False)
    names: tuple[str, ...]

    @cached_property
    def both(self) -> Any:
        """The DeviceMesh of both, with the axes in the order of the mesh that they are parts of.

        Raises:
            Unsupported: They are no parts of one mesh.
        """
        data, tensor = self.data, self.tensor
        root = _root_of(data)
        known: tuple[str, ...] = getattr(root, "mesh_dim_names", None) or ()
        axes = [*(data.mesh_dim_names or ()), *(tensor.mesh_dim_names or ())] if known else []
        if tensor.ndim != 1 or not axes or len(set(axes)) < len(axes) or not set(axes) <= set(known):
            raise Unsupported(
                f"FSDP has flattened local tensors of DTensors: {listing(self.names)}. How they lie can be told only "
                f"if FSDP's device_mesh ({_told(data)}) and the mesh of tensor parallelism ({_told(tensor)}), of one "
                f'axis, are slices by name of one DeviceMesh, such as mesh["dp"] and mesh["tp"]. {_REMEDY}'
            )
        found = root if set(known) == set(axes) else root[tuple([name for name in known if name in axes])]
        if not is_ascending(found):
            raise Unsupported(
                f"FSDP has flattened local tensors of DTensors: {listing(self.names)}, over a DeviceMesh of the ranks "
                f"{found.mesh.tolist()}. Make the mesh with ranks that ascend along each axis. {_REMEDY}"
            )
        return found

    @cached_property
    def _ours(self) -> Any:
        return mesh_of(self.both)

    def parts(self, spec: Any, name: str) -> tuple[tuple[int, ...], ...]:
        """Give the shape of what each rank of tensor parallelism holds of a parameter.

        Args:
            spec: What FSDP kept of its DTensor: placements, and the shape of the whole.
            name: Its name.

        Raises:
            Unsupported: It is no one block, or lies over another mesh.
        """
        from torch.distributed.tensor import Replicate

        placement, count = spec.placements[0], self.tensor.size()
        if spec.mesh != self.tensor or not (is_cut(placement) or isinstance(placement, Replicate)):
            raise Unsupported(
                f"FSDP has flattened the local tensor of {name!r}, which lies with {placement} over a mesh of "
                f"{_told(spec.mesh)}. What one flat parameter holds has to be sharded or replicated over one mesh, "
                f"here of {_told(self.tensor)}. {_REMEDY}"
            )
        layout = Layout(Mesh({"tensor": count}), [placement])
        return tuple([layout.local_shape(tuple(spec.shape), (i,)) for i in range(count)])

    def across(self, spec: Any, parts: tuple[tuple[int, ...], ...], places: Iterable[Place]) -> Across:
        """Say how a parameter lies.

        Args:
            spec: What FSDP kept of its DTensor.
            parts: The shapes of its parts.
            places: Where they lie.
        """
        axes: list[str] = list(self.both.mesh_dim_names)
        shard, tensor = axes.index(self.data.mesh_dim_names[-1]), axes.index(self.tensor.mesh_dim_names[0])
        placements: list[Any] = shown_placements(self.both, self.data)
        placements[tensor] = spec.placements[0]
        layout = Layout(self._ours, placements)
        return Across(self.both, tuple(spec.shape), layout, shard, tensor, spec.placements[0], parts, tuple(places))


def shown_placements(mesh: Any, data: Any) -> list[Any]:
    """Give the placements by which torch shows a parameter of FSDP1's: cut along its first dim, where FSDP shards.

    Args:
        mesh: The DeviceMesh over which it is shown.
        data: The one that FSDP was given.
    """
    from torch.distributed.tensor import Replicate, Shard

    placements: list[Any] = [Replicate() for _ in range(mesh.ndim)]
    axis = mesh.ndim - 1 if mesh is data else list(mesh.mesh_dim_names).index(data.mesh_dim_names[-1])
    placements[axis] = Shard(0)
    return placements


def _told(mesh: Any) -> str:
    """Tell of a mesh what is the same on all ranks."""
    return "none" if mesh is None else f"axes {list(mesh.mesh_dim_names or ())}, sizes {list(mesh.mesh.shape)}"


def _root_of(mesh: Any) -> Any:
    if mesh is None or hasattr(mesh, "_get_root_mesh"):
        return None if mesh is None else mesh._get_root_mesh()
    table: Any = import_module("torch.distributed.device_mesh")  # of torch 2.9 and older
    return table._mesh_resources.get_root_mesh(mesh)  # as FSDP itself asks
