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
from fdsd.comms.fsdp1 import FlatView
from fdsd.comms.fsdp1_across import shown_placements
from fdsd.comms.live import Modules
from fdsd.comms.worlds import Meeting, world_over
from fdsd.comms.wrappers import FSDP1_WRAPPED, wrapped_as
from fdsd.compat._options import StateDictOptions
from fdsd.data.columns import Slot
from fdsd.data.optim import OptimState
from fdsd.engine.asking import ask
from fdsd.engine.meetings import Meetings, ranks_of
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
        if isinstance(leaf, Lazy) and _view_of(modules, fqn) is not None
    }
    if not lazy:
        return columns
    shown_over = _shown_over(modules)
    cuts = {place: Cut.of(modules, place[1], leaf, shown_over, options, rank_0_only) for place, leaf in lazy.items()}
    names = {place: "/".join([place[1], str(place[0])]) for place in lazy}
    shared: dict[Hashable, str] = {}  # tied names share an expression, and what is made of it
    sources = {place: shared.setdefault((place[0], id(leaf)), names[place]) for place, leaf in lazy.items()}
    meetings = Meetings()
    own = {place: names[place] for place in lazy if sources[place] == names[place]}
    for place, name in own.items():
        meetings.add(name, cuts[place].request(lazy[place]), cuts[place].meeting)
    made = meetings.run(meetings.collective, asked=asked)
    finished = {name: cuts[place].shown(made.get(name)) for place, name in own.items()}
    return {
        key: {fqn: finished[sources[key, fqn]] if (key, fqn) in sources else leaf for fqn, leaf in column.items()}
        for key, column in columns.items()
    }


def _view_of(modules: Modules, fqn: str) -> FlatView | None:
    live = modules.tensors.get(fqn)
    return None if live is None else live.flat


def _meeting_over(view: FlatView) -> Meeting:
    return tuple(sorted(ranks_of([view.layout])))


@frozen(eq=False)
class Cut:
    """How one parameter is shown.

    Attributes:
        shape: Of the whole.
        dtype: In which it is shown.
        view: Where it lies in a flat parameter.
        mesh: The DeviceMesh over which it is shown; ``None`` for a ShardedTensor.
        placements: How torch says that it lies over it.
        options: Whether it is wanted whole, on the CPU, or both.
        rank_0_only: Whether a whole one is wanted on rank 0 only.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    view: FlatView
    mesh: Any
    placements: list[Any]
    options: StateDictOptions
    rank_0_only: bool

    @classmethod
    def of(
        cls,
        modules: Modules,
        fqn: str,
        leaf: Lazy,
        shown_over: Mapping[int, tuple[Any, Any]],
        options: StateDictOptions,
        rank_0_only: bool,
    ) -> Cut:
        """Find how a parameter is shown; ``shown_over`` as ``_shown_over`` gives it."""
        view = _view_of(modules, fqn)
        assert view is not None
        mesh, data = shown_over.get(id(view.flat.handle), (None, None))
        placements: list[Any] = [] if mesh is None else shown_placements(mesh, data)
        if view.across is not None:
            placements[view.across.tensor_axis] = view.across.tensor_placement
        return cls(leaf.shape, leaf.dtype, view, mesh, placements, options, rank_0_only)

    @property
    def meeting(self) -> Meeting:
        """The ranks over which it lies."""
        return _meeting_over(self.view)

    @property
    def layout(self) -> Layout:
        """How it is cut, if it is not wanted whole: along its first dim."""
        return Layout(self.view.layout.mesh, self.view.layout.placements)

    def request(self, leaf: Lazy) -> Request:
        """Ask for what this rank has to show."""
        device = torch.device("cpu") if self.options.cpu_offload else self.view.flat.parameter.device
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
        from torch.distributed.tensor import DTensor

        shape = torch.Size(self.shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)

    def _as_sharded_tensor(self, local: torch.Tensor) -> Any:
        from torch.distributed._shard.metadata import ShardMetadata
        from torch.distributed._shard.sharded_tensor.api import ShardedTensor
        from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
        from torch.distributed._shard.sharded_tensor.shard import Shard

        group, device = self.view.flat.handle.process_group, local.device
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


def _shown_over(modules: Modules) -> dict[int, tuple[Any, Any]]:
    """Give the DeviceMesh over which torch shows what is in a flat parameter, and the one that FSDP was given.

    By the identity of FSDP's handles, where it was given one. Over tensor parallelism it is the mesh of both, for what
    that has not cut too.
    """
    given = {id(wrapper._handle): getattr(wrapper, "_device_mesh", None) for wrapper in _wrappers(modules)}
    views = [live.flat for live in modules.tensors.values() if live.flat is not None and live.flat.across is not None]
    both = {given[id(view.flat.handle)]: view.across.mesh for view in views if view.across is not None}
    return {handle: (both.get(mesh, mesh), mesh) for handle, mesh in given.items() if mesh is not None}


def has_flats(modules: Modules) -> bool:
    """Tell whether tensors of a model lie in flat parameters of FSDP1."""
    return any(live.flat is not None for live in modules.tensors.values())


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
            flats.setdefault(_meeting_over(view), {})[fqn] = view
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
