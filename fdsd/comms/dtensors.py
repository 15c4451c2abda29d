"""DTensors: how they lie over ranks, as sources of lazy tensors, and made of local tensors.

Nothing is redistributed or gathered here, and no DTensor operation runs. torch's private names for DTensors are in
this module alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from attrs import define, field

from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops.leaves import Origin
from fdsd.algebra.spans import view_of
from fdsd.comms.mesh_ranks import is_ascending, mesh_of, mesh_of_groups
from fdsd.data.errors import FdsdError, SpecMismatch, Unsupported, listing
from fdsd.data.place import Place
from fdsd.data.protocols import Piece
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec, is_exact, known_spec
from fdsd.data.statedict import StateDict
from fdsd.data.ties import place_in_parts
from fdsd.layout.layout import Layout
from fdsd.layout.mesh import Mesh
from fdsd.layout.pieces import Box, Pieces, finder_of
from fdsd.layout.shard_source import ShardSource

__all__ = [
    "DTensorSource",
    "layout_and_local_of",
    "layout_of_dtensor",
    "lazy_dtensor",
    "lie_alike",
    "local_of_dtensor",
    "make_dtensor",
    "make_like",
    "same_placements",
]

_Key = tuple[tuple[tuple[type[Any], Any], ...], tuple[int, ...]]


@define(eq=False)
class _Known:
    """What is known of a DeviceMesh, for thousands of tensors over it."""

    mesh: Mesh
    is_ascending: bool
    layouts: dict[_Key, tuple[Layout, tuple[int, ...] | None]] = field(factory=dict)


_KNOWN: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
_LAST: list[tuple[Any, Any]] = [(lambda: _LAST, None)]  # the mesh that was asked of last: it takes long to look up
_MOST = 1 << 16  # layouts of one mesh that are remembered


def _known_of(mesh: Any) -> _Known:
    known = _KNOWN.get(mesh)
    if known is None:
        known = _KNOWN[mesh] = _Known(mesh_of(mesh), is_ascending(mesh))
    _LAST[0] = ref(mesh), known  # at once, since threads share it
    return known


def layout_of_dtensor(tensor: Any) -> Layout:
    """Say how a DTensor lies: over which ranks of the default process group, and cut in which order.

    Args:
        tensor: A DTensor. Of a mesh that is a part of a larger one, the ranks of this rank's part are meant.

    Returns:
        A layout whose axes have the names of the mesh, or ``dim0``, ``dim1``, ... if it has none. Ranks along an axis
        have the order of its process groups, which is ascending whatever the mesh's is.

    Raises:
        Unsupported: A placement is ``Partial``, or the groups of several axes contradict each other.
        SpecMismatch: The local tensor has another shape than its placements say.

    Law: the local tensor is the whole one at the layout's blocks of this rank.
    """
    return _lies(tensor)[0]


def _lies(tensor: Any) -> tuple[Layout, tuple[int, ...] | None]:
    """Give the layout, and the shape of what this rank has; ``None`` if it is not in the mesh."""
    spec = tensor._spec
    placements: tuple[Any, ...] = spec.placements
    last, found_last = _LAST[0]
    known: _Known = found_last if last() is spec.mesh else _known_of(spec.mesh)
    # the classes too, since versions of torch hold some strided shards and plain ones for equal; numbers, since to
    # compare placements takes long
    told: list[tuple[type[Any], Any]] = [
        (type(one), one.dim if type(one).__name__ == "Shard" else one) for one in placements
    ]
    key: _Key = tuple(told), tensor.shape if spec.tensor_meta is None else spec.tensor_meta.shape
    found = known.layouts.get(key)
    if found is None:
        if len(known.layouts) >= _MOST:
            known.layouts.clear()
        mesh = known.mesh if known.is_ascending else mesh_of_groups(spec.mesh, placements)
        found = known.layouts[key] = _read_layout(mesh, placements, tuple(tensor.shape))
    layout, local = found
    if local is not None and tensor._local_tensor.shape != local:
        raise SpecMismatch(
            f"A DTensor of shape {tuple(tensor.shape)} with {layout} holds a local tensor of shape "
            f"{tuple(tensor._local_tensor.shape)} on rank "
            f"{dist.get_rank()}, and its placements {placements} say {local}. Make it with distribute_tensor(), or "
            "with from_local() and the true shape and stride."
        )
    return found


def same_placements(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Tell whether placements are the same; versions of torch hold some strided shards and plain ones for equal."""
    return ours == theirs and [*map(type, ours)] == [*map(type, theirs)]


def lie_alike(ours: Any, theirs: Any) -> bool:
    """Tell whether two DTensors lie over the same mesh in the same way, so that a rank has the same part of both."""
    return bool(ours.device_mesh == theirs.device_mesh) and same_placements(ours.placements, theirs.placements)


def _read_layout(mesh: Mesh, placements: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Layout, Any]:
    layout = Layout(mesh, placements)
    rank = dist.get_rank()
    return layout, layout.local_shape(shape, rank) if rank in mesh else None


def local_of_dtensor(tensor: Any) -> torch.Tensor:
    """Give the memory that this rank holds of a DTensor; writing into it changes the DTensor.

    Args:
        tensor: A DTensor.

    Returns:
        The local tensor itself, without gradient; collectives that were still filling it are waited for.

    Raises:
        Unsupported: The local tensor is of a class that fdsd does not know.
    """
    local: Any = tensor._local_tensor
    if not is_exact(local):
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        if not is_exact(local):
            raise Unsupported(
                f"The local tensor of a DTensor is of class {type(local).__module__}.{type(local).__qualname__}: fdsd "
                "does not know how its elements are laid out. Convert it to a plain tensor first."
            )
    made: torch.Tensor = local.detach() if local.requires_grad else local
    return made


def layout_and_local_of(tensor: Any) -> tuple[Layout, torch.Tensor]:
    """Give ``layout_of_dtensor`` and ``local_of_dtensor``."""
    local = tensor._local_tensor
    is_plain = type(local) is torch.Tensor and not local.requires_grad  # as nearly all are
    return _lies(tensor)[0], local if is_plain else local_of_dtensor(tensor)


class DTensorSource:
    """One DTensor as a source; a ``PlacedSource``. Regions that this rank holds can be read, others raise.

    Args:
        spec: The spec of the whole tensor.
        layout: How it lies.
        local: The local tensor of this rank.
        placements: How it lies in torch's words, by which ties are told.
        is_here: Whether this rank is in the mesh.
    """

    fqn: ClassVar[str] = "tensor"

    def __init__(
        self, spec: TensorSpec, layout: Layout, local: torch.Tensor, placements: tuple[Any, ...], is_here: bool
    ) -> None:
        self.spec = spec
        self._is_here = is_here
        self._layout = layout
        self._local = local
        self._placements = placements
        self._start: tuple[int, ...] | None = None  # of the one block that this rank holds
        self._parted: ShardSource | None = None  # reads for ranks that hold several

    @classmethod
    def of(cls, tensor: Any) -> DTensorSource:
        """Make a source of a DTensor.

        Raises:
            Unsupported, SpecMismatch: As for ``layout_of_dtensor`` and ``local_of_dtensor``.
        """
        layout, held = _lies(tensor)
        spec, local = known_spec(tensor.shape, tensor.dtype), local_of_dtensor(tensor)
        return cls(spec, layout, local, tensor.placements, held is not None)

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> DTensorSource:
        """Give the same tensor over a copy of what is here."""
        return DTensorSource(self.spec, self._layout, copy(self._local), self._placements, self._is_here)

    def specs(self) -> StateDict[TensorSpec]:
        return StateDict({self.fqn: self.spec})

    def pieces(self, fqn: str) -> Sequence[Piece]:
        return [Piece(Region.box(*box), ranks[0]) for box, ranks in self._holders()]

    def placement(self, fqn: str) -> Layout:
        return self._layout

    def local(self, fqn: str) -> torch.Tensor | None:
        return self._local if self._is_here else None

    def place(self, fqn: str) -> Place:
        """Say where the tensor lies, as ``place_of`` says it of the DTensor."""
        return place_in_parts(self._placements, [self._local])

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        region.check_inside(self.spec.shape, "reading a DTensor")
        if not region.numel:
            return
        if self._local.is_meta:
            raise SpecMismatch(
                f"A DTensor {self.spec} is on the meta device here and has no data. Materialize the module first "
                "(to_empty, then load)."
            )
        if self._start is None and self._parted is None:
            self._find_blocks()
        if self._parted is not None:
            self._parted.read(self._parted.fqn, region, out)
            return
        assert self._start is not None
        here = Region(tuple([span.shift(-start) for span, start in zip(region.spans, self._start, strict=True)]))
        if not here.inside(tuple(self._local.shape)):
            raise FdsdError(
                f"A part of a DTensor {self.spec} is held by {self._elsewhere(region)}; give group=. Where none is "
                "taken, materialize(state, group=...) first."
            )
        with torch.no_grad():
            copy_elements(view_of(self._local, here), out)

    def _find_blocks(self) -> None:
        blocks = self._layout.blocks(self.spec.shape, dist.get_rank())
        if len(blocks) > 1:
            self._parted = ShardSource(self.spec, self._layout, {dist.get_rank(): self._local})
        else:  # nothing is inside an empty local tensor, wherever it begins
            self._start = blocks[0].starts if blocks else (0,) * self.spec.ndim

    def _holders(self) -> Pieces:
        return self._layout.holders(self.spec.shape)

    def _elsewhere(self, region: Region) -> str:
        """Name the ranks that hold what this one does not."""
        holders = self._holders()
        covering: Box = (
            tuple([span.start for span in region.spans]),
            tuple([span.extent + 1 for span in region.spans]),
        )
        found = {rank for i in finder_of(holders).find(covering) for rank in holders.ranks[i]} - {dist.get_rank()}
        return f"rank {min(found)}" if len(found) == 1 else f"ranks {listing(found)}"


def lazy_dtensor(tensor: Any) -> Lazy:
    """Make a lazy tensor of a DTensor; it reads the local tensor when it is materialized.

    Args:
        tensor: A DTensor.

    Raises:
        Unsupported: A placement is ``Partial``, or the local tensor is of a class that fdsd does not know.
        SpecMismatch: The local tensor has another shape than its placements say.
    """
    source = DTensorSource.of(tensor)
    spec = source.spec
    return Lazy(Origin(source, source.fqn, spec), (), [spec])


def make_dtensor(local: torch.Tensor, mesh: Any, placements: Sequence[Any], spec: TensorSpec) -> Any:
    """Make a DTensor of a local tensor, which it shares; nothing is sent, checked elsewhere or moved.

    Args:
        local: The local tensor, on any device.
        mesh: A ``DeviceMesh``.
        placements: torch's placements, one for each axis of the mesh.
        spec: Shape and dtype of the whole tensor; uneven and empty shards have no other way to tell it.

    Raises:
        SpecMismatch: The local tensor has not the shape that its rank holds, or not the dtype of ``spec``.
        Unsupported: A placement is ``Partial``.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    if local.dtype != spec.dtype:
        raise SpecMismatch(f"make_dtensor: the local tensor is of {local.dtype}, and the whole one {spec}.")
    strides = torch.empty(spec.shape, device="meta").stride()
    meta = TensorMeta(torch.Size(spec.shape), strides, spec.dtype)
    counted = tuple([_from_the_first(placement, spec.ndim) for placement in placements])
    made = _wrap(local, DTensorSpec(mesh, counted, tensor_meta=meta))
    layout_of_dtensor(made)  # for its errors
    return made


def _from_the_first(placement: Any, ndim: int) -> Any:
    """Count the dim of a placement from the first one, as DTensors want it."""
    dim = getattr(placement, "dim", 0)
    if dim >= 0:
        return placement
    factor = getattr(placement, "split_factor", None)
    kind: Any = placement.__class__
    return kind(dim + ndim) if factor is None else kind(dim + ndim, split_factor=factor)


def make_like(like: Any, local: torch.Tensor) -> Any:
    """Make a DTensor of another local tensor, which it shares, that lies like a given one; of any dtype and device.

    Args:
        like: A DTensor.
        local: The local tensor.

    Raises:
        SpecMismatch: It has another shape than the local tensor of ``like``.

    Law: ``layout_of_dtensor(make_like(x, y)) == layout_of_dtensor(x)``.
    """
    held = tuple(like._local_tensor.shape)
    if tuple(local.shape) != held:
        raise SpecMismatch(
            f"make_like: the local tensor has shape {tuple(local.shape)}, and that of the DTensor which it shall lie "
            f"like {held}."
        )
    spec = like._spec
    if local.dtype != like.dtype:
        meta = spec.tensor_meta._replace(dtype=local.dtype)
        spec = dataclasses.replace(spec, tensor_meta=meta)
    return _wrap(local, spec)


def _wrap(local: torch.Tensor, spec: Any) -> Any:
    """Make a DTensor as its own operations do: ``from_local`` would move the local tensor to the device of the mesh."""
    from torch.distributed.tensor import DTensor

    make: Any = DTensor
    return make(local.detach(), spec, requires_grad=False)
