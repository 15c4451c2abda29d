"""Law 2 for pipelines: what they make of deferred tensors is what they make of tensors."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd import Lazy, Pipeline, StateDict, TrainState, defer, materialize, rename_fqns, specs
from fdsd.data.ties import ties
from fdsd.testing import assert_same, pipelines, states
from tests.helpers.training import train_states


@st.composite
def cases(draw: st.DrawFn, *, unique: bool = True) -> tuple[StateDict[Any], Pipeline]:
    state = draw(states(unique=unique))
    return state, draw(pipelines(state, max_steps=6))


@given(cases())
def test_lazy_equals_eager(case: tuple[StateDict[Any], Pipeline]) -> None:
    state, p = case
    lazy = p(defer(state))
    assert not any(isinstance(leaf, torch.Tensor) for leaf in lazy.values()) or "insert" in repr(p)
    assert_same(materialize(lazy), p(state), order=True)


@given(cases(unique=False))
def test_lazy_equals_eager_on_nans_and_infinities(case: tuple[StateDict[Any], Pipeline]) -> None:
    state, p = case
    assert_same(materialize(p(defer(state))), p(state), order=True, nans_equal=True)


@given(cases(), st.lists(st.booleans(), min_size=12, max_size=12))
def test_a_mixture_equals_either(case: tuple[StateDict[Any], Pipeline], choice: list[bool]) -> None:
    state, p = case
    deferred = defer(state)
    mixed = {name: deferred[name] if choice[k % 12] else leaf for k, (name, leaf) in enumerate(state.items())}
    assert_same(materialize(p(mixed)), p(state), order=True, tied=False)  # tensors stay, lazy ones become others


@given(cases(), st.sampled_from([1 << 10, 1 << 16, 1 << 30]))
def test_a_budget_changes_no_value(case: tuple[StateDict[Any], Pipeline], budget: int) -> None:
    state, p = case
    whole = "map_tensors" in repr(p) or "insert" in repr(p)
    assert_same(materialize(p(defer(state)), budget=None if whole else budget), p(state), order=True)


@given(states())
def test_deferring_keeps_ties_and_objects(state: StateDict[Any]) -> None:
    lazy = defer(state)
    assert ties(lazy) == ties(state)
    assert specs(lazy) == specs(state)
    for name, leaf in state.items():
        assert isinstance(lazy[name], Lazy) if isinstance(leaf, torch.Tensor) else lazy[name] is leaf
    assert_same(
        materialize(lazy),
        state,
        order=True,
        tied=not any(0 in leaf.stride() for leaf in state.values() if isinstance(leaf, torch.Tensor)),
    )


@given(train_states(), st.data())
def test_lazy_equals_eager_for_training_states(state: TrainState, data: st.DataObject) -> None:
    p = data.draw(pipelines(state.model, exact=True, structural=True))
    assert state.optim is not None
    slots = {slot: defer(column) for slot, column in state.optim.slots.items()}
    lazy = TrainState(defer(state.model), state.optim.replace(slots=slots), state.extra)
    assert_same(materialize(p(lazy)), p(state), order=True, tied=False)


def test_nothing_is_read_before_it_is_asked_for() -> None:
    def boom(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("read")

    import fdsd

    p = rename_fqns({"a": "b"}) >> fdsd.map_tensors(boom, "b", spec=fdsd.TensorSpec((2,), torch.float32))
    assert isinstance(p(defer({"a": torch.ones(2)}))["b"], Lazy)
