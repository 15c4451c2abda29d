"""From tensors that lie over ranks to whole ones, on the ranks that want them. Nested state dicts are unknown here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping
from typing import Any

import torch
from attrs import define, field, frozen

from fdsd.algebra.apply import defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.comms.alone import this_rank
from fdsd.comms.kinds import Once, is_sharded_tensor, parts_of, reduced, spec_of_kind
from fdsd.comms.modules import is_dtensor
from fdsd.comms.worlds import members_of
from fdsd.data.errors import FdsdError, add_note
from fdsd.data.spec import TensorSpec
from fdsd.data.ties import tie_key
from fdsd.engine.meetings import Meetings
from fdsd.engine.request import Request
from fdsd.layout.pieces import Pieces

__all__ = ["gathered", "lies_over_ranks"]


def lies_over_ranks(leaf: object) -> bool:
    """Tell whether a leaf is a tensor that lies over ranks.

    >>> lies_over_ranks(torch.ones(2))
    False
    """
    return is_dtensor(leaf) or is_sharded_tensor(leaf)


@frozen
class _Where:
    """On which ranks a tensor lies, and where its whole goes.

    Attributes:
        ranks: All that have to take part, ascending.
        device: Of the whole.
        is_here: Whether nothing has to travel: each rank has all of it, or this one nothing at all.
        is_partial: Whether what lies there are partial sums.
    """

    ranks: tuple[int, ...]
    device: torch.device
    is_here: bool
    is_partial: bool = False


@define
class _Places:
    """Finds out where tensors lie; asks each mesh once, since versions of torch compute what it says each time.

    Attributes:
        group: Over which ShardedTensors lie; their own group if left out.
        device: Where whole tensors go; that of the mesh, or of the local shard, if left out.
        spare: The same for a ShardedTensor without a local shard.
    """

    group: Any
    device: torch.device | None
    spare: torch.device | None
    _known: dict[Any, tuple[Any, _Where]] = field(factory=dict)

    def of(self, tensor: Any) -> _Where:
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            key = id(mesh), tensor.placements
            if key not in self._known:  # which keeps the mesh, so that no other gets its id
                self._known[key] = mesh, self._of_mesh(mesh, tensor.placements)
            return self._known[key][1]
        parts = parts_of(tensor)
        members = members_of(tensor._process_group if self.group is None else self.group)
        own = parts[0].device if parts else self.spare or torch.device("cpu")
        return _Where(members, self.device or own, False)

    def _of_mesh(self, mesh: Any, placements: Any) -> _Where:
        ranks = tuple(sorted(map(int, mesh.mesh.flatten().tolist())))
        is_here = this_rank() not in ranks or len(ranks) == 1 or all(p.is_replicate() for p in placements)
        is_partial = any(placement.is_partial() for placement in placements)
        return _Where(ranks, self.device or torch.device(mesh.device_type), is_here, is_partial)


def gathered(
    tensors: Mapping[str, Any],
    wanting: frozenset[int] | None,
    *,
    group: Any = None,
    device: torch.device | None = None,
    spare: torch.device | None = None,
    error: BaseException | None = None,
    asked: str = "whole tensors",
) -> dict[str, torch.Tensor]:
    """Gather tensors. Collective over the ranks on which they lie; each byte goes once, to each rank that wants it.

    Args:
        tensors: DTensors and ShardedTensors by name: on all ranks over which a tensor lies, in any order.
        wanting: The ranks that want them; ``None`` for all that hold some.
        group: Over which ShardedTensors lie; their own group if left out.
        device: Where the whole tensors go; that of the mesh, or of the local shard, if left out.
        spare: The same for a ShardedTensor without a local shard.
        error: What went wrong on this rank before; all ranks over which some tensor lies raise then.
        asked: What is asked for, which has to be the same on all ranks.

    Returns:
        On ranks that want them, the whole tensors by name; tied names have one tensor. One that is whole on every rank
        is given by reference.

    >>> gathered({}, None)
    {}
    """
    wants = wanting is None or this_rank() in wanting
    made: dict[str, torch.Tensor] = {}
    gathering, places, shared = _Gathering(wanting, wants), _Places(group, device, spare), _shared(tensors.values())
    move = Once(lambda one: parts_of(one)[0].detach().to(places.of(one).device))
    for name in sorted(tensors):
        tensor = tensors[name]
        where, spec = places.of(tensor), spec_of_kind(tensor)
        if where.is_here or not spec.numel:
            if wants:
                made[name] = move(tensor) if where.is_here else _empty(spec, where.device)
            continue
        try:
            gathering.add(name, tensor, spec, where, shared)
        except FdsdError as found:
            add_note(found, f"of {name!r}")
            error = error or found
    meetings = gathering.meetings
    made.update(meetings.run(meetings.collective, device=gathering.device, error=error, asked=asked))
    return made


def _empty(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)


def _shared(tensors: Iterable[Any]) -> frozenset[int]:
    """Give the addresses at which several tensors begin here, which may be tied; 0 stands for no memory."""
    counts = Counter([part.data_ptr() for tensor in tensors for part in parts_of(tensor)])
    return frozenset([0, *[address for address, count in counts.items() if count > 1]])


class _Gathering:
    """Makes requests, by the ranks that meet; tied tensors share the expression, and so the result."""

    def __init__(self, wanting: frozenset[int] | None, wants: bool) -> None:
        self.meetings = Meetings()
        self.device: torch.device | None = None
        self._wanting = wanting
        self._wants = wants
        self._nodes: dict[Hashable, Lazy] = {}
        self._outs: dict[int, torch.Tensor] = {}
        self._targets: dict[Hashable, Pieces] = {}

    def add(self, name: str, tensor: Any, spec: TensorSpec, where: _Where, shared: Container[int]) -> None:
        """Add a tensor; those that begin at a shared address are looked at more closely."""
        parts = parts_of(tensor)
        key: Hashable = name
        if any(part.data_ptr() in shared for part in parts):
            key = tuple([tie_key(part) for part in parts]), spec, where.ranks
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = defer_leaf(reduced(tensor) if where.is_partial else tensor)
        target = None if self._wanting is None else self._whole(node.shape, where.ranks, self._wanting)
        out = self._out(node, where.device) if self._wants else None
        self.meetings.add(name, Request(node, target, False, out), where.ranks)

    def _out(self, node: Lazy, device: torch.device) -> torch.Tensor | None:
        """Give memory on a device other than that of the first tensor, for which memory need not be made before."""
        if self.device is None:
            self.device = device
        if device == self.device:
            return None
        if id(node) not in self._outs:
            self._outs[id(node)] = torch.empty(node.shape, dtype=node.dtype, device=device)
        return self._outs[id(node)]

    def _whole(self, shape: tuple[int, ...], ranks: tuple[int, ...], wanting: frozenset[int]) -> Pieces:
        if (shape, ranks) not in self._targets:
            self._targets[shape, ranks] = Pieces.whole(shape, wanting.intersection(ranks))
        return self._targets[shape, ranks]
