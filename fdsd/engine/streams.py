"""`stream`: the tensors of a state one after the other, each gathered when its turn comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fdsd.comms.alone import world_for
from fdsd.data.devices import parse_device
from fdsd.data.errors import Unsupported
from fdsd.data.sizes import parse_size
from fdsd.data.values import is_mapping
from fdsd.engine.flows import Flow
from fdsd.engine.gathering import one_rank, plan_gathering
from fdsd.engine.unions import together

__all__ = ["stream"]


def stream(
    state: Mapping[str, Any],
    *,
    to: str | int = "all",
    group: Any = None,
    device: torch.device | str | None = None,
    budget: int | str = "256MB",
) -> Flow:
    """Go through the tensors of a state, gathering each when its turn comes, within a budget.

    Every rank of the group goes through it. Closing the iterator early on one rank ends it on all, soon: by
    ``close()``, by leaving a ``with`` statement, or by letting go of it, as a loop does. Plans are remembered by
    structure, so that with an unchanged one it is planned once, however often it is streamed.

    Args:
        state: Names to leaves: tensors, DTensors, lazy tensors of any kind. A ``Sharded`` leaf comes as this rank's
            shard. Other objects are left out.
        to: ``"all"``, or the rank that gets the others; the rest get nothing.
        group: The process group that works together; without one, this process alone reads.
        device: Where the tensors are made; the CPU by default.
        budget: Bytes of tensors and messages that may be under way at once; the smallest of all ranks counts.

    Returns:
        An iterator over each name and its tensor, which is the caller's to keep. It is planned at its first step.

    Raises:
        RankDisagreement: Ranks differ in what they have, or go through other streams; on all ranks.
        FdsdError: One of them failed; on all ranks.

    Law: ``dict(stream(x))`` equals ``materialize(x)``.

    >>> from fdsd.algebra.apply import defer
    >>> dict(stream(defer({"w": torch.ones(2)})))
    {'w': tensor([1., 1.])}
    """
    world = world_for(group)

    def asked() -> tuple[dict[str, Any], dict[str, Any]]:
        given: Any = state
        if not is_mapping(given):
            raise Unsupported(
                f"stream: it takes a mapping of names to leaves, not {type(given).__name__}. Of a TrainState "
                "give state.model; of a module, capture(module).model; of a file, open(path)."
            )
        target = None if to == "all" else one_rank(to, "stream")
        where = parse_device("stream", device)
        return dict(given), {"target": target, "device": where, "budget": parse_size(budget, "budget")}

    def begin() -> Iterator[tuple[str, torch.Tensor]]:
        leaves, how = together(world, "stream", asked)
        return plan_gathering(leaves, world, verb="stream", asked=f"stream(to={to!r})", **how).run()

    if len(world.ranks) == 1:
        asked()  # its errors need not wait for the first step
    return Flow(begin, world)
