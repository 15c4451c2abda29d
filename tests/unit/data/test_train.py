"""TrainState: its three parts, as a value and as a tree."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import optree
import pytest
import torch

from fdsd.data.errors import Unsupported
from fdsd.data.optim import OptimState, ParamGroup
from fdsd.data.statedict import StateDict
from fdsd.data.train import TrainState

OPTIM = OptimState({"step": {"w": 3}}, (ParamGroup(("w",), {"lr": 0.1}),))


def test_any_mapping_becomes_a_state_dict_with_its_metadata() -> None:
    module = torch.nn.Linear(2, 3)
    state = TrainState(module.state_dict())
    assert isinstance(state.model, StateDict)
    assert list(state.model) == ["weight", "bias"]
    assert state.model.metadata == {"": {"version": 1}}
    kept = StateDict({"w": 1})
    assert TrainState(kept).model is kept


def test_extra_is_read_only_and_apart_from_the_given_mapping() -> None:
    extra = {"epoch": 3}
    state = TrainState({}, extra=extra)
    extra["epoch"] = 4
    assert state.extra == {"epoch": 3}
    with pytest.raises(TypeError):
        state.extra["epoch"] = 5
    with pytest.raises(AttributeError):
        state.model = StateDict()
    with pytest.raises(TypeError, match="unhashable"):
        hash(state)


def test_equality() -> None:
    w, v = torch.arange(2.0), torch.arange(2.0)
    assert TrainState({"w": w}, OPTIM, {"e": float("nan")}) == TrainState({"w": w}, OPTIM, {"e": float("nan")})
    assert TrainState({"w": w}) != TrainState({"w": v})
    assert TrainState({"w": w}) != TrainState({"w": w}, OPTIM)
    assert TrainState({"w": w}) != TrainState({"w": w}, extra={"epoch": 1})
    assert TrainState({}, extra={"e": w}) != TrainState({}, extra={"e": v})
    assert TrainState({"w": w}) != {"w": w}


@pytest.mark.parametrize(
    "model, optim, text",
    [
        (torch.nn.Linear(1, 1), None, "model.state_dict()"),
        ({}, {"state": {}, "param_groups": []}, "OptimState.from_torch"),
        (None, None, "NoneType"),
    ],
)
def test_refused(model: Any, optim: Any, text: str) -> None:
    with pytest.raises(Unsupported) as caught:
        TrainState(model, optim)
    assert text in str(caught.value)


def test_tree_paths_lead_into_all_parts() -> None:
    state = TrainState({"w": 1}, OPTIM, {"z": 7, "a": [8, 9]})
    paths, leaves, _ = optree.tree_flatten_with_path(state, namespace="fdsd")
    assert list(zip(paths, leaves, strict=True)) == [
        ((("model",), "w"), 1),
        ((("optim",), ("slots", "step"), "w"), 3),
        ((("extra", "z"),), 7),
        ((("extra", "a"), 0), 8),
        ((("extra", "a"), 1), 9),
    ]
    accessors = optree.tree_accessors(state, namespace="fdsd")
    assert [accessor(state) for accessor in accessors] == leaves
    assert [a.codify("t") for a in accessors[:3]] == [
        "t.model['w']",
        "t.optim.slots['step']['w']",
        "t.extra['z']",
    ]
    assert optree.tree_map(lambda leaf: leaf, state, namespace="fdsd") == state
    without = TrainState({"w": 1})
    assert optree.tree_map(lambda leaf: leaf, without, namespace="fdsd") == without


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
def test_copies_and_pickles(copied: Any) -> None:
    state = TrainState({"w": 1}, OPTIM, {"epoch": 3, "lr": (0.1, [0.2])})
    assert copied(state) == state
