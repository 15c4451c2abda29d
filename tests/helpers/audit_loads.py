"""Loads for the audit: ways to give a state dict, ways to spoil it, and what all ranks have to be told alike."""

from __future__ import annotations

from typing import Any

import torch

from fdsd.compat.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from tests.helpers.audit_values import local_values, same
from tests.helpers.audited import plain

__all__ = ["ADDED", "FULL", "LOST", "WAYS", "full", "given", "options_of", "reference", "spoiled", "verdict_of"]

FULL = StateDictOptions(full_state_dict=True)
WAYS = ("sharded", "full", "broadcast")


def options_of(way: str, **more: Any) -> StateDictOptions:
    return StateDictOptions(full_state_dict=way != "sharded", broadcast_from_rank0=way == "broadcast", **more)


def reference(salt: int = 1, **options: Any) -> dict[str, Any]:
    return dict(plain(salt, **options).state_dict())


def full(model: Any) -> dict[str, Any]:
    return dict(get_model_state_dict(model, options=FULL))


def given(way: str, rank: int, content: dict[str, Any], source: Any) -> dict[str, Any]:
    """Give the state dict of this rank: the content's names, of the values of the source."""
    if way == "broadcast":
        return dict(content) if rank == 0 else {}
    values = get_model_state_dict(source) if way == "sharded" else {}
    return {name: values.get(name, value) for name, value in content.items()}


LOST = (
    ["units.1.down.weight"],
    ["table", "norm.num_batches_tracked"],
    ["noted._extra_state"],
    ["head.weight", "units.0.up.bias", "noted.gain"],
)
ADDED = ("stray", "units.0.up.weights")


def spoiled(content: dict[str, Any], fault: str, at: int) -> dict[str, Any]:
    made = dict(content)
    if fault in ("missing", "both"):
        for name in LOST[at % len(LOST)]:
            del made[name]
    if fault in ("unexpected", "both"):
        made[ADDED[at % 2]] = torch.ones(2)
    return made


def verdict_of(model: Any, state: Any, options: StateDictOptions) -> Any:
    """What all ranks have to be told alike; a refused load must have changed nothing, and no load its argument."""
    before = local_values(model)
    items = [(name, id(value)) for name, value in state.items()]
    try:
        result = set_model_state_dict(model, state, options=options)
    except RuntimeError as error:
        same(local_values(model), before)
        return "error", str(error)
    finally:
        assert [(name, id(value)) for name, value in state.items()] == items
    return result.missing_keys, result.unexpected_keys
