"""Requests sorted by the ranks that have to meet for them; each meeting in its turn, in one order on all ranks.

Tensors of one state may lie on different meshes: experts, stages, parts that are sharded along one axis only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field

from fdsd.algebra.apply import defer_leaf
from fdsd.algebra.graph import walk
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops.leaves import Origin
from fdsd.comms.alone import this_rank
from fdsd.comms.live import LiveTensor, Modules
from fdsd.comms.modules import is_dtensor, layout_of
from fdsd.comms.worlds import Meeting, every_rank, world_over
from fdsd.engine.delivery import plan_delivery
from fdsd.engine.overwriting import placement_of
from fdsd.engine.request import Request
from fdsd.layout.layout import Layout
from fdsd.layout.placed import Placement
from fdsd.layout.wants import Target

__all__ = ["Meetings", "meetings_of", "ranks_of"]


def ranks_of(placements: Iterable[Placement | None]) -> frozenset[int]:
    """Give the ranks that hold something of tensors that lie over ranks.

    >>> from fdsd.layout.mesh import Mesh
    >>> from fdsd.layout.placement import Shard
    >>> sorted(ranks_of([None, Layout(Mesh({"dp": 2}), [Shard(0)])]))
    [0, 1]
    """
    found: set[int] = set()
    for placement in {id(placement): placement for placement in placements}.values():
        if isinstance(placement, Layout):
            found.update(placement.mesh.ranks)
        elif placement is not None:
            found.update(rank for ranks in placement.ranks for rank in ranks)
    return frozenset(found)


def _placements_in(node: Lazy) -> list[Placement]:
    """Say how the source tensors of an expression lie over ranks; nothing of those that do not."""
    origins = [each.op for each in (walk([node]) if node.inputs else (node,)) if isinstance(each.op, Origin)]
    found = [placement_of(origin) for origin in origins]
    return [placement for placement in found if placement is not None]


def meetings_of(modules: Modules, given: Iterable[tuple[str, Any]], *, everywhere: bool = False) -> list[Meeting]:
    """Give this rank's meetings of a load: the sets of ranks over which tensors of a model lie, and what is loaded.

    Args:
        modules: The model.
        given: What is loaded, with the names in the model.
        everywhere: Whether all ranks meet for all, since one of them gives for all.
    """
    if everywhere:
        return [every_rank()] if len(every_rank()) > 1 else []
    live: dict[int, Any] = {}
    for one in modules.tensors.values():
        key = _key_of(one)
        if key and key not in live:
            live[key] = layout_of(one) if one.flat is None else one.flat.layout
    found = {tuple(sorted(ranks_of([placement]))) for placement in live.values()}
    seen: set[tuple[int, int]] = set()
    for name, value in given:
        key = _mesh_key(value) if isinstance(value, torch.Tensor | Lazy) else 0
        if not key:
            continue
        target = _key_of(modules.tensors.get(name))
        if key != target and (key, target) not in seen:  # from one mesh to another
            seen.add((key, target))
            found.add(tuple(sorted(ranks_of([*_placements(value), live.get(target)]))))
    return sorted(ranks for ranks in found if len(ranks) > 1 and this_rank() in ranks)


def _key_of(live: LiveTensor | None) -> int:
    if live is None:
        return 0
    return _mesh_key(live.tensor) if live.flat is None else id(live.flat.layout.mesh)


def _mesh_key(tensor: Any) -> int:
    """Give what tells meshes apart; 0 for what lies on none."""
    if is_dtensor(tensor):
        return id(tensor.device_mesh)
    if hasattr(tensor, "_process_group"):
        return id(tensor._process_group)
    return 0 if tensor is None or isinstance(tensor, torch.Tensor) else id(tensor)


def _placements(value: Any) -> list[Any]:
    node = defer_leaf(value) if isinstance(value, torch.Tensor) else value
    return list(_placements_in(node)) if isinstance(node, Lazy) else []


@define
class Meetings:
    """Requests by the ranks that meet; those that need nobody else stand under ``()``.

    Attributes:
        known: The meetings that there are; others are made as requests need them.
    """

    known: Sequence[Meeting] = ()
    requests: dict[Meeting, dict[str, Request]] = field(factory=dict)
    _found: dict[tuple[int, ...], tuple[Meeting, list[Target]]] = field(factory=dict, init=False)

    def add(self, name: str, request: Request, ranks: Meeting | None = None) -> None:
        """Add a request.

        Args:
            name: Its name.
            request: What is wanted.
            ranks: Who meets for it, if not those over whose ranks it lies, and is wanted.
        """
        if ranks is None:
            ranks = self._ranks(request)
        found = self.requests.get(ranks)
        if found is None:
            found = self.requests.setdefault(ranks if len(ranks) > 1 else (), {})
        found[name] = request

    def add_all(self, requests: Mapping[str, Request], ranks: Meeting) -> None:
        """Add requests by name, for which some ranks meet."""
        if requests:
            self.requests.setdefault(ranks if len(ranks) > 1 else (), {}).update(requests)

    def _ranks(self, request: Request) -> Meeting:
        """Find the meeting for a request by how it lies."""
        places: list[Target] = []
        if request.node is not None and (sources := _placements_in(request.node)):
            places = [*sources, request.target]
        key = tuple(map(id, places))
        if key not in self._found:  # which keeps the placements, so that no others get their identities
            self._found[key] = self._meeting_of(ranks_of(places)), places
        return self._found[key][0]

    def _meeting_of(self, ranks: frozenset[int]) -> Meeting:
        """Give the smallest meeting at which some ranks are; one of their own if there is none."""
        if len(ranks) < 2:
            return ()
        wide = [one for one in self.known if ranks.issubset(one)]
        return min(wide, key=len) if wide else tuple(sorted(ranks))

    @property
    def collective(self) -> set[Meeting]:
        """The meetings in which this rank has something to get or to give."""
        return {ranks for ranks in self.requests if ranks}

    @property
    def outs(self) -> list[torch.Tensor]:
        """The memory that is written."""
        return [r.out for requests in self.requests.values() for r in requests.values() if r.out is not None]

    def run(
        self,
        agreed: Collection[Meeting],
        *,
        device: torch.device | None = None,
        error: BaseException | None = None,
        asked: str = "tensors",
    ) -> dict[str, torch.Tensor]:
        """Deliver. Collective in each meeting that was agreed on.

        Args:
            agreed: The meetings in which any rank has something to get; this rank is in each.
            device: Where results are made that have no memory.
            error: What went wrong on this rank before; all that it meets raise then.
            asked: What is asked for, which has to be the same on all ranks.

        Raises:
            BaseException: The first error; it is told in the other meetings too, so that nobody waits there.
        """
        made: dict[str, torch.Tensor] = {}
        for ranks in sorted({*agreed, *(() if () not in self.requests else ((),))}):
            world = world_over(ranks)
            try:
                requests = self.requests.get(ranks, {})
                plan = plan_delivery(requests, world, device=device, error=error, rank=this_rank(), asked=asked)
                made.update(plan.run())
            except Exception as found:
                error = error or found
        if error is not None:
            raise error
        return made
