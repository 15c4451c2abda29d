"""Materializing: lazy tensors are read, what is here stays, ties stay ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fdsd
from fdsd.data.errors import FdsdError, OverBudget, SpecMismatch
from fdsd.data.ties import ties
from tests.helpers.tensors import patterns, same_bytes

from .conftest import MIXED, assert_same_state


def test_lazy_leaves_are_read_and_others_stay() -> None:
    here, spectator = torch.ones(2, requires_grad=True), object()
    state = {"z": fdsd.defer(MIXED)["z.weight"], "here": here, "object": spectator, "none": None}
    found = fdsd.materialize(state)
    assert list(found) == list(state) and isinstance(found, fdsd.StateDict)
    assert type(found["z"]) is torch.Tensor and same_bytes(found["z"], MIXED["z.weight"])
    assert found["here"] is here and found["object"] is spectator and found["none"] is None
    assert not found["z"].requires_grad


def test_what_is_read_is_fresh_memory() -> None:
    w = patterns((3, 4), torch.float32)
    before = w.clone()
    found = fdsd.materialize(fdsd.defer({"w": w, "t": w.t()}))
    assert all(leaf.is_contiguous() for leaf in found.values())
    found["w"].zero_()
    assert same_bytes(w, before) and same_bytes(found["t"], before.t())


def test_nothing_to_do() -> None:
    assert fdsd.materialize({}) == {}
    assert fdsd.materialize(fdsd.StateDict(MIXED)) == MIXED


def test_metadata_and_history_are_kept() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    lazy = fdsd.rename_fqns({"0.{x}": "bn.{x}"})(fdsd.defer(module.state_dict()))
    found = fdsd.materialize(lazy)
    assert found.metadata == lazy.metadata and found.history == lazy.history
    assert found.metadata is not None and found.metadata["bn"] == {"version": 2}


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "meta"])
def test_ties_stay(device: Any) -> None:
    w = patterns((3, 4), torch.float32)
    lazy = fdsd.cast(torch.float64)(fdsd.defer({"a": w, "b": w.t(), "c": w}))
    found = fdsd.materialize(lazy, device=device)
    assert found["a"] is found["c"] and ties(found) == [("a", "c")]
    expected = "cpu" if device is None else torch.device(device).type
    assert {leaf.device.type for leaf in found.values()} == {expected}
    assert fdsd.specs(found) == fdsd.specs(lazy)


def test_ties_of_distinct_objects_stay() -> None:
    w = torch.ones(2)
    state = {"a": w, "b": torch.nn.Parameter(w)}
    assert ties(fdsd.materialize(state, device="meta")) == ties(state) == [("a", "b")]


def test_parameters_that_are_moved_have_no_history() -> None:
    found = fdsd.materialize({"w": torch.nn.Parameter(torch.ones(2))}, device="meta")["w"]
    assert found.grad_fn is None and found.device.type == "meta"


def test_optimizers_and_train_states() -> None:
    weight = fdsd.defer({"w": patterns((3, 4), torch.float32)})
    moments = fdsd.defer({"w": patterns((3, 4), torch.float32, 1)})
    group = fdsd.ParamGroup(("w",), {"lr": 0.1})
    state = fdsd.TrainState(weight, fdsd.OptimState({"exp_avg": moments}, (group,)), {"epoch": 3})
    found = fdsd.materialize(state)
    assert isinstance(found, fdsd.TrainState) and found.extra == {"epoch": 3} and found.optim is not None
    assert found.optim.groups == (group,)
    assert same_bytes(found.model["w"], patterns((3, 4), torch.float32))
    assert same_bytes(found.optim.slots["exp_avg"]["w"], patterns((3, 4), torch.float32, 1))
    alone = fdsd.materialize(state.optim, device="meta") if state.optim else None
    assert alone is not None and alone.slots["exp_avg"]["w"].is_meta
    assert fdsd.materialize(fdsd.TrainState(weight)).optim is None


def test_specs_are_refused() -> None:
    spec = fdsd.TensorSpec((), torch.int8)
    with pytest.raises(SpecMismatch, match=r"'step', 'z\.weight'"):
        fdsd.materialize({**MIXED, "step": spec, "z.weight": spec})
    with pytest.raises(SpecMismatch, match="'w'"):
        fdsd.materialize(fdsd.TrainState(fdsd.StateDict({"w": fdsd.TensorSpec((2,), torch.int8)})))


def test_lazies_over_specs_are_refused_by_name() -> None:
    lazy = fdsd.transpose("w")(fdsd.defer({"w": fdsd.TensorSpec((2, 3), torch.int8)}))
    with pytest.raises(FdsdError, match="'w' is known by its spec only"):
        fdsd.materialize(lazy)


@pytest.mark.parametrize("budget", [None, "256MB", 1 << 20])
def test_budget(budget: Any) -> None:
    state = {"w": patterns((64, 1024), torch.int32)}
    p = fdsd.map_tensors(lambda t: t.flip(0), "w") >> fdsd.cast(torch.float64, "w")
    assert_same_state(fdsd.materialize(p(fdsd.defer(state)), budget=budget), p(state))


def test_over_the_budget_raises_before_reading_and_names_one_that_suffices() -> None:
    state = {"w": patterns((64, 1024), torch.int32)}
    p = fdsd.map_tensors(lambda t: t.flip(0), "w")
    for lazy in (p(fdsd.defer(state)), fdsd.TrainState(p(fdsd.defer(state)))):
        with pytest.raises(OverBudget, match="at least 524288"):
            fdsd.materialize(lazy, budget="500KB")
    assert_same_state(fdsd.materialize(p(fdsd.defer(state)), budget=524288), p(state))


@pytest.mark.parametrize("budget", [-1, "x", True, 1.5])
def test_budgets_that_are_none(budget: Any) -> None:
    with pytest.raises(SpecMismatch, match="size"):
        fdsd.materialize({}, budget=budget)


@pytest.mark.parametrize("state", ["x", None, [torch.ones(1)], torch.ones(1)])
def test_what_is_no_state(state: Any) -> None:
    with pytest.raises(FdsdError, match="materialize"):
        fdsd.materialize(state)


def test_a_file_is_read_once_for_names_that_are_tied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = patterns((4, 4), torch.float32)
    fdsd.save({"a": w, "b": w}, tmp_path / "x.safetensors")
    state = fdsd.open(tmp_path / "x.safetensors")
    reads: list[str] = []
    source = type(state["a"].op.source)
    read = source.read

    def counted(self: Any, fqn: str, *args: Any) -> None:
        reads.append(fqn)
        read(self, fqn, *args)

    monkeypatch.setattr(source, "read", counted)
    found = fdsd.materialize(state)
    assert reads == ["a"] and found["a"] is found["b"]
