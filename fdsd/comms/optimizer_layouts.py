"""How the state of a parameter lies over ranks, where torch itself says something else.

Versions of torch whose operations know no strided shards hold them for equal to plain ones: what an optimizer computes
from FSDP2's shards over tensor parallelism lies as they do, and calls itself a plain shard (``exp_inf`` of Adamax).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fdsd.comms.modules import is_dtensor
from fdsd.data.optim import OptimState
from fdsd.data.statedict import StateDict
from fdsd.data.values import is_dict

__all__ = ["as_laid", "columns_as_laid"]


def as_laid(value: Any, param: torch.Tensor) -> Any:
    """Give the state of a parameter, or a part of it, with DTensors that say how they lie; they share the live memory.

    torch moved nothing between placements that it holds for equal, so what has those of the parameter by torch's own
    comparison lies as the parameter does.

    >>> row = {"exp_inf": torch.ones(2)}
    >>> as_laid(row, torch.ones(2)) is row
    True
    """
    return _relabelled(value, param) if _is_strided(param) else value


def columns_as_laid(state: OptimState, params: Mapping[str, torch.Tensor]) -> OptimState:
    """Do so with a state by columns.

    Args:
        state: The state.
        params: The parameters by name.

    >>> state = OptimState({"exp_inf": {"w": torch.ones(2)}})
    >>> columns_as_laid(state, {"w": torch.ones(2)}) is state
    True
    """
    strided = {fqn: param for fqn, param in params.items() if _is_strided(param)}
    if not strided:
        return state
    slots = {
        slot: StateDict.trusted({fqn: _relabelled(value, strided.get(fqn)) for fqn, value in column.items()})
        for slot, column in state.slots.items()
    }
    return state.replace(slots=slots)


def _is_strided(param: Any) -> bool:
    """Tell whether a parameter has placements that this torch holds for equal to others."""
    if not is_dtensor(param):
        return False
    from torch.distributed.tensor.placement_types import Shard

    return any(
        hasattr(placement, "split_factor") and placement == Shard(placement.dim) for placement in param.placements
    )


def _relabelled(value: Any, param: Any) -> Any:
    """Give a value, or a new one in its place where something in it says that it lies otherwise than it does."""
    if is_dict(value):
        made = {key: _relabelled(item, param) for key, item in value.items()}
        return made if any(made[key] is not item for key, item in value.items()) else value
    if type(value) in (list, tuple):
        items = [_relabelled(item, param) for item in value]
        return type(value)(items) if any(new is not item for new, item in zip(items, value, strict=True)) else value
    if param is None or not is_dtensor(value) or value.shape != param.shape or value.device_mesh != param.device_mesh:
        return value
    from fdsd.comms.dtensors import local_of_dtensor, make_like, same_placements

    if value.placements != param.placements or same_placements(value.placements, param.placements):
        return value
    return make_like(param, local_of_dtensor(value))
