"""Requests sorted by the ranks that have to meet for them; each meeting in its turn, in one order on all ranks.

Tensors of one state may lie on different meshes: experts, stages, parts that are sharded along one axis only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from attrs import define, field

from fdsd.algebra.apply import defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.comms.alone import this_rank
from fdsd.comms.live import Modules
from fdsd.comms.modules import is_dtensor, layout_of
from fdsd.compat._group import has_group, placements_in, ranks_of
from fdsd.compat._options import StateDictOptions
from fdsd.compat._worlds import world_over
from fdsd.engine.delivery import plan_delivery
from fdsd.engine.request import Request
from fdsd.layout.wants import Target

__all__ = ["Meeting", "Meetings", "every_rank", "meetings_of"]

Meeting = tuple[int, ...]
"""The ranks that meet, ascending."""


def every_rank() -> Meeting:
    """Give all ranks of the default process group.

    >>> every_rank()
    (0,)
    """
    return tuple(range(torch.distributed.get_world_size())) if has_group() else (0,)


def meetings_of(modules: Modules, values: Iterable[Any], options: StateDictOptions) -> list[Meeting]:
    """Give the meetings of a load: all ranks, if rank 0 gives for all; else the ranks over which tensors lie.

    Args:
        modules: The model.
        values: What is loaded.
        options: Whether rank 0 gives for all.
    """
    if options.broadcast_from_rank0:
        return [every_rank()] if len(every_rank()) > 1 else []
    live: dict[int, Any] = {}
    for one in modules.tensors.values():
        key = _mesh_key(one.tensor if one.flat is None else one.flat.flat)
        if key and key not in live:
            live[key] = layout_of(one) if one.flat is None else one.flat.flat.layout
    given = {key: value for value in values if (key := _mesh_key(value)) and key not in live}
    found = {tuple(sorted(ranks_of([placement]))) for placement in live.values()}
    for value in given.values():  # from another mesh to those of the model
        ranks = tuple(sorted(ranks_of([*live.values(), *_placements(value)])))
        if not any(set(ranks) == set(known) for known in found):
            found.add(ranks)
    return sorted(ranks for ranks in found if len(ranks) > 1)


def _mesh_key(tensor: Any) -> int:
    """Give what tells meshes apart; 0 for what lies on none."""
    if is_dtensor(tensor):
        return id(tensor.device_mesh)
    if hasattr(tensor, "_process_group"):
        return id(tensor._process_group)
    return 0 if tensor is None or isinstance(tensor, torch.Tensor) else id(tensor)


def _placements(value: Any) -> list[Any]:
    node = defer_leaf(value) if isinstance(value, torch.Tensor) else value
    return list(placements_in(node)) if isinstance(node, Lazy) else []


@define
class Meetings:
    """Requests by the ranks that meet; those that need nobody else stand under ``()``.

    Attributes:
        known: The meetings that there are.
    """

    known: Sequence[Meeting] = ()
    requests: dict[Meeting, dict[str, Request]] = field(factory=dict)
    _found: dict[tuple[int, ...], tuple[Meeting, list[Target]]] = field(factory=dict, init=False)

    def add(self, name: str, request: Request, *, everywhere: bool = False) -> None:
        """Add a request.

        Args:
            name: Its name.
            request: What is wanted.
            everywhere: Whether all ranks meet for it, since rank 0 gives for all.
        """
        places: list[Target] = []
        if not everywhere and request.node is not None and (sources := placements_in(request.node)):
            places = [*sources, request.target]
        key = everywhere, *map(id, places)
        if key not in self._found:  # which keeps the placements, so that no others get their identities
            ranks = frozenset(every_rank()) if everywhere else ranks_of(places)
            self._found[key] = self._meeting_of(ranks), places
        self.requests.setdefault(self._found[key][0], {})[name] = request

    def _meeting_of(self, ranks: frozenset[int]) -> Meeting:
        """Give the smallest meeting at which some ranks are; one of their own if there is none."""
        if len(ranks) < 2:
            return ()
        wide = [one for one in self.known if ranks.issubset(one)]
        return min(wide, key=len) if wide else tuple(sorted(ranks))

    @property
    def collective(self) -> set[Meeting]:
        """The meetings in which this rank has something to get."""
        return {ranks for ranks in self.requests if ranks}

    @property
    def outs(self) -> list[torch.Tensor]:
        """The memory that is written."""
        return [r.out for requests in self.requests.values() for r in requests.values() if r.out is not None]

    def run(self, agreed: Collection[Meeting]) -> dict[str, torch.Tensor]:
        """Deliver. Collective in each meeting that was agreed on.

        Args:
            agreed: The meetings in which any rank has something to get; this rank is in each.
        """
        made: dict[str, torch.Tensor] = {}
        if () in self.requests:
            made.update(plan_delivery(self.requests[()], None, rank=this_rank()).run())
        for ranks in sorted(agreed):
            world = world_over(frozenset(ranks))
            made.update(plan_delivery(self.requests.get(ranks, {}), world, rank=this_rank()).run())
        return made
