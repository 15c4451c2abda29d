"""What would be overwritten before it is read: sources whose memory is also a result's, as when layers are swapped.

Such sources are copied first. A tensor that is brought to where it already lies is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from attrs import field, frozen

from fdsd.algebra.dtypes import movable
from fdsd.algebra.graph import walk
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops.leaves import Origin
from fdsd.data.memory import storage_id
from fdsd.engine.request import Request
from fdsd.layout.placed import PlacedSource
from fdsd.layout.wants import Target, blocks_of, local_shape_of

__all__ = ["Kept", "is_placed", "kept_of", "memory_of", "placement_of"]

_PLACED: dict[type, bool] = {}


def is_placed(source: object) -> bool:
    """Tell whether the tensors of a source lie over ranks; asked of each class once.

    >>> is_placed(None)
    False
    """
    kind = type(source)
    if kind not in _PLACED:
        _PLACED[kind] = isinstance(source, PlacedSource)
    return _PLACED[kind]


def placement_of(origin: Origin) -> Target:
    """Say how a source tensor lies over ranks; ``None``: whole, on each rank that has the source."""
    source: Any = origin.source
    found: Target = source.placement(origin.fqn) if is_placed(source) else None
    return found


def memory_of(origin: Origin) -> torch.Tensor | None:
    """Give the memory of this process in which a source tensor lies, or its part; ``None`` if there is none."""
    give: Callable[[str], Any] | None = getattr(origin.source, "local", None)
    found = None if give is None else give(origin.fqn)
    if not isinstance(found, torch.Tensor):
        return None
    return found.detach() if found.requires_grad else found


Place = tuple[int, str]
"""A source by its id, and a name in it."""


def _place(origin: Origin) -> Place:
    return id(origin.source), origin.fqn


@frozen
class Kept:
    """What has to be known before anything is written.

    Attributes:
        copies: The sources that were copied, by place.
        settled: The names whose results are their sources' own memory already.
        memories: The memory of sources, by the identity of their origins, as far as it was looked at.
    """

    copies: Mapping[Place, torch.Tensor] = field(factory=dict[Place, torch.Tensor])
    settled: frozenset[str] = frozenset()
    memories: Mapping[int, torch.Tensor] = field(factory=dict[int, torch.Tensor])

    def memory(self, origin: Origin) -> torch.Tensor | None:
        """Give the memory to read a source tensor from: its copy, if there is one."""
        found = self.copies.get(_place(origin)) if self.copies else self.memories.get(id(origin))
        return memory_of(origin) if found is None else found


def kept_of(requests: Mapping[str, Request], rank: int) -> Kept:
    """Copy the sources that share memory with a result, unless that is the very same tensor.

    Args:
        requests: What is wanted.
        rank: This rank.

    >>> kept_of({}, 0).copies
    {}
    """
    if all(request.out is None for request in requests.values()):
        return Kept()
    memories: dict[int, torch.Tensor] = {}
    plain: list[tuple[str, Request, Origin, torch.Tensor]] = []
    grown: list[Lazy] = []
    for name, request in requests.items():
        node = request.node
        if node is None or not isinstance(node.op, Origin):
            grown.extend([] if node is None else [node])
        elif (memory := memory_of(node.op)) is not None:
            memories[id(node.op)] = memory
            plain.append((name, request, node.op, memory))
    shared: list[Origin] = []
    for node in walk(grown):
        if isinstance(node.op, Origin) and (memory := memory_of(node.op)) is not None:
            memories[id(node.op)] = memory
            shared.append(node.op)
    if not memories:
        return Kept()
    written = _written(requests, ())
    if written.isdisjoint(map(storage_id, memories.values())):
        return Kept(memories=memories)
    settled: set[str] = set()
    for name, request, op, memory in plain:
        if storage_id(memory) in written:
            if _is_settled(request, op, memory, rank):
                settled.add(name)
            else:
                shared.append(op)
    if settled and shared:  # what is settled is not written
        written = _written(requests, settled)
    copies: dict[Place, torch.Tensor] = {}
    for origin in shared:
        memory = memories[id(origin)]
        if storage_id(memory) in written and not memory.is_meta and _place(origin) not in copies:
            copies[_place(origin)] = movable(memory).clone().view(memory.dtype)
    return Kept(copies, frozenset(settled), memories)


def _written(requests: Mapping[str, Request], settled: Collection[str]) -> set[int]:
    """Give the storages that are written."""
    outs = [request.out for name, request in requests.items() if name not in settled]
    return set(map(storage_id, [out for out in outs if out is not None and out.numel()]))


def _is_settled(request: Request, origin: Origin, memory: torch.Tensor, rank: int) -> bool:
    """Tell whether the result is, element for element, the memory in which its source lies."""
    out = request.out
    if out is None or storage_id(memory) != storage_id(out):
        return False
    if (memory.dtype, memory.shape, memory.storage_offset()) != (out.dtype, out.shape, out.storage_offset()):
        return False
    if memory.stride() != out.stride() or memory.is_conj() != out.is_conj() or memory.is_neg() != out.is_neg():
        return False
    shape = origin.spec.shape
    placement = placement_of(origin)
    return placement == request.target or (
        local_shape_of(placement, shape, rank) == local_shape_of(request.target, shape, rank)
        and blocks_of(placement, shape, rank) == blocks_of(request.target, shape, rank)
    )
