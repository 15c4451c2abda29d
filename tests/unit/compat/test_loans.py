"""What a fresh optimizer shows is memory to load into: set again it is adopted, once; any other dict is copied."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fdsd.compat import _loans
from fdsd.compat.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from tests.helpers.optimizers import told

FORMS = [StateDictOptions(flatten_optimizer_state_dict=flat) for flat in (False, True)]
MAKES = [
    lambda model: torch.optim.Adam(model.parameters()),
    lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
    lambda model: torch.optim.NAdam(model.parameters()),
]


def leaves(state: Any) -> list[torch.Tensor]:
    values = [leaf for row in state["state"].values() for leaf in row.values()] if "state" in state else state.values()
    return [value for value in values if torch.is_tensor(value)]


def owned(optimizer: Any) -> set[int]:
    return {id(value) for row in optimizer.state.values() for value in row.values() if torch.is_tensor(value)}


def step(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


@pytest.mark.parametrize("options", FORMS, ids=["nested", "flat"])
@pytest.mark.parametrize("make", MAKES)
def test_what_was_made_for_an_optimizer_becomes_its_own_once(make: Any, options: StateDictOptions) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, second = make(model), make(other)
    state: Any = get_optimizer_state_dict(model, optimizer, options=options)
    for value in leaves(state):
        value.fill_(3)
    kept = copy.deepcopy(state)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    assert owned(optimizer) == {id(value) for value in leaves(state)}
    set_optimizer_state_dict(other, second, state, options=options)
    assert owned(second).isdisjoint(owned(optimizer))
    before = told(get_optimizer_state_dict(model, optimizer, options=options))
    step(other, second)
    assert told(get_optimizer_state_dict(model, optimizer, options=options)) == before == told(kept)


@pytest.mark.parametrize("options", FORMS, ids=["nested", "flat"])
@pytest.mark.parametrize("make", MAKES)
def test_training_changes_no_dict_that_was_set(make: Any, options: StateDictOptions) -> None:
    """Seen: torch adopts tensors of the caller's, and steps in them."""
    model, source = nn.Linear(3, 2), nn.Linear(3, 2)
    old = make(source)
    step(source, old)
    fresh = get_optimizer_state_dict(model, make(model), options=options)  # that of another optimizer
    saved = get_optimizer_state_dict(source, old, options=options)
    optimizer = make(model)
    own = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    for state in (saved, fresh, own):
        target = optimizer if state is own else make(model)
        before = told(state)
        set_optimizer_state_dict(model, target, state, options=options)
        step(model, target)
        assert told(state) == before


def test_the_table_holds_on_to_nothing() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state: Any = get_optimizer_state_dict(model, optimizer)
    refs = [weakref.ref(one) for one in (optimizer, *leaves(state))]
    assert all(_loans.is_lent(value, [optimizer]) for value in leaves(state))
    del optimizer, state
    gc.collect()
    assert not any(ref() is not None for ref in refs)
    assert len(_loans._LENT) == 0
