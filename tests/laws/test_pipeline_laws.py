"""Law 1, and pipelines as values: composition, equality, hash, repr, pickle, inverse of compositions, bind, order."""

from __future__ import annotations

import pickle
import re
from operator import invert
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fdsd
from fdsd import Pipeline, StateDict, identity, pipe
from fdsd.data.errors import NotInvertible
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_same, pipelines, states
from fdsd.testing._verbs import twice_flattened

NAMESPACE = {name: getattr(fdsd, name) for name in fdsd.__all__}


@st.composite
def cases(draw: st.DrawFn, *, exact: bool = False) -> tuple[StateDict[Any], Pipeline]:
    state = draw(states())
    return state, draw(pipelines(state, exact=exact, max_steps=6))


def pieces(p: Pipeline, cuts: list[int]) -> tuple[Pipeline, Pipeline, Pipeline]:
    a, b = sorted(cut % (len(p.steps) + 1) for cut in cuts)
    return Pipeline(p.steps[:a]), Pipeline(p.steps[a:b]), Pipeline(p.steps[b:])


CUTS = st.lists(st.integers(0, 100), min_size=2, max_size=2)


@given(cases(), CUTS)
def test_composition_is_associative(case: tuple[StateDict[Any], Pipeline], cuts: list[int]) -> None:
    state, p = case
    f, g, h = pieces(p, cuts)
    assert (f >> g) >> h == f >> (g >> h) == pipe(f, g, h) == p
    assert_same(((f >> g) >> h)(state), h(g(f(state))), order=True, tied=False, nans_equal=True)


@given(cases())
def test_identity_is_neutral(case: tuple[StateDict[Any], Pipeline]) -> None:
    state, p = case
    assert identity >> p == p == p >> identity
    assert pipe() == identity == ~identity == identity.bind(state)
    assert identity.grade is Grade.EXACT
    assert_same(identity(state), state, order=True)


@given(cases())
def test_repr_can_be_pasted_back(case: tuple[StateDict[Any], Pipeline]) -> None:
    state, p = case
    names = {**NAMESPACE, "torch": torch, "re": re, twice_flattened.__name__: twice_flattened}
    for q in (p, p.bind(state)):
        assert eval(repr(q), names) == q


@given(cases(), st.sampled_from([2, pickle.HIGHEST_PROTOCOL]))
def test_pickle_and_hash(case: tuple[StateDict[Any], Pipeline], protocol: int) -> None:
    state, p = case
    again = pickle.loads(pickle.dumps(p, protocol))
    assert again == p
    assert hash(again) == hash(p)
    assert_same(again(state), p(state), order=True, tied=False, nans_equal=True)


@given(cases(), cases())
def test_equality_is_of_steps(a: tuple[StateDict[Any], Pipeline], b: tuple[StateDict[Any], Pipeline]) -> None:
    p, q = a[1], b[1]
    assert (p == q) == (repr(p) == repr(q))
    assert p != p.steps and p != object()
    if p.steps:
        assert p >> p != p


@given(cases(exact=True), CUTS)
def test_inverse_of_a_composition(case: tuple[StateDict[Any], Pipeline], cuts: list[int]) -> None:
    state, p = case
    f, g, h = pieces(p.bind(state), cuts)
    assert ~(f >> g) == ~g >> ~f
    assert ~(f >> g >> h) == ~h >> ~g >> ~f


@given(cases(exact=True))
def test_inverse_twice_is_the_pipeline(case: tuple[StateDict[Any], Pipeline]) -> None:
    state, p = case
    bound = p.bind(state)
    steps = [step for step in bound.steps if step.verb not in ("cast", "pad", "reshape")]
    moves = Pipeline(steps)
    assert ~~moves == moves


@given(cases())
def test_bind_is_idempotent_and_changes_no_result(case: tuple[StateDict[Any], Pipeline]) -> None:
    state, p = case
    bound = p.bind(state)
    assert bound.bind(state) == bound == p.bind(fdsd.specs(state)) == p.bind(fdsd.defer(state))
    assert_same(bound(state), p(state), order=True, tied=False, nans_equal=True)


@given(cases())
def test_grade_tells_what_invert_does(case: tuple[StateDict[Any], Pipeline]) -> None:
    _, p = case
    assert p.grade is Grade.worst([step.grade for step in p.steps])
    if p.grade is Grade.NONE:
        with pytest.raises(NotInvertible):
            invert(p)
    else:
        assert isinstance(~p, Pipeline)


@given(cases())
def test_any_mapping_will_do(case: tuple[StateDict[Any], Pipeline]) -> None:
    state, p = case
    assert_same(p(dict(state)), p(state), order=True, tied=False, nans_equal=True)
    assert type(p(dict(state))) is StateDict


@given(cases(exact=True))
def test_names_that_stay_keep_their_order(case: tuple[StateDict[Any], Pipeline]) -> None:
    state, p = case
    for step in p.steps:
        before, state = list(state), Pipeline((step,))(state)
        kept = [name for name in before if name in state]
        assert [name for name in state if name in set(kept)] == kept
