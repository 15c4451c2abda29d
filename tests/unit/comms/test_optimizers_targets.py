"""Targets: where each value of a loaded state is wanted, so that it can be delivered straight into place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

from fdsd import OptimState, ParamGroup, defer, specs
from fdsd.comms.modules import read_modules
from fdsd.comms.optimizer_probe import fresh_copy
from fdsd.comms.optimizer_targets import slot_targets
from fdsd.comms.optimizer_writing import write_optimizers
from fdsd.comms.optimizers import read_optimizers
from fdsd.data.columns import Item
from fdsd.data.spec import TensorSpec, spec_of
from tests.helpers.optimizers import CASES, OwnFormat, Setup, by_name, setups, told_optimizer, train

ALONE = tuple(case for case in CASES if case.name != "OwnFormat")


def deliver(state: OptimState, modules: Any, optimizers: Any) -> OptimState:
    """Put every tensor where its target is, as the engine does."""
    targets = slot_targets(modules, optimizers, state)
    slots: dict[Any, dict[str, Any]] = {}
    for slot, column in state.slots.items():
        for fqn, value in column.items():
            target = targets.get((slot, fqn))
            if target is not None:
                assert target.placement is None and not target.is_flat and target.flatten(value) is value
                memory = target.memory
                if memory is None:
                    memory = torch.empty(target.spec.shape, dtype=target.spec.dtype, device=target.device)
                assert spec_of(memory) == target.spec
                value = target.finished(memory.copy_(value))
            slots.setdefault(slot, {})[fqn] = value
    return state.replace(slots=slots)


@given(setups(ALONE))
def test_a_delivered_state_is_the_state(setup: Setup) -> None:
    model, optimizers = setup.trained(2)
    state = read_optimizers(read_modules(model), optimizers)
    for steps in (0, 1):
        other, others = setup.trained(steps, seed=9)
        modules = read_modules(other)
        done = deliver(state, modules, others)
        write_optimizers(done, modules, others, require="listed", adopt=True, dtype="source")
        assert [told_optimizer(o) for o in others] == [told_optimizer(o) for o in optimizers]


@given(setups(ALONE))
def test_live_tensors_are_the_targets_and_stay_in_place(setup: Setup) -> None:
    model, optimizers = setup.trained(2)
    modules = read_modules(model)
    state = read_optimizers(modules, optimizers)
    abstract = state.replace(slots={slot: specs(column) for slot, column in state.slots.items() if _tensors(column)})
    targets = slot_targets(modules, optimizers, abstract)
    expected = {
        (slot, fqn): value
        for slot, column in abstract.slots.items()
        for fqn in column
        if isinstance(value := state.slots[slot][fqn], torch.Tensor)
    }
    assert targets.keys() == expected.keys()
    for key, target in targets.items():
        assert target.memory is expected[key]
        assert target.finished(target.memory.view_as(target.memory)) is expected[key]


def _tensors(column: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in column.values())


def test_reading_targets_changes_nothing() -> None:
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters())
    state = OptimState({"exp_avg": {"weight": torch.ones(1, 2)}}, [ParamGroup(("weight", "bias"))])
    slot_targets(read_modules(model), adam, state)
    assert len(adam.state) == 0


DTYPES: list[tuple[str, str, torch.dtype, torch.dtype]] = [
    ("Adam", "exp_avg", torch.float32, torch.bfloat16),
    ("Adam", "step", torch.float32, torch.float32),
    ("Adam", "step", torch.int64, torch.int64),
    ("NAdam", "mu_product", torch.float32, torch.float32),
    ("NAdam", "mu_product", torch.float64, torch.float32),
    ("AdamW(fused)", "step", torch.float64, torch.float32),
    ("SGD(momentum)", "momentum_buffer", torch.float64, torch.bfloat16),
]


@pytest.mark.parametrize("name, slot, given_, expected", DTYPES)
def test_dtypes_of_slots_that_are_not_there_yet(
    name: str, slot: str, given_: torch.dtype, expected: torch.dtype
) -> None:
    model = nn.Linear(2, 1, dtype=torch.bfloat16)
    optimizer = by_name(name).make(list(model.parameters()))
    shape = () if slot in ("step", "mu_product") else (1, 2)
    state = OptimState({slot: {"weight": TensorSpec(shape, given_)}}, [ParamGroup(("weight",))])
    assert slot_targets(read_modules(model), optimizer, state)[slot, "weight"].spec == TensorSpec(shape, expected)


def test_live_dtypes_win() -> None:
    model = nn.Linear(2, 1, dtype=torch.bfloat16)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sgd.state[model.weight]["momentum_buffer"] = torch.zeros(1, 2, dtype=torch.float32)
    state = OptimState({"momentum_buffer": {"weight": TensorSpec((1, 2), torch.float64)}})
    target = slot_targets(read_modules(model), sgd, state)["momentum_buffer", "weight"]
    assert target.spec == TensorSpec((1, 2), torch.float32)


def test_a_live_tensor_of_another_shape_is_no_target() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.state[model.weight]["history"] = torch.zeros(3)
    state = OptimState({"history": {"weight": TensorSpec((5,), torch.float32)}})
    target = slot_targets(read_modules(model), sgd, state)["history", "weight"]
    assert target.memory is None and target.spec.shape == (5,)


def test_items_of_a_list_are_targets_of_their_own() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    live = [torch.zeros(1), torch.zeros(1, 2)]
    sgd.state[model.bias]["list"] = live
    state = OptimState({"list": {"bias": [torch.ones(1), torch.ones(3), torch.ones(1)]}})
    targets = slot_targets(read_modules(model), sgd, state)
    first, other, more = [targets[("list", Item(i)), "bias"] for i in range(3)]
    assert first.memory is not None and first.memory.data_ptr() == live[0].data_ptr()
    assert other.memory is None and other.spec.shape == (3,)
    assert more.memory is None and more.spec.shape == (1,)


def test_other_values_and_names_have_none() -> None:
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters())
    slots = {
        "step": {"weight": 3, "old": torch.ones(1)},
        "list": {"bias": [1.0]},
        "global": {"mean": torch.ones(2)},
    }
    assert slot_targets(read_modules(model), adam, OptimState(slots)) == {}


def test_a_tied_parameter_may_go_by_any_of_its_names() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, [sgd], 1)
    state = OptimState({"momentum_buffer": {"head.weight": TensorSpec((4, 2), torch.float32)}})
    target = slot_targets(read_modules(model), sgd, state)["momentum_buffer", "head.weight"]
    assert target.memory is sgd.state[model["embed"].weight]["momentum_buffer"]


def test_an_optimizer_that_loads_its_own_way_is_not_written_to_directly() -> None:
    model = nn.Linear(2, 1)
    own = OwnFormat(model.parameters(), lr=0.1, momentum=0.9)
    train(model, [own], 1)
    modules = read_modules(model)
    state = read_optimizers(modules, own)
    fresh = state.replace(slots={slot: {k: fresh_copy(v) for k, v in c.items()} for slot, c in state.slots.items()})
    lazy = state.replace(slots={slot: defer(column) for slot, column in state.slots.items()})
    assert all(target.memory is None for target in slot_targets(modules, own, lazy).values())
    before = told_optimizer(own)
    write_optimizers(deliver(fresh, modules, own), modules, own, adopt=True)
    assert told_optimizer(own) == before
