"""`stream`: the tensors of a state one after the other, each gathered when its turn comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fdsd.comms.alone import world_for
from fdsd.data.errors import Unsupported
from fdsd.data.sizes import parse_size
from fdsd.data.values import is_mapping
from fdsd.engine.gathering import Gathering, plan_gathering
from fdsd.layout.layout import Layout
from fdsd.layout.mesh import Mesh
from fdsd.layout.placement import Replicate

__all__ = ["stream"]


def stream(
    state: Mapping[str, Any],
    *,
    to: str | int = "all",
    group: Any = None,
    device: torch.device | str | None = None,
    budget: int | str = "256MB",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Go through the tensors of a state, gathering each when its turn comes, within a budget.

    Every rank of the group goes through it. Closing the iterator early on one rank ends it on all, soon. With an
    unchanged structure, it is planned once, however often it is streamed.

    Args:
        state: Names to leaves: tensors, DTensors, lazy tensors of any kind. A ``Sharded`` leaf comes as this rank's
            shard. Other objects are left out.
        to: ``"all"``, or the rank that gets the others; the rest get nothing.
        group: The process group that works together; without one, this process alone reads.
        device: Where the tensors are made; the CPU by default.
        budget: Bytes of tensors and messages that may be under way at once.

    Yields:
        A name and its tensor, which is the caller's to keep.

    Raises:
        RankDisagreement: Ranks differ in what they have, or one of them failed; on all ranks.

    Law: ``dict(stream(x))`` equals ``materialize(x)``.

    >>> from fdsd.algebra.apply import defer
    >>> dict(stream(defer({"w": torch.ones(2)})))
    {'w': tensor([1., 1.])}
    """
    if not is_mapping(state):
        raise Unsupported(f"stream: it takes a mapping of names to leaves, not {type(state).__name__}.")
    target = None if to == "all" else one_rank(to, "stream")
    limit = parse_size(budget, "budget")
    return _items(plan_gathering, dict(state), world_for(group), target, device, limit)


def _items(
    plan: Any, state: dict[str, Any], world: Any, target: Layout | None, device: Any, limit: int
) -> Iterator[tuple[str, torch.Tensor]]:
    gathering: Gathering = plan(state, world, target=target, device=device, budget=limit, verb="stream")
    yield from gathering.run()


def one_rank(to: Any, verb: str) -> Layout:
    """Give the layout of a whole tensor on one rank.

    Raises:
        Unsupported: ``to`` is no rank.

    >>> one_rank(3, "gather").mesh.ranks
    (3,)
    """
    if not isinstance(to, int) or isinstance(to, bool) or to < 0:
        raise Unsupported(f'{verb}: to is "all" or the number of a rank, not {to!r}.')
    return Layout(Mesh({"rank": 1}, [to]), [Replicate()])
