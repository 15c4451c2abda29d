"""Training states for tests: moments that tell where each element of a parameter went."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from fdsd import OptimState, ParamGroup, StateDict, TrainState
from fdsd.data.spec import spec_of
from fdsd.data.ties import ties
from fdsd.testing import states

__all__ = ["LIKE", "moments", "train_states", "trained"]

LIKE = ("exp_avg", ("kron", 0))
"""The slots that are like the parameters."""


def moments(model: StateDict[Any], salt: int) -> StateDict[Any]:
    """Give a tensor like each tensor of a model, float32 and all different; tied names share one."""
    owner = {name: group[0] for group in ties(model) for name in group}
    made: dict[str, Any] = {}
    count = 1000 * salt
    for name, leaf in model.items():
        spec = spec_of(leaf)
        if spec is None:
            made[name] = leaf
        elif owner.get(name, name) in made:
            made[name] = made[owner[name]]
        else:
            made[name] = (torch.arange(spec.numel) + count).reshape(spec.shape).to(torch.float32)
            count += spec.numel
    return StateDict(made)


def trained(model: StateDict[Any], *, num_groups: int = 1, skip: tuple[str, ...] = ()) -> TrainState:
    """Put an optimizer beside a model: each tied tensor listed once, ``skip`` without state."""
    alias = {name for group in ties(model) for name in group[1:]}
    params = [name for name, leaf in model.items() if isinstance(leaf, torch.Tensor) and name not in alias]
    slots: dict[Any, dict[str, Any]] = {}
    for salt, slot in enumerate(LIKE, start=1):
        column = moments(model, salt)
        slots[slot] = {name: column[name] for name in params if name not in skip}
    have = [name for name in params if name not in skip]
    slots["step"] = {name: torch.tensor(7.0) for name in have}
    slots["note"] = dict.fromkeys(have)
    size = -(-len(params) // num_groups) if params else 0
    groups = [
        ParamGroup(tuple(params[i * size : (i + 1) * size]), {"lr": 0.1 * (i + 1), "betas": (0.9, 0.95)})
        for i in range(num_groups)
    ]
    return TrainState(model, OptimState(slots, groups), {"epoch": 3})


@st.composite
def train_states(draw: st.DrawFn, *, tied: bool = False) -> TrainState:
    """A model of any kind beside its optimizer, with one parameter group.

    A verb that joins a tied name with another refuses, so there are ties only on request.
    """
    model = draw(states())
    kept = {name: leaf for name, leaf in model.items() if tied or not name.startswith("tied.")}
    return trained(StateDict(kept))
