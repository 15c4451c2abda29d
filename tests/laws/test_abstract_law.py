"""Law 3: on specs a pipeline gives the specs of what it gives on tensors; and what it refuses, it refuses on both."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fdsd import (
    Pipeline,
    StateDict,
    TensorSpec,
    TrainState,
    defer,
    filter_frozen,
    rename_fqns,
    specs,
    tie,
    untie,
)
from fdsd.data.errors import FdsdError
from fdsd.data.template import escape
from fdsd.pipeline.check import abstract
from fdsd.testing import assert_same, pipelines, states
from tests.helpers.training import train_states


@st.composite
def cases(draw: st.DrawFn) -> tuple[StateDict[Any], Pipeline]:
    state = draw(states())
    return state, draw(pipelines(state, max_steps=6))


@given(cases())
def test_specs_of_the_result_are_the_result_of_specs(case: tuple[StateDict[Any], Pipeline]) -> None:
    state, p = case
    made = p(specs(state))
    assert_same(made, specs(p(state)), order=True)
    assert made == specs(p(state)) == specs(p(defer(state)))
    objects = [id(leaf) for leaf in state.values() if not isinstance(leaf, torch.Tensor)]
    assert all(isinstance(leaf, TensorSpec) or id(leaf) in objects for leaf in made.values())


@given(states(), st.data())
def test_ties_of_specs_are_those_of_tensors(state: StateDict[Any], data: st.DataObject) -> None:
    names = [name for name, leaf in state.items() if isinstance(leaf, torch.Tensor) and leaf.numel()]
    assume(names)
    owner = escape(data.draw(st.sampled_from(names)))
    p = tie({"alias": owner}) >> rename_fqns({"alias": "other", owner: "owner"})
    assert_same(p(specs(state)), specs(p(state)), order=True)
    assert_same(untie("other")(p(specs(state))), specs(untie("other")(p(state))), order=True)
    assert_same((p >> filter_frozen(["owner"]))(specs(state)), specs((p >> filter_frozen(["owner"]))(state)))


@given(cases())
def test_check_finds_nothing_wrong_with_what_runs(case: tuple[StateDict[Any], Pipeline]) -> None:
    state, p = case
    report = p.check(state, expect=p(state))
    assert report.ok, report
    report.raise_for_problems()


@given(train_states(), st.data())
def test_training_states(state: TrainState, data: st.DataObject) -> None:
    p = data.draw(pipelines(state.model, exact=True, structural=True))
    assert_same(p(abstract(state)), abstract(p(state)), order=True, tied=False)
    assert p.check(state).ok


def outcome(p: Pipeline, state: Any) -> Any:
    try:
        return specs(p(state))
    except FdsdError as error:
        return type(error)


@given(states(), st.data())
def test_tensors_lazy_tensors_and_specs_are_refused_alike(state: StateDict[Any], data: st.DataObject) -> None:
    """A pipeline for another state: it runs on all three, or on none, and ``check`` knows."""
    p = data.draw(pipelines(data.draw(states())))
    eager = outcome(p, state)
    assert outcome(p, defer(state)) == outcome(p, specs(state)) == eager
    report = p.check(state)
    assert report.ok == (not isinstance(eager, type))
