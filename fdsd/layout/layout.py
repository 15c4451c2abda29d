"""`Layout`: how one tensor lies over the ranks of a mesh, and which boxes of it a rank holds.

Pure arithmetic on shapes. Who sends what to whom is ``transfer``'s business.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from attrs import field, frozen

from fdsd.data.errors import BadFile, SpecMismatch, Unsupported, listing, plural
from fdsd.data.plain_json import parse
from fdsd.data.region import Region
from fdsd.data.values import is_dict, is_mapping, is_sequence
from fdsd.layout.chunks import Cut, Run, runs_of, size_of
from fdsd.layout.mesh import At, Coordinate, Mesh
from fdsd.layout.pieces import Pieces
from fdsd.layout.placement import Placement, Replicate, Shard, placement_data, placement_from_data
from fdsd.layout.reading import canonical_order, read_order, read_placements

__all__ = ["Block", "Layout"]

Shape = tuple[int, ...]


class Block(NamedTuple):
    """A box of the global tensor, and where it lies in the local one.

    >>> Block((4, 0), (2, 3), (1, 0)).place
    (slice(1, 3, None), slice(0, 3, None))
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def region(self) -> Region:
        """The box as a region of the global tensor."""
        return Region.box(self.starts, self.sizes)

    @property
    def place(self) -> tuple[slice, ...]:
        """The box as slices of the local tensor."""
        return tuple([slice(at, at + size) for at, size in zip(self.offset, self.sizes, strict=True)])


def _raw(placements: Sequence[object] | Mapping[str, object]) -> tuple[Placement, ...]:
    return cast("tuple[Placement, ...]", placements)  # read together with the mesh, once both are there


def _raw_order(order: Iterable[str] | None) -> tuple[str, ...]:
    return cast("tuple[str, ...]", order)


@frozen(repr=False, cache_hash=True)
class Layout:
    """How a tensor lies over a mesh: one placement for each axis.

    Args:
        mesh: The ranks.
        placements: One for each axis, in order, or a mapping from axis to placement (the axes left out replicate):
            ours, or torch's own. ``_StridedShard``, as FSDP2 over tensor parallelism makes it, is read as the order
            in which the axes cut; where its factor fits no order, as a ``Shard`` with that many ``parts``.
        order: The axes that shard, in the order in which they cut; only the order of those that shard one dim
            says anything. Left to right if left out, as DTensor does.

    Raises:
        SpecMismatch: Another number of placements than axes, an axis that the mesh lacks, or an order that names
            other axes than those that shard.
        Unsupported: A placement is ``Partial``, or none at all.

    Law: the regions of all coordinates hold each element once for each coordinate of the axes that replicate;
    and ``Layout.from_json(l.to_json()) == l``.

    >>> mesh = Mesh({"dp": 2, "tp": 2})
    >>> layout = Layout(mesh, [Shard(0), Shard(0)], order=["tp", "dp"])
    >>> layout
    Layout(Mesh({'dp': 2, 'tp': 2}), (Shard(0), Shard(0)), order=('tp', 'dp'))
    >>> [layout.blocks((5,), rank)[0].starts for rank in range(4)]
    [(0,), (3,), (2,), (4,)]
    """

    mesh: Mesh
    placements: tuple[Placement, ...] = field(converter=_raw)
    order: tuple[str, ...] = field(default=None, converter=_raw_order, kw_only=True)
    _sharding: tuple[tuple[int, int], ...] = field(init=False, eq=False)  # axes and the dims they cut, in order

    def __attrs_post_init__(self) -> None:
        mesh: Any = self.mesh
        if not isinstance(mesh, Mesh):
            raise SpecMismatch(f"Layout: the mesh is a Mesh, like Mesh({{'dp': 2}}), not {mesh!r}.")
        placements, strided_order = read_placements(mesh, _per_axis(mesh, self.placements))
        sharding = tuple([name for name, p in zip(mesh.names, placements, strict=True) if isinstance(p, Shard)])
        order = read_order(sharding, self.order, strided_order)
        object.__setattr__(self, "placements", placements)
        order = canonical_order(mesh.names, placements, order)
        dims = {name: p.dim for name, p in zip(mesh.names, placements, strict=True) if isinstance(p, Shard)}
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "_sharding", tuple([(mesh.names.index(name), dims[name]) for name in order]))

    def _axes_of(self, shape: Shape) -> list[tuple[int, ...]]:
        """Give the axes that shard each dim of a shape, in the order in which they cut."""
        axes: list[tuple[int, ...]] = [()] * len(shape)
        for axis, dim in self._sharding:
            if not -len(shape) <= dim < len(shape):
                raise SpecMismatch(
                    f"{self}: the axis {self.mesh.names[axis]!r} shards dim {dim} of a tensor of shape {shape}, which "
                    f"has {plural(len(shape), 'dim') if shape else 'no dims'}. Replicate it over this axis."
                )
            axes[dim] += (axis,)
        return axes

    def _cuts(self, axes: tuple[int, ...], coordinate: Coordinate) -> tuple[Cut, ...]:
        sizes = self.mesh.sizes
        return tuple([Cut(sizes[axis], coordinate[axis], _parts(self.placements[axis])) for axis in axes])

    def _per_dim(self, shape: Shape, at: At) -> list[tuple[int, tuple[Cut, ...]]] | None:
        axes = self._axes_of(shape)
        coordinate = self.mesh.coordinate_at(at)
        if coordinate is None:
            return None
        return [(size, self._cuts(group, coordinate)) for size, group in zip(shape, axes, strict=True)]

    def _runs(self, shape: Shape, dim: int, cuts: tuple[Cut, ...]) -> tuple[Run, ...]:
        try:
            return runs_of(shape[dim], cuts)
        except SpecMismatch as error:
            raise SpecMismatch(f"{self}: dim {dim} of a tensor of shape {shape}: {error}") from None

    def blocks(self, shape: Iterable[int], at: At) -> tuple[Block, ...]:
        """Give the boxes of a tensor that a place holds, with their places in its local tensor, in row-major order.

        Args:
            shape: The shape of the whole tensor.
            at: A rank, or a coordinate of the mesh.

        Returns:
            Boxes that are not empty; none for an empty shard, and for a rank that is not in the mesh.

        Raises:
            SpecMismatch: An axis shards a dim that the tensor lacks, or the sizes of ``parts`` do not add up.

        >>> fused = Layout(Mesh({"tp": 2}), [Shard(0, parts=[4, 2])])
        >>> fused.blocks((6, 5), 1)
        (Block(starts=(2, 0), sizes=(2, 5), offset=(0, 0)), Block(starts=(5, 0), sizes=(1, 5), offset=(2, 0)))
        """
        shape = tuple(shape)
        per_dim = self._per_dim(shape, at)
        if per_dim is None:
            return ()
        return tuple(_boxes([self._runs(shape, dim, cuts) for dim, (_, cuts) in enumerate(per_dim)]))

    def regions(self, shape: Iterable[int], at: At) -> tuple[Region, ...]:
        """Give the regions of a tensor that a place holds, in the row-major order of its local tensor.

        Args:
            shape: The shape of the whole tensor.
            at: A rank, or a coordinate of the mesh.

        Raises:
            SpecMismatch: As for ``blocks``.

        >>> Layout(Mesh({"dp": 2}), [Shard(0)]).regions((3,), 1)
        (Region(spans=(Span(start=2, pairs=((1, 1),)),)),)
        """
        return tuple([block.region for block in self.blocks(shape, at)])

    def local_shape(self, shape: Iterable[int], at: At) -> Shape:
        """Give the shape of the local tensor of a place; that of an empty shard has a 0.

        Args:
            shape: The shape of the whole tensor.
            at: A rank of the mesh, or a coordinate.

        Raises:
            SpecMismatch: The rank is not in the mesh; or as for ``blocks``.

        >>> Layout(Mesh({"dp": 4}), [Shard(-1)]).local_shape((2, 5), 2)
        (2, 1)
        """
        shape = tuple(shape)
        per_dim = self._per_dim(shape, at)
        if per_dim is None:
            raise SpecMismatch(f"{self}: rank {at} is not in the mesh, and has no local tensor.")
        for dim, (_, cuts) in enumerate(per_dim):
            self._runs(shape, dim, cuts)  # for its error
        return tuple([size_of(size, cuts) for size, cuts in per_dim])

    def holders(self, shape: Iterable[int]) -> Pieces:
        """Give the pieces that a tensor is cut into, each with all ranks that hold it.

        Raises:
            SpecMismatch: As for ``blocks``.

        >>> pieces = Layout(Mesh({"dp": 2, "tp": 2}), {"tp": Shard(0)}).holders((6,))
        >>> list(pieces)
        [(((0,), (3,)), (0, 2)), (((3,), (3,)), (1, 3))]
        """
        shape = tuple(shape)
        axes = self._axes_of(shape)
        sharding = [axis for axis, placement in enumerate(self.placements) if isinstance(placement, Shard)]
        ranks: dict[Coordinate, list[int]] = {}
        for coordinate, rank in zip(self.mesh.coordinates(), self.mesh.ranks, strict=True):
            ranks.setdefault(tuple([coordinate[axis] for axis in sharding]), []).append(rank)
        rows: list[tuple[tuple[Shape, Shape], list[int]]] = []
        for key, some in ranks.items():
            whole = dict(zip(sharding, key, strict=True))
            coordinate = tuple([whole.get(axis, 0) for axis in range(self.mesh.num_axes)])
            runs = [self._runs(shape, dim, self._cuts(group, coordinate)) for dim, group in enumerate(axes)]
            rows += [((block.starts, block.sizes), some) for block in _boxes(runs)]
        return Pieces.of(len(shape), rows)

    def __repr__(self) -> str:
        default = tuple(
            [name for name, p in zip(self.mesh.names, self.placements, strict=True) if isinstance(p, Shard)]
        )
        order = "" if self.order == default else f", order={self.order}"
        return f"Layout({self.mesh}, {self.placements}{order})"

    def to_data(self) -> dict[str, Any]:
        """Give the layout as data that JSON, and a ``TensorEntry``, can hold.

        >>> Layout(Mesh({"dp": 2}), [Shard(0)]).to_data()
        {'mesh': {'axes': [['dp', 2]]}, 'placements': [{'shard': 0}], 'order': ['dp']}
        """
        placements = [placement_data(placement) for placement in self.placements]
        return {"mesh": self.mesh.to_data(), "placements": placements, "order": list(self.order)}

    @classmethod
    def from_data(cls, data: Any) -> Layout:
        """Read what ``to_data`` gave.

        Raises:
            BadFile: It is no such data.

        >>> Layout.from_data({"mesh": {"axes": [["dp", 2]]}, "placements": ["replicate"]})
        Layout(Mesh({'dp': 2}), (Replicate(),))
        """
        if not is_dict(data) or not {"mesh", "placements"} <= data.keys() <= {"mesh", "placements", "order"}:
            raise BadFile(f"Layout.from_data: {data!r} is no object with 'mesh', 'placements' and perhaps 'order'.")
        order = data.get("order")
        if not is_sequence(data["placements"]) or not (order is None or is_sequence(order)):
            raise BadFile("Layout.from_data: 'placements' and 'order' are lists.")
        mesh = Mesh.from_data(data["mesh"])
        placements = [placement_from_data(item) for item in data["placements"]]
        try:
            return cls(mesh, placements, order=order)
        except (SpecMismatch, Unsupported) as error:
            raise BadFile(f"Layout.from_data: {error}") from error

    def to_json(self) -> str:
        """Write the layout as JSON."""
        return json.dumps(self.to_data())

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Read what ``to_json`` wrote.

        Raises:
            BadFile: It is no JSON, or no layout.

        >>> layout = Layout(Mesh({"dp": 2}), [Shard(0)])
        >>> Layout.from_json(layout.to_json()) == layout
        True
        """
        return cls.from_data(parse(text, "Layout.from_json"))


def _parts(placement: Placement) -> int | tuple[int, ...] | None:
    return placement.parts if isinstance(placement, Shard) else None


def _per_axis(mesh: Mesh, placements: Any) -> list[Any]:
    """Give one placement for each axis, from a sequence or a mapping."""
    if is_mapping(placements):
        if odd := [name for name in placements if name not in mesh.names]:
            raise SpecMismatch(f"Layout: {mesh} has no axes {listing(odd)}.")
        return [placements.get(name, Replicate()) for name in mesh.names]
    if not is_sequence(placements) or len(placements) != mesh.num_axes:
        raise SpecMismatch(
            f"Layout: {placements!r} is not one placement for each axis of {mesh}. Give a sequence of "
            f"{mesh.num_axes}, or a mapping from axis to placement; Replicate() is the placement of an axis that does "
            "not shard."
        )
    return list(placements)


def _boxes(runs: Sequence[tuple[Run, ...]]) -> Iterator[Block]:
    """Combine the runs of all dims to boxes, and find their places in the local tensor."""
    placed: list[list[tuple[int, int, int]]] = []
    for some in runs:
        offset = 0
        placed.append([])
        for start, length in some:
            placed[-1].append((start, length, offset))
            offset += length
    for combined in itertools.product(*placed):
        starts = tuple([start for start, _, _ in combined])
        sizes = tuple([length for _, length, _ in combined])
        yield Block(starts, sizes, tuple([offset for _, _, offset in combined]))
