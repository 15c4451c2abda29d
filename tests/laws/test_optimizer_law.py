"""Law 9 for pipelines: lifting to an optimizer is running every column; the flat form can be undone."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fdsd import OptimState, ParamGroup, Pipeline, StateDict, TrainState, flatten_optim, specs, unflatten_optim
from fdsd.data.ties import ties
from fdsd.testing import assert_laws, assert_same, pipelines, states
from tests.helpers.training import LIKE, moments, train_states, trained


def structural(state: StateDict[Any], **options: Any) -> st.SearchStrategy[Pipeline]:
    """Pipelines that can be lifted: they compute no values (and add nothing that was never trained)."""
    return pipelines(state, structural=True, **options).filter(lambda p: "insert(" not in repr(p))


def params(state: TrainState) -> set[str]:
    assert state.optim is not None
    return set(state.optim.fqns)


@given(train_states(), st.data())
def test_lifting_equals_running_each_column(state: TrainState, data: st.DataObject) -> None:
    p = data.draw(structural(state.model))
    made = p(state)
    assert made.optim is not None
    assert_same(made.model, p(state.model), order=True, tied=False)
    new = [name for name, leaf in made.model.items() if isinstance(leaf, torch.Tensor)]
    alias = {name for group in ties(made.model) for name in group if name.startswith("alias")}
    for salt, slot in enumerate(LIKE, start=1):
        column = p(moments(state.model, salt))
        wanted = {name: leaf for name, leaf in column.items() if name in new and name not in alias}
        assert_same(made.optim.slots.get(slot, StateDict()), wanted, tied=False)
        assert set(wanted) <= params(made)
    for slot in ("step", "note"):
        assert set(made.optim.slots.get(slot, ())) == set(made.optim.slots.get(LIKE[0], ()))
    assert all(value.item() == 7.0 for value in made.optim.slots.get("step", StateDict()).values())
    assert all(value is None for value in made.optim.slots.get("note", StateDict()).values())


@given(train_states(), st.data())
def test_every_law_holds_for_training_states(state: TrainState, data: st.DataObject) -> None:
    assert_laws(data.draw(structural(state.model)), state)


@given(train_states(), st.data())
def test_groups_follow_the_names(state: TrainState, data: st.DataObject) -> None:
    p = data.draw(structural(state.model))
    made = p(state)
    assert made.optim is not None and state.optim is not None
    assert made.extra == state.extra
    assert [group.options for group in made.optim.groups] == [group.options for group in state.optim.groups]
    assert params(made) <= set(made.model)
    for column in made.optim.slots.values():
        assert set(column) <= params(made)


@given(states(), st.data(), st.integers(1, 3))
def test_several_groups_and_parameters_without_state(
    model: StateDict[Any], data: st.DataObject, num_groups: int
) -> None:
    """Renames and choices lift whatever the optimizer's state is: partial, in several groups, tied."""
    tensors = [name for name, leaf in model.items() if isinstance(leaf, torch.Tensor)]
    skip = tuple(data.draw(st.lists(st.sampled_from(tensors), unique=True))) if tensors else ()
    state = trained(model, num_groups=num_groups, skip=skip)
    assert state.optim is not None
    verbs = ("rename_fqns", "add_prefix", "drop_prefix")
    p = data.draw(pipelines(model, exact=True).filter(lambda p: all(step.verb in verbs for step in p.steps)))
    made = p(state)
    assert made.optim is not None
    to = dict(zip(model, p(model), strict=True))
    assert [g.fqns for g in made.optim.groups] == [tuple(to[n] for n in g.fqns) for g in state.optim.groups]
    for slot, column in state.optim.slots.items():
        assert_same(made.optim.slots[slot], {to[name]: value for name, value in column.items()})
    assert_same((~p)(made), state, tied=False)


@given(train_states(), st.data())
def test_an_optimizer_alone_is_rewritten_like_beside_its_model(state: TrainState, data: st.DataObject) -> None:
    """All parameters are trained, so that the names and shapes are all known from the state."""
    assert state.optim is not None
    assume(all(leaf.ndim for leaf in state.model.values() if isinstance(leaf, torch.Tensor)))
    only = StateDict({name: leaf for name, leaf in state.model.items() if name in params(state)})
    p = data.draw(structural(only, exact=True, max_steps=1).filter(lambda p: "tie" not in repr(p)))
    beside = p(TrainState(only, state.optim)).optim
    assert_same(p(state.optim), beside, tied=False)


@given(train_states())
def test_the_flat_form_is_undone(state: TrainState) -> None:
    assert state.optim is not None
    assume("a.b_c" not in state.optim.fqns)  # beside "a" its keys can be read in two ways
    flat = flatten_optim()(state.optim)
    assert unflatten_optim(like=state.optim)(flat) == state.optim
    assert_same(flatten_optim()(unflatten_optim()(flat)), flat)
    assert (~flatten_optim()) == unflatten_optim()
    assert ~(~flatten_optim()) == flatten_optim()
    assert_laws(flatten_optim(), state.optim)


def test_flat_form_between_renames() -> None:
    state = OptimState(
        {"step": {"a.w": torch.tensor(3.0)}, "exp_avg": {"a.w": torch.ones(2)}}, (ParamGroup(("a.w",), {"lr": 0.1}),)
    )
    from fdsd import rename_fqns

    p = rename_fqns({"a.{x}": "b.{x}"}) >> flatten_optim() >> rename_fqns({"state.{n...}": "optim.{n...}"})
    assert list(p(state)) == ["optim.b.w.step", "optim.b.w.exp_avg", "param_groups.b.w.lr"]
    assert (~p)(p(state)) == state
    assert p.check(state).ok
    assert specs(p(state))["optim.b.w.exp_avg"].shape == (2,)
