"""Arguments of ``restore`` that are something else: the error says what to give, and that works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fdsd
from fdsd.errors import UnknownName, Unsupported


def made(seed: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    adam.step()
    return model, adam


def refused(text: str, *args: Any, **how: Any) -> str:
    with pytest.raises(Unsupported, match=re.escape(text)) as caught:
        fdsd.restore(*args, **how)
    return str(caught.value)


def test_a_path(tmp_path: Path) -> None:
    source, _ = made(0)
    target, _ = made(1)
    for name in ("m.safetensors", "m.pt", "folder"):
        path = tmp_path / name
        fdsd.save(fdsd.capture(source).model, path)
        for given in (path, str(path)):
            told = refused("not a path. Give fdsd.open(", given, target)
            found = re.search(r"Give (fdsd\.open\('.*'\))\.$", told)
            assert found is not None
            fdsd.restore(eval(found.group(1), {"fdsd": fdsd}), target)
            assert torch.equal(target.weight, source.weight)


def test_a_dict_of_torchs_optimizers() -> None:
    source, theirs = made(0)
    target, ours = made(1)
    names = [name for name, _ in source.named_parameters()]
    by_ids, by_names = theirs.state_dict(), fdsd.OptimState.from_torch(theirs.state_dict(), names).to_torch()
    told = "Give fdsd.OptimState.from_torch(dict, names), with the names"
    for given in (by_ids, by_names):
        for optimizers in ((), ours, [ours]):
            refused(told, given, target, optimizers)
    fresh = torch.optim.Adam(source.parameters()).state_dict()
    refused(told, fresh, target, ours)
    for state in (fdsd.OptimState.from_torch(by_ids, names), fdsd.OptimState.from_torch(by_names)):
        fdsd.restore(state, target, ours)
        for mine, other in zip(target.parameters(), source.parameters(), strict=True):
            assert torch.equal(ours.state[mine]["exp_avg"], theirs.state[other]["exp_avg"])


def test_a_model_may_have_such_names() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = nn.Parameter(torch.ones(1))
            self.param_groups = nn.Parameter(torch.ones(2))

    fdsd.restore({"state": torch.zeros(1), "param_groups": torch.zeros(2)}, Odd())


def test_a_model_as_the_state() -> None:
    source, theirs = made(0)
    target, _ = made(1)
    refused(
        "the state comes first, restore(state, model); of a model, fdsd.capture(model)", source, source.state_dict()
    )
    refused("the state comes first", source, target)
    fdsd.restore(fdsd.capture(source), target)
    assert torch.equal(target.weight, source.weight)
    refused("not Adam. Give fdsd.capture(model, optimizer).optim", theirs, target)


@pytest.mark.parametrize("state", [None, 3, (1, 2), {}.items()])
def test_no_state_at_all(state: Any) -> None:
    told = refused(f"not {type(state).__name__}. Give one mapping, or a TrainState", state, made(1)[0])
    assert "a rank that has nothing to give gives {}" in told


def test_other_things_as_the_model() -> None:
    model, adam = made(0)
    for odd in (adam, model.state_dict(), fdsd.capture(model), "model.pt"):
        told = refused("The order is restore(state, model, optimizers)", model.state_dict(), odd)
        assert f"not {type(odd).__name__}" in told


def test_states_as_the_optimizers() -> None:
    source, theirs = made(0)
    target, ours = made(1)
    optim = fdsd.capture(source, theirs).optim
    for odd in (theirs.state_dict(), optim, None, 3):
        refused("restore(TrainState(state, optim), model, optimizers)", source.state_dict(), target, odd)
    fdsd.restore(fdsd.TrainState(fdsd.StateDict(source.state_dict()), optim), target, ours)
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(ours.state[target.weight]["exp_avg"], theirs.state[source.weight]["exp_avg"])


def test_init_is_a_function() -> None:
    source, _ = made(0)
    refused("init is a function, init(fqn, spec), that gives a tensor, not 'zeros'", {}, source, init="zeros")


def test_the_flat_form_of_an_optimizer() -> None:
    source, theirs = made(0)
    target, ours = made(1)
    captured = fdsd.capture(source, theirs).optim
    assert captured is not None
    flat = fdsd.flatten_optim()(captured)
    refused("unflatten_optim() of the flat form", flat, target, ours)
    report = fdsd.restore(fdsd.unflatten_optim()(flat), target, ours)
    assert (report.loaded, report.with_state) == ((), ("weight", "bias"))
    assert repr(report) == "<LoadReport: 0 names loaded; state of 2 parameters loaded>"
    assert torch.equal(ours.state[target.weight]["exp_avg"], theirs.state[source.weight]["exp_avg"])


def test_patterns_that_match_nothing() -> None:
    source, _ = made(0)
    state = {"weight": torch.zeros(2, 3), "extra": torch.zeros(1)}
    told = "; what is given matches none of them ('{_...}' matches every name)"
    wrong: Any
    for wrong in ("*", ["b", "c"]):
        with pytest.raises(UnknownName) as caught:
            fdsd.restore(state, source, allow_missing=wrong, allow_unexpected=wrong)
        assert str(caught.value).count(told) == 2
    with pytest.raises(UnknownName) as caught:
        fdsd.restore({}, source, allow_missing="bias")
    assert told not in str(caught.value)
    report = fdsd.restore(state, source, allow_missing="{_...}", allow_unexpected="{_...}")
    assert (report.missing, report.unexpected) == (("bias",), ("extra",))


def test_a_state_that_other_ranks_have() -> None:
    source, _ = made(0)
    with pytest.raises(UnknownName, match=r"in the state, which is empty: .* If another rank has them, give group="):
        fdsd.restore({}, source)
    with pytest.raises(UnknownName) as caught:
        fdsd.restore({"bias": source.bias}, source)
    assert "group=" not in str(caught.value) and "empty" not in str(caught.value)


def test_init_that_raises() -> None:
    def init(fqn: str, spec: fdsd.TensorSpec) -> torch.Tensor:
        raise ZeroDivisionError(fqn)

    model = nn.Linear(3, 2, device="meta")
    with pytest.raises(ZeroDivisionError) as caught:
        fdsd.restore({"weight": torch.zeros(2, 3)}, model, allow_missing="bias", init=init)
    assert getattr(caught.value, "__notes__", None) == ["while init made 'bias', float32[2]"]
    assert model.weight.is_meta


def test_which_parameters_had_state_is_reported() -> None:
    source, theirs = made(0)
    target, ours = made(1)
    del theirs.state[source.bias]
    report = fdsd.restore(fdsd.capture(source, theirs), target, ours)
    assert (report.loaded, report.with_state, report.without_state) == (("weight", "bias"), ("weight",), ("bias",))
    assert repr(report) == "<LoadReport: 2 names loaded; state of 1 parameter loaded; without state: 'bias'>"


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_a_dict_around_the_state(key: str) -> None:
    """As trainers save it, beside the epoch and other things; nothing is written."""
    source, theirs = made(0)
    target, _ = made(1)
    before = target.weight.detach().clone()
    given: Any = {"epoch": 3, "optimizer": theirs.state_dict(), key: source.state_dict()}
    with pytest.raises(UnknownName, match=re.escape(f"{key!r} is a dict that has such names: give state[{key!r}].")):
        fdsd.restore(given, target)
    assert torch.equal(target.weight, before)
    fdsd.restore(given[key], target)
    assert torch.equal(target.weight, source.weight)


def test_dicts_of_other_names_are_dropped() -> None:
    target, _ = made(1)
    with pytest.raises(UnknownName, match=re.escape("not expected by the model: 'history'. drop() them")):
        fdsd.restore({"history": {"loss": 3.0}, **target.state_dict()}, target)
