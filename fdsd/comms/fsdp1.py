"""FSDP1's flat parameters, read from what FSDP says of them: original parameters as expressions over flat shards.

Nothing is gathered, and the state in which FSDP has its shards stays as it is, until memory to write into is asked
for. All of FSDP1's private names are here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import nn

from fdsd.algebra.apply import apply
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import Slice
from fdsd.comms.boxes import BoxSource
from fdsd.comms.fsdp1_across import Across, Meshes, Place, places_of
from fdsd.data.errors import FdsdError, SpecMismatch, Unsupported, listing
from fdsd.data.spec import TensorSpec
from fdsd.layout.flattening import Flattening
from fdsd.layout.layout import Layout
from fdsd.layout.mesh import Mesh
from fdsd.layout.pieces import Pieces
from fdsd.layout.placement import Replicate, Shard

__all__ = ["Flat", "FlatView", "find_flats", "original_dtypes"]


@frozen(eq=False, slots=False)
class Flat:
    """A flat parameter: what of it is here, how it lies over ranks, and the original parameters in it.

    Args:
        handle: What FSDP knows of it.
        layout: How it lies over ranks, with its padding.
        coordinate: The number of this rank's shard.
        across: For each original parameter how it lies over tensor parallelism too, if it does.
    """

    handle: Any = field(repr=False)
    layout: Layout
    coordinate: int
    across: tuple[Across | None, ...] = ()

    @cached_property
    def views(self) -> tuple[FlatView, ...]:
        """The original parameters, in order."""
        flat = self.handle.flat_param
        numels: Sequence[int] = flat._numels_with_padding
        starts = [0, *accumulate(numels[:-1])]
        real = [start for start, is_padding in zip(starts, flat._is_padding_mask, strict=True) if not is_padding]
        live: Sequence[torch.Tensor] = flat._params or [flat] * len(real)
        columns = zip(real, flat._shapes, flat._strides, flat._contiguities, self.across, live, strict=True)
        return tuple(
            [
                FlatView(self, start, tuple(shape), None if contiguous else _order(shape, strides), across, one)
                for start, shape, strides, contiguous, across, one in columns
            ]
        )

    @property
    def parameter(self) -> torch.Tensor:
        """The flat parameter itself, as an optimizer has it if FSDP does not use the original parameters."""
        found: torch.Tensor = self.handle.flat_param
        return found

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold different parts of it."""
        return bool(self.handle.uses_sharded_strategy)

    @property
    def is_across(self) -> bool:
        """Whether other ranks have flat parameters with other parts of the same tensors, maybe at other places."""
        return any(across is not None for across in self.across)

    @property
    def uses_originals(self) -> bool:
        """Whether optimizers have the original parameters."""
        return bool(self.handle._use_orig_params)

    def local(self) -> torch.Tensor:
        """Give this rank's shard, padded: the sharded one, in full precision, whatever is in use right now.

        Raises:
            FdsdError: All parameters are summoned, so the shard may be behind what was written to them.
        """
        if self.handle._training_state.name == "SUMMON_FULL_PARAMS":
            raise FdsdError(
                "FSDP has gathered its parameters (summon_full_params), and what is changed there reaches the shards "
                "only afterwards. Leave that block first."
            )
        parameter = self.parameter
        kept: torch.Tensor | None = getattr(parameter, "_local_shard", None)
        in_use = parameter.shape == self.handle.flat_param._sharded_size
        if kept is None or (in_use and parameter.dtype == kept.dtype):
            return parameter.detach()
        return kept.detach()

    def reshard(self) -> None:
        """Free the gathered copy that a forward pass may have left; else it would hide what is written to shards."""
        handle = self.handle
        if self.is_sharded and hasattr(self.parameter, "_full_param_padded"):
            handle.reshard(True)
            handle.post_reshard()

    @cached_property
    def spec(self) -> TensorSpec:
        """The spec of the whole, with its padding."""
        local = self.local()
        count = local.numel() * (self.layout.mesh.sizes[-1] if self.is_sharded else 1)
        return TensorSpec((count,), local.dtype)

    def over(self, local: torch.Tensor) -> Lazy:
        """Give a tensor of one dim of which each rank holds a shard as big as that of the parameter.

        Args:
            local: This rank's shard, such as that of a slot of an optimizer.

        Raises:
            SpecMismatch: It has another shape than the shard of the parameter.
        """
        shard = self.local()
        if local.shape != shard.shape:
            raise SpecMismatch(
                f"A shard of FSDP's flat parameter has the shape {tuple(shard.shape)}, not {tuple(local.shape)}."
            )
        spec = TensorSpec(self.spec.shape, local.dtype)
        start = self.coordinate * shard.numel() if self.is_sharded else 0
        return BoxSource(spec, self.layout, local, (start,)).lazy()

    @cached_property
    def source(self) -> Lazy:
        """The flat parameter itself, over ranks."""
        return self.over(self.local())


@frozen(eq=False, slots=False)
class FlatView:
    """An original parameter within a flat one.

    Args:
        flat: The flat parameter.
        start: Where it begins in the whole of it.
        held: The shape of what has been flattened: its own, or that of its part over tensor parallelism.
        order: Its dims in the order in which its elements lie, outermost first; ``None`` for row-major order.
        across: How it lies over tensor parallelism too, if it does.
        live: What an optimizer has: the original parameter, or the flat one.
    """

    flat: Flat = field(repr=False)
    start: int
    held: tuple[int, ...]
    order: tuple[int, ...] | None
    across: Across | None
    live: torch.Tensor = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, whole."""
        return self.held if self.across is None else self.across.shape

    @cached_property
    def flattening(self) -> Flattening:
        """How it is flattened, whole: what the ranks of tensor parallelism hold, one after the other."""
        order = self.order or ()
        return Flattening(order) if self.across is None else self.across.flattening(order)

    @property
    def layout(self) -> Layout:
        """How torch shows it: cut along its first dim over the ranks that share a flat parameter."""
        return self.flat.layout if self.across is None else self.across.layout

    @property
    def spec(self) -> TensorSpec:
        """The spec of the original parameter."""
        return TensorSpec(self.shape, self.flat.spec.dtype)

    @property
    def numel(self) -> int:
        """The number of elements of what has been flattened."""
        return math.prod(self.held)

    def leaf(self) -> Any:
        """Give the parameter: lazy over the ranks, or a view where all of it is on this one (``NO_SHARD``)."""
        if self.flat.is_across:
            return self.of_piece(self.place_in(self.flat.local()))
        return self.of(self.flat.source if self.flat.is_sharded else self.flat.local())

    def of(self, flat: Any) -> Any:
        """Cut what stands at the place of this parameter out of something laid out as the flat parameter.

        Args:
            flat: A tensor or lazy tensor of one dim, with the padding; for a shard see ``Flat.over``.
        """
        return self.flattening.unflatten(apply(Slice(0, self.start, self.numel), flat), self.shape)

    def of_piece(self, local: torch.Tensor) -> Any:
        """Give a tensor of the parameter's shape of which each rank holds what it holds of the parameter.

        Args:
            local: What is here, in one dim, such as a slot of an optimizer that has the original parameters.

        Raises:
            SpecMismatch: It is not as long as what is here of the parameter.
        """
        if not self.flat.is_sharded and local.shape == self.shape:
            return local.detach()
        begin, end = self.interval(self.flat.coordinate)
        if local.shape != (end - begin,):
            raise SpecMismatch(
                f"This rank holds {end - begin} elements of the parameter; a tensor of shape {tuple(local.shape)} is "
                "not laid out like it."
            )
        placement, spec = self.placement(), TensorSpec((math.prod(self.shape),), local.dtype)
        at = next((start for (start, _), ranks in placement if dist.get_rank() in ranks), (0,))
        return self.flattening.unflatten(BoxSource(spec, placement, local, at).lazy(), self.shape)

    def interval(self, coordinate: int) -> tuple[int, int]:
        """Say where in what has been flattened of the parameter the part of a shard begins and ends.

        Args:
            coordinate: The number of the shard.
        """
        if not self.flat.is_sharded:
            return 0, self.numel
        return Place(self.start, self.numel, self.flat.local().numel()).interval(coordinate)

    def placement(self) -> Pieces:
        """Say which ranks hold which interval of the flattened parameter, whole."""
        mesh, across = self.layout.mesh, self.across
        rows: list[tuple[tuple[tuple[int, ...], tuple[int, ...]], list[int]]] = []
        for coordinate, rank in zip(mesh.coordinates(), mesh.ranks, strict=True):
            begin, end = self.interval(coordinate[-1]) if across is None else across.interval(coordinate)
            rows.append((((begin,), (end - begin,)), [rank]))
        return Pieces.of(1, rows)

    def place_in(self, local: torch.Tensor) -> torch.Tensor:
        """View what this rank holds of the parameter in a tensor laid out as its shard of the flat one."""
        begin, end = self.interval(self.flat.coordinate)
        before = self.flat.coordinate * self.flat.local().numel() if self.flat.is_sharded else 0
        at = self.start + begin - before
        return local[at : at + end - begin] if end > begin else local[:0]

    def memory(self) -> torch.Tensor:
        """Give this rank's part of the flattened parameter, to write into; what FSDP has gathered of it is freed.

        Raises:
            FdsdError: All parameters are summoned.
        """
        local = self.flat.local()
        self.flat.reshard()
        return self.place_in(local)


def _order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Give the dims of a dense tensor by their strides, the widest first."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim], dim)))


def find_flats(wrapped: Iterable[nn.Module], known: dict[int, Flat]) -> dict[int, dict[str, FlatView]]:
    """Find the original parameters of FSDP1's modules.

    Args:
        wrapped: The wrappers.
        known: The flat parameters that were found before, by identity; new ones are added.

    Returns:
        By the identity of a module, the names of its parameters that lie in flat ones.

    Raises:
        Unsupported: FSDP flattened local tensors of DTensors, of which cannot be told how they lie.
    """
    found: dict[int, dict[str, FlatView]] = {}
    for wrapper in wrapped:
        state: Any = wrapper
        handle = state._handle
        if handle is None:
            continue
        flat = known.get(id(handle.flat_param))
        if flat is None:
            flat = known[id(handle.flat_param)] = _flat_of(state, handle)
            _check_places(flat)
        places: dict[tuple[int, str], FlatView] = {}
        for info, view in zip(handle.flat_param._param_infos, flat.views, strict=True):
            places[id(info.module), info.param_name] = view
        for shared in handle.flat_param._shared_param_infos:
            places[id(shared.module), shared.param_name] = places[id(shared.prim_module), shared.prim_param_name]
        for (module, name), view in places.items():
            found.setdefault(module, {})[name] = view
    return found


def _flat_of(state: Any, handle: Any) -> Flat:
    ranks = dist.get_process_group_ranks(handle.process_group)
    across = _across_of(state, handle)
    if not handle.uses_sharded_strategy:
        return Flat(handle, Layout(Mesh({"replicate": len(ranks)}, ranks), [Replicate()]), 0, across)
    replicas = _replicas(state, ranks)
    if replicas is None:
        return Flat(handle, Layout(Mesh({"shard": len(ranks)}, ranks), [Shard(0)]), handle.rank, across)
    mesh = Mesh({"replicate": len(replicas), "shard": len(ranks)}, replicas)
    return Flat(handle, Layout(mesh, [Replicate(), Shard(0)]), handle.rank, across)


def _check_places(flat: Flat) -> None:
    """Refuse flat parameters that this version of torch pads by rules of its own: others' cannot be known."""
    views = zip(flat.handle.flat_param._fqns, flat.views, strict=True)
    if odd := [name for name, view in views if view.across and not view.across.is_at(view.start, dist.get_rank())]:
        raise Unsupported(
            f"FSDP of torch {torch.__version__} pads {listing(odd)} over tensor parallelism in a way that fdsd does "
            "not know. Use fully_shard() over tensor parallelism, whose parameters say how they lie."
        )


def _across_of(state: Any, handle: Any) -> tuple[Across | None, ...]:
    """Say of each original parameter how it lies over tensor parallelism; ``None`` for one that was no DTensor."""
    specs, names = handle.flat_param._param_extensions, handle.flat_param._fqns
    over = [name for name, spec in zip(names, specs, strict=True) if spec is not None]
    if over and not handle.uses_sharded_strategy:
        raise Unsupported(
            f"FSDP has flattened local tensors of DTensors without sharding them: {listing(over)}. Leave FSDP out over "
            "tensor parallelism alone, or use fully_shard()."
        )
    if not over:
        return (None,) * len(specs)
    mesh = next(spec.mesh for spec in specs if spec is not None)
    meshes = Meshes(state._device_mesh, mesh, tuple(over))
    parts = [
        (tuple(shape),) * mesh.size() if spec is None else meshes.parts(spec, name)
        for name, spec, shape in zip(names, specs, handle.flat_param._shapes, strict=True)
    ]
    columns = [
        places_of([math.prod(part[i]) for part in parts], handle._aligned_numel, handle.world_size)
        for i in range(mesh.size())
    ]
    rows = zip(specs, parts, zip(*columns, strict=True), strict=True)
    return tuple([None if spec is None else meshes.across(spec, part, places) for spec, part, places in rows])


def _replicas(state: Any, ranks: Sequence[int]) -> list[list[int]] | None:
    """Give the ranks of all replicas for a hybrid strategy, a row each, if this rank can know them.

    A rank is told its own row and column only. The grid that FSDP makes, and every other regular one, follows from
    them. If it does not, the own row will do: others state theirs.
    """
    mesh = getattr(state, "_device_mesh", None)
    if mesh is not None and mesh.ndim == 2:
        rows: list[list[int]] = mesh.mesh.tolist()
        return [sorted(row) for row in rows]  # as the groups are, by which FSDP cuts
    across = getattr(state, "_inter_node_pg", None)
    if across is None:
        return None
    column = dist.get_process_group_ranks(across)
    made = [[first + rank - dist.get_rank() for rank in ranks] for first in column]
    flat = [rank for row in made for rank in row]
    regular = len(set(flat)) == len(flat) and min(flat) >= 0 and max(flat) < dist.get_world_size()
    return made if regular else None


def original_dtypes(wrapped: Iterable[nn.Module]) -> dict[int, torch.dtype]:
    """Give the dtypes that buffers had before FSDP's mixed precision, by the identity of the buffer.

    The state dict has them, whatever FSDP has cast the buffers to.
    """
    found: dict[int, torch.dtype] = {}
    for wrapper in wrapped:
        state: Any = wrapper
        if getattr(state.mixed_precision, "buffer_dtype", None) is None:
            continue
        originals: dict[str, torch.dtype] = state._buffer_name_to_orig_dtype
        for name, buffer in wrapper.named_buffers():
            clean = name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")
            dtype = originals.get(clean)
            if dtype is not None and dtype != buffer.dtype:
                found.setdefault(id(buffer), dtype)
    return found
