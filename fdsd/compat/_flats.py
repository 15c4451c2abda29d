"""Parameters in FSDP1's flat ones as torch shows them: whole, or cut along their first dim, ShardedTensors or DTensors.

Each rank receives what it has to show, and nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from fdsd.algebra.lazy import Lazy
from fdsd.comms.alone import this_rank
from fdsd.comms.fsdp1 import Flat, FlatView
from fdsd.comms.live import Modules
from fdsd.comms.worlds import Meeting, world_over
from fdsd.comms.wrappers import FSDP1_WRAPPED, wrapped_as
from fdsd.compat._options import StateDictOptions
from fdsd.data.columns import Slot
from fdsd.data.optim import OptimState
from fdsd.engine.asking import ask
from fdsd.engine.delivery import plan_delivery
from fdsd.engine.meetings import ranks_of
from fdsd.engine.request import Request
from fdsd.layout.layout import Layout
from fdsd.layout.pieces import Pieces

__all__ = ["has_flats", "shown", "with_rows_from_elsewhere"]

Columns = Mapping[Any, Mapping[str, Any]]
"""Leaves by name of the parameter, in columns: one for a model, one for each slot of optimizers."""


def shown(columns: Columns, modules: Modules, options: StateDictOptions, asked: str, *, rank_0_only: bool) -> Columns:
    """Show what lies in flat parameters as torch does; other leaves stay as they are. Collective, if there is any.

    Args:
        columns: Live values.
        modules: The model.
        options: Whether they are wanted whole, on the CPU, or both.
        asked: What is asked for, with what has to be equal on all ranks.
        rank_0_only: Whether whole ones are wanted on rank 0 only; others get ``None``.
    """
    lazy = {
        (key, fqn): leaf
        for key, column in columns.items()
        for fqn, leaf in column.items()
        if isinstance(leaf, Lazy) and _flat_of(modules, fqn) is not None
    }
    if not lazy:
        return columns
    meshes = {id(wrapper._handle): getattr(wrapper, "_device_mesh", None) for wrapper in _wrappers(modules)}
    cuts = {place: Cut.of(modules, place[1], leaf, meshes, options, rank_0_only) for place, leaf in lazy.items()}
    names = {place: "/".join([place[1], str(place[0])]) for place in lazy}
    shared: dict[Hashable, str] = {}  # tied names share an expression, and what is made of it
    sources = {place: shared.setdefault((place[0], id(leaf)), names[place]) for place, leaf in lazy.items()}
    meetings: dict[tuple[int, ...], dict[str, Request]] = {}
    for place, leaf in lazy.items():
        if sources[place] == names[place]:
            ranks = tuple(sorted(ranks_of([cuts[place].flat.layout])))
            meetings.setdefault(ranks, {})[names[place]] = cuts[place].request(leaf)
    made: dict[str, torch.Tensor] = {}
    for ranks in sorted(meetings):  # in the same order on all ranks
        world = world_over(frozenset(ranks))
        made.update(plan_delivery(meetings[ranks], world, rank=this_rank(), asked=asked).run())
    finished = {
        names[place]: cuts[place].shown(made.get(names[place])) for place in lazy if sources[place] == names[place]
    }
    return {
        key: {fqn: finished[sources[key, fqn]] if (key, fqn) in sources else leaf for fqn, leaf in column.items()}
        for key, column in columns.items()
    }


def _flat_of(modules: Modules, fqn: str) -> Flat | None:
    live = modules.tensors.get(fqn)
    return None if live is None or live.flat is None else live.flat.flat


@frozen(eq=False)
class Cut:
    """How one parameter is shown.

    Attributes:
        layout: Along its first dim over the ranks that its flat parameter lies over; ``None`` for a whole one.
        mesh: The DeviceMesh that FSDP was given, if it was.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    flat: Flat
    mesh: Any
    options: StateDictOptions
    rank_0_only: bool

    @classmethod
    def of(
        cls,
        modules: Modules,
        fqn: str,
        leaf: Lazy,
        meshes: Mapping[int, Any],
        options: StateDictOptions,
        rank_0_only: bool,
    ) -> Cut:
        """Find how a parameter is shown; ``meshes`` by the identity of FSDP's handles."""
        flat = _flat_of(modules, fqn)
        assert flat is not None
        return cls(leaf.shape, leaf.dtype, flat, meshes.get(id(flat.handle)), options, rank_0_only)

    @property
    def layout(self) -> Layout:
        """How it is cut, if it is not wanted whole: along its first dim."""
        return Layout(self.flat.layout.mesh, self.flat.layout.placements)

    def request(self, leaf: Lazy) -> Request:
        """Ask for what this rank has to show."""
        device = torch.device("cpu") if self.options.cpu_offload else self.flat.parameter.device
        if not self.options.full_state_dict:
            out = torch.empty(self.layout.local_shape(self.shape, this_rank()), dtype=self.dtype, device=device)
            return Request(leaf, self.layout, False, out)
        only = Pieces.whole(self.shape, [0]) if self.rank_0_only else None
        if only is not None and this_rank() != 0:
            return Request(leaf, only, False)
        return Request(leaf, only, False, torch.empty(self.shape, dtype=self.dtype, device=device))

    def shown(self, local: torch.Tensor | None) -> Any:
        """Make what torch would show, of what this rank has got."""
        if local is None or self.options.full_state_dict:
            return local
        return self._as_sharded_tensor(local) if self.mesh is None else self._as_dtensor(local)

    def _as_dtensor(self, local: torch.Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [Replicate() for _ in range(self.mesh.ndim - 1)] + [Shard(0)]
        shape = torch.Size(self.shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)

    def _as_sharded_tensor(self, local: torch.Tensor) -> Any:
        from torch.distributed._shard.metadata import ShardMetadata
        from torch.distributed._shard.sharded_tensor.api import ShardedTensor
        from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
        from torch.distributed._shard.sharded_tensor.shard import Shard

        group, device = self.flat.handle.process_group, local.device
        ranks = dist.get_process_group_ranks(group)
        pieces: list[ShardMetadata] = []
        shards: list[Shard] = []
        for rank in ranks:
            for block in self.layout.blocks(self.shape, rank):
                where = f"rank:{rank}/{device.type}" + (f":{rank % _per_node()}" if device.type != "cpu" else "")
                pieces.append(ShardMetadata(list(block.starts), list(block.sizes), where))
                if rank == this_rank():
                    shards.append(Shard(local, pieces[-1]))
        properties = TensorProperties(
            dtype=self.dtype,
            layout=torch.strided,
            requires_grad=False,
            memory_format=torch.contiguous_format,
            pin_memory=False,
        )
        metadata = ShardedTensorMetadata(pieces, torch.Size(self.shape), properties)
        kind: Any = ShardedTensor
        make: Any = kind._init_from_local_shards_and_global_metadata  # as FSDP itself makes them
        return make(shards, sharded_tensor_metadata=metadata, process_group=group)


def _per_node() -> int:
    return max(torch.accelerator.device_count() if hasattr(torch, "accelerator") else torch.cuda.device_count(), 1)


def _wrappers(modules: Modules) -> Iterator[Any]:
    for part in modules.parts:
        for module in part.modules():
            if wrapped_as(type(module)) == FSDP1_WRAPPED:
                yield module


def has_flats(modules: Modules) -> bool:
    """Tell whether FSDP1 wraps any part of a model."""
    return next(_wrappers(modules), None) is not None


def with_rows_from_elsewhere(state: OptimState, modules: Modules, asked: str) -> OptimState:
    """Add the state of parameters of which this rank holds nothing, as the ranks that hold something tell it.

    With original parameters, FSDP1 gives an optimizer no state for what lies on other ranks only; every rank shows it
    all the same. Collective, if there are flat parameters that lie over ranks.

    Args:
        state: The state of this rank's optimizers.
        modules: The model.
        asked: What is asked for, with what has to be equal on all ranks.
    """
    flats: dict[Meeting, dict[str, FlatView]] = {}
    for fqn in state.fqns:
        view = None if (live := modules.tensors.get(fqn)) is None else live.flat
        if view is not None and view.flat.is_sharded:
            ranks = tuple(sorted(ranks_of([view.flat.layout])))
            flats.setdefault(ranks, {})[fqn] = view
    slots: dict[Slot, dict[str, Any]] = {slot: dict(column) for slot, column in state.slots.items()}
    for ranks, views in sorted(flats.items(), key=lambda item: item[0]):
        world = world_over(frozenset(ranks))
        mine = [
            (slot, fqn, column[fqn].dtype if isinstance(column[fqn], Lazy) else column[fqn])
            for slot, column in state.slots.items()
            for fqn in views
            if fqn in column
        ]
        for slot, fqn, told in [] if world is None else [row for rows in ask(world, asked, mine) for row in rows]:
            column = slots.setdefault(slot, {})
            if fqn not in column:
                nothing = torch.empty(0, dtype=told) if isinstance(told, torch.dtype) else None
                column[fqn] = told if nothing is None else views[fqn].of_piece(nothing)
    return state.replace(slots=slots)
