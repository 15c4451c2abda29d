"""Capturing and describing live models in one process, against ``state_dict()`` and the optimizer itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

from fdsd import ModelSpec, TensorEntry, TensorSpec, capture, describe, specs
from fdsd.data.ties import ties
from fdsd.errors import UnknownName, Unsupported
from tests.helpers.models import Counter, make
from tests.unit.comms.test_modules import compiled, trees


@given(trees())
def test_what_is_captured_is_the_state_dict(model: nn.Module) -> None:
    state, expected = capture(model), model.state_dict()
    assert list(state.model) == list(expected)
    for name, value in expected.items():
        leaf = state.model[name]
        if isinstance(value, torch.Tensor):
            assert torch.equal(leaf, value) and not leaf.requires_grad and leaf.data_ptr() == value.data_ptr()
        else:
            assert leaf is value
    assert ties(state.model) == ties(expected)
    assert state.model.metadata == dict(expected._metadata)  # type: ignore[attr-defined]
    assert (state.optim, dict(state.extra)) == (None, {})


@given(trees())
def test_a_description_has_the_specs_of_what_is_captured(model: nn.Module) -> None:
    spec = describe(model)
    state = capture(model).model
    shapes = specs({name: leaf for name, leaf in state.items() if isinstance(leaf, torch.Tensor)})
    assert dict(spec.specs()) == dict(shapes)
    assert {name for name, entry in spec.entries.items() if not entry.persistent}.isdisjoint(state)
    assert ModelSpec.from_json(spec.to_json()) == spec
    tied = {
        name for group in ties({n: v for n, v in state.items() if isinstance(v, torch.Tensor)}) for name in group[1:]
    }
    assert {name for name, entry in spec.entries.items() if entry.tied_to and entry.persistent} == tied


def test_a_captured_model_loads_with_its_versions() -> None:
    state = capture(make("net")).model
    model: Any = make("net")
    assert model.load_state_dict(state.to_dict()).missing_keys == []


def test_leaves_are_live() -> None:
    model = nn.Linear(2, 1)
    leaf = capture(model).model["bias"]
    with torch.no_grad():
        model.bias.fill_(7)
    assert leaf.item() == 7


def test_optimizers_are_captured_as_they_are() -> None:
    model: Any = make("even")
    first = torch.optim.Adam(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.2, momentum=0.9)
    model(torch.ones(3, 8)).sum().backward()
    first.step()
    second.step()
    wrapped = nn.DataParallel(compiled(model))
    state = capture(wrapped, [first, second])
    assert state.optim is not None
    assert [group.fqns for group in state.optim.groups] == [("0.weight", "0.bias"), ("2.weight",)]
    assert state.optim.slots["exp_avg"]["0.bias"] is first.state[model[0].bias]["exp_avg"]
    assert describe(wrapped, [first, second]).optimizers == ((state.optim.groups[0],), (state.optim.groups[1],))
    assert capture(wrapped, iter([first])).optim == capture(wrapped, first).optim


def test_nothing_is_stepped() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    state = capture(model, optimizer)
    assert state.optim is not None and not state.optim.slots and not optimizer.state
    assert describe(model, optimizer).optimizers[0][0].fqns == ("weight", "bias")
    assert not optimizer.state


def test_parameters_of_other_models() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    for function in (capture, describe):
        with pytest.raises(UnknownName, match="in the model"):
            function(nn.Linear(2, 1), optimizer)


def test_no_optimizers() -> None:
    assert capture(nn.Linear(1, 1), []).optim is None and describe(nn.Linear(1, 1), iter(())).optimizers == ()


def test_roles_of_a_description() -> None:
    entries = describe(make("net")).entries
    assert entries["cache"] == TensorEntry(TensorSpec((4,), torch.float32), "buffer", persistent=False)
    assert entries["head.weight"] == TensorEntry(TensorSpec((6, 5), torch.float32), tied_to="embed.weight")
    assert entries["adapter.weight"] == TensorEntry(TensorSpec((5, 5), torch.float32), trainable=False)
    assert entries["scale"] == TensorEntry(TensorSpec((2,), torch.float32), "buffer")
    assert "counter._extra_state" not in entries


def test_extra_states_stand_where_the_state_dict_has_them() -> None:
    model = nn.Sequential(Counter(None), nn.Linear(1, 1))
    state = capture(model).model
    assert list(state) == ["0.gain", "0._extra_state", "1.weight", "1.bias"] and state["0._extra_state"] is None


def test_parts_are_one_model() -> None:
    parts = [nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"1": nn.Linear(2, 2)})]
    assert list(capture(parts).model) == list(describe(parts).entries) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_what_cannot_be_described_is_named_at_once() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(1, 1))
    with pytest.raises(Unsupported, match=r"describe: 2 tensors cannot be described: '0.weight': .*'0.bias': "):
        describe(model)


def test_what_has_no_shape_yet_is_not_captured() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(1, 1))
    with pytest.raises(Unsupported, match=r"capture: '0\.bias', '0\.weight' are uninitialized.*Run the module once"):
        capture(model)
    model[0](torch.ones(1, 2))
    assert list(capture(model[0]).model) == ["weight", "bias"]


def test_a_meta_model_is_described() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    assert describe(model).entries["weight"].spec == TensorSpec((3, 2), torch.float32)
