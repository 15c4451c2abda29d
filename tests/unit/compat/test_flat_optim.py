"""The flat form of optimizers: options with dots in their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as peer

from fdsd.compat._flat_optim import flat_of, state_of_flat
from fdsd.compat.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from fdsd.data.groups import ParamGroup
from fdsd.data.optim import OptimState
from fdsd.errors import FdsdError

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LAX = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)


def grouped(*groups: ParamGroup) -> OptimState:
    names = [name for group in groups for name in group.fqns]
    return OptimState({"step": dict.fromkeys(names, 3)}, groups)


def optimizer_with(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[0].update(options)
    return optimizer


STATES = {
    "one": grouped(ParamGroup(("a.w", "a.b"), {"lr": 0.1, "my.lr": 0.2})),
    "two groups": grouped(ParamGroup(("a.w",), {"my.lr": 0.2}), ParamGroup(("a.b",), {"my.lr": 0.3, "x.y.z": None})),
    "on some": grouped(ParamGroup(("a.w",), {"lr": 0.2}), ParamGroup(("a.b",), {"l.r": 0.3})),
    "a name within a name": grouped(ParamGroup(("a.b",), {"c.d": 1}), ParamGroup(("a",), {"lr": 2})),
    "dots at the ends": grouped(ParamGroup(("w",), {".lr": 1, "lr.": 2, "..": 3})),
}


@pytest.mark.parametrize("name", list(STATES))
def test_the_flat_form_of_a_state_gives_that_state(name: str) -> None:
    state = STATES[name]
    flat = flat_of(state)
    assert {key for key in flat if key.startswith("param_groups.")} == {
        f"param_groups.{fqn}.{option}" for group in state.groups for fqn in group.fqns for option in group.options
    }
    assert state_of_flat(flat, state, state.fqns, FLAT) == state


@pytest.mark.parametrize(
    ("groups", "odd"),
    [
        ([ParamGroup(("a", "a.b"), {"b.c": 1})], "'a.b.c'"),
        ([ParamGroup(("a",), {"b.c": 1}), ParamGroup(("a.b",), {"c": 2})], "'a.b.c'"),
        ([ParamGroup(("a",), {"b.c.d": 1}), ParamGroup(("a.b.c",), {"lr": 2})], "'a.b.c.d'"),
    ],
)
def test_an_option_that_could_be_one_of_another_parameter_is_refused(groups: list[ParamGroup], odd: str) -> None:
    with pytest.raises(FdsdError, match="options with a dot in their name") as raised:
        flat_of(grouped(*groups))
    assert odd in str(raised.value) and "nested form" in str(raised.value)


def test_it_is_torchs_flat_form() -> None:
    model = nn.Linear(2, 1)
    optimizer = optimizer_with(model, **{"my.lr": 0.25})
    ours: Any = get_optimizer_state_dict(model, optimizer, options=FLAT)
    theirs: Any = peer.get_optimizer_state_dict(
        model, optimizer, options=peer.StateDictOptions(flatten_optimizer_state_dict=True)
    )
    assert str(sorted(ours.items())) == str(sorted(theirs.items()))
    other = optimizer_with(model, **{"my.lr": 0.5})
    set_optimizer_state_dict(model, other, theirs, options=FLAT)
    assert other.param_groups[0]["my.lr"] == 0.25


def test_an_option_that_only_the_flat_form_has_is_added() -> None:
    model = nn.Linear(2, 1)
    state = get_optimizer_state_dict(model, optimizer_with(model, **{"my.lr": 0.25}), options=FLAT)
    other = optimizer_with(model)
    set_optimizer_state_dict(model, other, state, options=FLAT)
    assert other.param_groups[0]["my.lr"] == 0.25


def test_an_option_that_the_flat_form_lacks_is_missing() -> None:
    model = nn.Linear(2, 1)
    state = get_optimizer_state_dict(model, optimizer_with(model), options=FLAT)
    other = optimizer_with(model, **{"my.lr": 0.5})
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*'param_groups.bias.my.lr'"):
        set_optimizer_state_dict(model, other, state, options=FLAT)
    set_optimizer_state_dict(model, other, state, options=LAX)
    assert other.param_groups[0]["my.lr"] == 0.5


def test_values_that_differ_within_a_group_are_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = optimizer_with(model, **{"my.lr": 0.25})
    state: Any = get_optimizer_state_dict(model, optimizer, options=FLAT)
    state["param_groups.bias.my.lr"] = 0.75
    with pytest.raises(FdsdError, match="parameters of one group of like= differ"):
        set_optimizer_state_dict(model, optimizer, state, options=FLAT)
    assert optimizer.param_groups[0]["my.lr"] == 0.25
