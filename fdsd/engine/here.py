"""Delivery in one process: each expression is filled where it is wanted, one after the other. Nothing travels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from attrs import frozen

from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.fill import Runner, Session
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops.leaves import Origin
from fdsd.algebra.plan import check_budget
from fdsd.algebra.spans import view_of
from fdsd.data.errors import UnknownName, add_note, listing
from fdsd.data.region import Region
from fdsd.engine.overwriting import Kept, kept_of, placement_of
from fdsd.engine.request import Request
from fdsd.layout.cutting import Cutter, Spot
from fdsd.layout.pieces import Pieces
from fdsd.layout.transfer import Traffic
from fdsd.layout.wants import blocks_of, local_shape_of

__all__ = ["Here", "plan_here"]


@frozen(eq=False)
class Here:
    """A delivery in one process.

    Attributes:
        requests: What is wanted.
        leaders: For each name the first one that has the same result.
        roots: The expressions of those.
        rank: Which rank this process is.
        budget: Bytes for scratch beside the results.
        device: Where fresh results are made.
    """

    requests: Mapping[str, Request]
    leaders: Mapping[str, str]
    roots: Sequence[Lazy]
    rank: int
    budget: int | None
    device: torch.device

    def traffic(self) -> Traffic:
        return Traffic({}, {})

    def run(self) -> Iterator[tuple[str, torch.Tensor]]:
        kept = kept_of(self.requests, self.rank)
        session = Session(self.roots, budget=self.budget, executor=_Reader(kept, self.rank))
        uses = Counter(self.leaders.values())
        made: dict[str, torch.Tensor | None] = {}
        position = 0
        for name, request in self.requests.items():
            leader = self.leaders[name]
            if leader == name:
                made[name] = self._fill(name, request, session, position, name in kept.settled)
                session.finish(position)
                position += 1
            result = made[leader]
            uses[leader] -= 1
            if not uses[leader]:
                del made[leader]
            if result is not None:
                yield name, result
                del result

    def _fill(
        self, name: str, request: Request, session: Session, position: int, is_settled: bool
    ) -> torch.Tensor | None:
        root = session.roots[position]
        shape = local_shape_of(request.target, root.shape, self.rank)
        if shape is None:
            return None
        out = request.out
        if out is None:
            out = torch.empty(shape, dtype=request.result_dtype, device=self.device)
        if is_settled:
            return out
        try:
            with torch.no_grad():
                for block in blocks_of(request.target, root.shape, self.rank):
                    session.fill(root, block.region, out.detach()[block.place])
        except Exception as error:
            add_note(error, f"while reading {name!r}, {root.spec}")
            raise
        return out


class _Reader(Runner):
    """Does the work, and reads from the copies of sources that are overwritten."""

    def __init__(self, kept: Kept, rank: int) -> None:
        self._kept = kept
        self._rank = rank

    def read(self, origin: Origin, region: Region, out: torch.Tensor) -> None:
        copy = self._kept.copies.get((id(origin.source), origin.fqn))
        if copy is None:
            super().read(origin, region, out)
            return
        placement = placement_of(origin)
        if placement is None:
            copy_elements(view_of(copy, region), out)
            return
        blocks = blocks_of(placement, origin.spec.shape, self._rank)
        pieces = Pieces.of(origin.spec.ndim, [((block.starts, block.sizes), (self._rank,)) for block in blocks])
        spot = Spot(0, out.dtype, 0, tuple(out.shape), out.stride())
        for i, part, where in Cutter(pieces).cut(region, spot):
            if i is None:
                super().read(origin, region, out)  # for its error: it is not all here
                return
            moved = [at - start for at, start in zip(blocks[i].offset, blocks[i].starts, strict=True)]
            local = Region(tuple([span.shift(by) for span, by in zip(part.spans, moved, strict=True)]))
            view = out.as_strided(where.shape, where.strides, out.storage_offset() + where.offset)
            copy_elements(view_of(copy, local), view)


def plan_here(requests: Mapping[str, Request], rank: int, budget: int | None, device: torch.device) -> Here:
    """Plan a delivery in one process.

    Args:
        requests: What is wanted.
        rank: Which rank this process is in the targets.
        budget: Bytes for scratch beside the results.
        device: Where fresh results are made.

    Raises:
        UnknownName: An expression is not known.
        OverBudget: An operation needs more than the budget at once.

    >>> plan_here({}, 0, None, torch.device("cpu")).leaders
    {}
    """
    if missing := [name for name, request in requests.items() if request.node is None]:
        raise UnknownName(f"Nothing is known of {listing(missing)}. Give the group whose ranks know it with group=.")
    leaders: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, request in requests.items():
        try:
            request.check(rank)
        except Exception as error:
            add_note(error, f"of {name!r}")
            raise
        key = name if request.out is not None else (id(request.node), request.target, request.result_dtype)
        leaders[name] = first.setdefault(key, name)
    given = [request.node for name, request in requests.items() if leaders[name] == name]
    roots = [node for node in given if node is not None]
    check_budget(roots, budget)
    return Here(requests, leaders, roots, rank, budget, device)
