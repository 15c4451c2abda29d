"""flatten_optim and unflatten_optim as conversions: composition, grades, refusals, and torch's own flat form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd import (
    Conversion,
    OptimState,
    ParamGroup,
    StateDict,
    TrainState,
    cast,
    flatten_optim,
    identity,
    pipe,
    rename_fqns,
    unflatten_optim,
)
from fdsd.errors import NameConflict, NotInvertible, SpecMismatch, Unsupported
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_laws, assert_round_trip, assert_same


def optim(*, lr: float = 0.1) -> OptimState:
    slots = {"step": {"a": torch.tensor(3.0), "b": torch.tensor(3.0)}, "exp_avg": {"a": torch.ones(2)}}
    return OptimState(slots, (ParamGroup(("a",), {"lr": 0.1}), ParamGroup(("b",), {"lr": lr})))


def test_flat_names() -> None:
    assert list(flatten_optim()(optim())) == [
        "state.a.step",
        "state.a.exp_avg",
        "state.b.step",
        "param_groups.a.lr",
        "param_groups.b.lr",
    ]


def test_kinds_and_grades() -> None:
    flat, back = flatten_optim(), unflatten_optim()
    assert isinstance(flat, Conversion) and isinstance(back, Conversion)
    assert flat.grade is Grade.ONE_SIDED and back.grade is Grade.EXACT
    assert ~flat == back and ~back == flat and unflatten_optim(optim()) != back
    assert isinstance(rename_fqns({"a": "c"}) >> flat, Conversion)
    assert isinstance(flat >> rename_fqns({"state.a.step": "s"}), Conversion)
    assert flat >> identity == flat == identity >> flat
    assert pipe(rename_fqns({"a": "c"}), flat) == rename_fqns({"a": "c"}) >> flat  # type: ignore[arg-type]
    assert repr(flat) == "flatten_optim()" and repr(back) == "unflatten_optim()"
    assert hash(flat) == hash(flatten_optim())


def test_laws() -> None:
    assert_laws(flatten_optim(), optim())
    assert_laws(unflatten_optim(), flatten_optim()(optim(lr=0.2)))
    assert_laws(flatten_optim() >> cast(torch.float64), optim())
    assert_round_trip(rename_fqns({"{x}": "m.{x}"}) >> flatten_optim(), optim(lr=0.3))


def test_canonical_groups_are_those_of_equal_options() -> None:
    assert unflatten_optim()(flatten_optim()(optim())).groups == (ParamGroup(("a", "b"), {"lr": 0.1}),)
    assert len(unflatten_optim()(flatten_optim()(optim(lr=0.2))).groups) == 2
    assert_same(unflatten_optim(optim())(flatten_optim()(optim())), optim())


@pytest.mark.parametrize(
    ("p", "state", "text"),
    [
        (flatten_optim(), TrainState({}, optim()), "state.optim"),
        (flatten_optim(), {"a": torch.ones(1)}, "OptimState"),
        (unflatten_optim(), optim(), "flat form"),
        (flatten_optim() >> flatten_optim(), optim(), "OptimState"),  # type: ignore[operator]
    ],
    ids=str,
)
def test_other_kinds_of_states_are_refused(p: Any, state: Any, text: str) -> None:
    with pytest.raises(Unsupported, match=text):
        p(state)
    assert not p.check(state).ok


def test_like_is_a_state() -> None:
    like: Any = torch.optim.SGD([torch.ones(1)], lr=1.0)
    with pytest.raises(Unsupported, match=r"like is an OptimState, not SGD. Give capture\(model, optimizer\).optim"):
        unflatten_optim(like)


def test_a_pipeline_with_a_step_without_inverse() -> None:
    with pytest.raises(NotInvertible):
        ~(flatten_optim() >> cast(torch.bfloat16))


def test_ambiguous_keys_and_conflicting_groups() -> None:
    flat = StateDict({"state.a.b.c": 1, "param_groups.a.lr": 0.1, "param_groups.a.b.lr": 0.1})
    with pytest.raises(NameConflict, match=r"state\.a\.b\.c"):
        unflatten_optim()(flat)
    like = OptimState({}, (ParamGroup(("a", "b"), {"lr": 0.1}),))
    with pytest.raises(SpecMismatch, match=r"0\.1.*0\.2"):
        unflatten_optim(like)({"param_groups.a.lr": 0.1, "param_groups.b.lr": 0.2})


def test_the_flat_form_is_a_state_dict_for_every_verb() -> None:
    p: Any = flatten_optim() >> rename_fqns({"state.{n...}": "optim.{n...}"})
    made = p(optim())
    assert type(made) is StateDict and "optim.a.step" in made
    assert len(made) == 5
