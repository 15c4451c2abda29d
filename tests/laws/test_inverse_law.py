"""Law 5: exact steps can be undone both ways, one-sided ones one way, the others say which argument would help."""

from __future__ import annotations

import re
from operator import invert
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fdsd import Pipeline, StateDict, TrainState, cast, drop, index_select, insert, rename_fqns, select, transpose
from fdsd.data.errors import FdsdError, NotInvertible
from fdsd.data.spec import TensorSpec
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_round_trip, assert_same, pipelines, states
from tests.helpers.training import train_states


@given(states(), st.data())
def test_exact_pipelines_are_undone_and_done_again(state: StateDict[Any], data: st.DataObject) -> None:
    p = data.draw(pipelines(state, exact=True, max_steps=6)).bind(state)
    assert p.grade is Grade.EXACT
    made = p(state)
    assert_same((~p)(made), state, tied=False)
    assert_same(p((~p)(made)), made, tied=False, order=True)


@given(states(unique=False), st.data())
def test_nans_come_back(state: StateDict[Any], data: st.DataObject) -> None:
    assert_round_trip(data.draw(pipelines(state, exact=True)), state)


@given(states(), st.data())
def test_the_inverse_is_a_pipeline_for_specs_and_lazy_tensors_too(state: StateDict[Any], data: st.DataObject) -> None:
    from fdsd import defer, materialize, specs

    p = data.draw(pipelines(state, exact=True)).bind(state)
    assert (~p)(p(specs(state))) == specs(state)
    assert_same(materialize((~p)(p(defer(state)))), state, tied=False)


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(states(), st.data())
def test_one_sided_steps_can_be_done_again(state: StateDict[Any], data: st.DataObject) -> None:
    p = data.draw(pipelines(state, max_steps=1)).bind(state)
    assume(p.grade is Grade.ONE_SIDED)
    assert_round_trip(p, state)


@given(train_states(), st.data())
def test_training_states_come_back(state: TrainState, data: st.DataObject) -> None:
    p = data.draw(pipelines(state.model, exact=True, structural=True)).bind(state)
    back = (~p)(p(state))
    assert_same(back.model, state.model, tied=False)
    assert back.optim is not None and state.optim is not None
    assert back.optim.slots.keys() == state.optim.slots.keys()
    for slot, column in state.optim.slots.items():
        assert_same(back.optim.slots[slot], column, tied=False)
    for group, other in zip(back.optim.groups, state.optim.groups, strict=True):
        assert sorted(group.fqns) == sorted(other.fqns)
        assert group.options == other.options


# -- steps that only seem to have an inverse -----------------------------------------------------------------------

STATE = StateDict({"a.w": torch.arange(6.0).reshape(2, 3), "b.w": torch.arange(3.0)})


def has_rows(name: str, spec: TensorSpec) -> bool:
    return spec.shape == (2, 3)


def is_single(name: str, spec: TensorSpec) -> bool:
    return spec.dtype is torch.float32


@pytest.mark.parametrize("p", [transpose(has_rows), cast(torch.float64, is_single)], ids=str)
def test_what_a_function_chose_is_undone_or_refused(p: Pipeline) -> None:
    """The function would choose otherwise among the results."""
    assert_same((~p.bind(STATE))(p(STATE)), STATE)
    with pytest.raises(NotInvertible, match="bind"):
        invert(p)


def test_an_order_of_the_first_indices_is_no_permutation_of_the_dim() -> None:
    p = index_select("b.w", [1, 0])
    assert p(STATE)["b.w"].tolist() == [1.0, 0.0]
    with pytest.raises(FdsdError, match=r"b\.w|permutation"):
        (~p.bind(STATE))(p(STATE))


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ({"{a}_{b}": "{b}_{a}"}, ["x_y_z"]),
        ({"a": "b"}, ["a", "c.b"]),
        ({"l.{i}": "l.{i+1}", "x?": "l.0"}, ["l.0", "l.1"]),
        ({"{x}.gamma?": "{x}.weight"}, ["n.weight"]),
        ({"{x}.gamma": "{x}.weight"}, ["m.gamma", "n.weight"]),
    ],
    ids=str,
)
def test_a_rename_comes_back_or_says_which_name_would_not(rules: dict[str, str], names: list[str]) -> None:
    state = StateDict({name: torch.tensor([float(k)]) for k, name in enumerate(names)})
    p = rename_fqns(rules)
    made = p(state)
    told: str | None = None
    try:
        back = (~p.bind(state))(made)
    except FdsdError as error:
        told = str(error)
    if told is None:
        assert_same(back, state)
    else:
        assert any(name in told for name in (*names, *made))


@pytest.mark.parametrize(
    ("p", "state", "stray"),
    [
        (drop("b.w"), STATE, "b.w"),
        (select("a.w"), STATE, "b.w"),
        (~insert("new", TensorSpec((1,), torch.int8), init=1), {"new": torch.ones(1)}, "new"),
    ],
    ids=str,
)
def test_undoing_a_choice_refuses_what_it_would_not_have_let_through(p: Pipeline, state: Any, stray: str) -> None:
    with pytest.raises(FdsdError, match=re.escape(stray)):
        (~p)(state)
