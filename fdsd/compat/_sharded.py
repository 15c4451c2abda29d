"""ShardedTensors that are given to setters: as expressions, since they warn when they are asked like tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from fdsd.algebra.apply import defer_leaf
from fdsd.comms.kinds import is_sharded_tensor
from fdsd.data.optim import OptimState

__all__ = ["deferred", "deferred_slots"]


def deferred(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a state dict with its ShardedTensors as expressions.

    >>> deferred({"lr": 0.1})
    {'lr': 0.1}
    """
    if not any(map(is_sharded_tensor, state.values())):
        return state
    made = OrderedDict([(name, defer_leaf(leaf) if is_sharded_tensor(leaf) else leaf) for name, leaf in state.items()])
    made._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]  # torch's own convention
    return made


def deferred_slots(state: OptimState) -> OptimState:
    """Give the state of optimizers with its ShardedTensors as expressions.

    >>> deferred_slots(OptimState({"step": {"w": 3}})).slots["step"]["w"]
    3
    """
    slots = {slot: deferred(column) for slot, column in state.slots.items()}
    if all(slots[slot] is column for slot, column in state.slots.items()):
        return state
    return state.replace(slots=slots)
