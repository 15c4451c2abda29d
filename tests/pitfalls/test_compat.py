"""The drop-in on random models, optimizers and options: what was read is written back, and training does not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from tests.helpers.optimizers import descend


class Scaled(nn.Module):
    """A buffer of each kind, an extra state, a parameter without dims."""

    def __init__(self, note: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0 + note / 8))
        self.register_buffer("shift", torch.full((3,), note / 16))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.note = note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift  # type: ignore[operator]

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


class Twice(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x).tanh())
        return made


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda i: nn.Linear(3, 3, bias=i % 2 == 0),
    "norm": lambda i: nn.LayerNorm(3),
    "batch": lambda i: nn.BatchNorm1d(3),
    "scaled": Scaled,
    "tied": lambda i: Twice(),
}
WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda m: m,
    "checkpointed": checkpoint_wrapper,
    "data parallel": nn.DataParallel,
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.05),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.05), amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.5),
    "SGD Nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.05, momentum=0.5, centered=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.05, max_iter=2),
}

layers = st.lists(st.tuples(st.sampled_from(sorted(LAYERS)), st.sampled_from(sorted(WRAPS)), st.booleans()), max_size=5)


def network(plan: list[tuple[str, str, bool]], seed: int) -> nn.Sequential:
    """Build what a plan says: the kind of each layer, its wrapper, and whether it is frozen."""
    torch.manual_seed(seed)
    made = [nn.Linear(2, 3), *[WRAPS[w](LAYERS[kind](i).requires_grad_(not f)) for i, (kind, w, f) in enumerate(plan)]]
    return nn.Sequential(*made)


def train(net: nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = descend(net, optimizer, steps)
    optimizer.zero_grad()
    return losses


def snapshot(net: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(get_model_state_dict(net))


def assert_same(a: Any, b: Any) -> None:
    assert list(a) == list(b)
    for name in b:
        assert torch.equal(a[name], b[name]) if isinstance(b[name], torch.Tensor) else a[name] == b[name], name


@settings(max_examples=60)
@given(layers, st.sampled_from(sorted(OPTIMIZERS)), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2))
def test_training_does_not_notice(
    plan: list[tuple[str, str, bool]], optim: str, flat: bool, full: bool, cpu: bool, steps: int
) -> None:
    options = StateDictOptions(full_state_dict=full, cpu_offload=cpu, flatten_optimizer_state_dict=flat)
    nets = [network(plan, seed) for seed in (0, 0, 1)]
    optimizers = [OPTIMIZERS[optim](net.parameters()) for net in nets]
    for net, optimizer in zip(nets[:2], optimizers[:2], strict=True):
        train(net, optimizer, steps)
    weights, state = get_state_dict(nets[0], optimizers[0], options=options)
    copies = copy.deepcopy((weights, state))
    set_state_dict(nets[0], optimizers[0], model_state_dict=weights, optim_state_dict=state, options=options)
    set_state_dict(nets[2], optimizers[2], model_state_dict=copies[0], optim_state_dict=copies[1], options=options)
    told = train(nets[1], optimizers[1], 2)
    assert train(nets[0], optimizers[0], 2) == told
    assert train(nets[2], optimizers[2], 2) == told
    assert_same(snapshot(nets[2]), snapshot(nets[1]))


@settings(max_examples=60)
@given(layers, st.booleans(), st.data())
def test_a_spoilt_state_dict_changes_nothing(
    plan: list[tuple[str, str, bool]], full: bool, data: st.DataObject
) -> None:
    source, target = network(plan, 0), network(plan, 1)
    given_state: dict[str, Any] = snapshot(source)
    before = snapshot(target)
    tensors = [name for name, value in given_state.items() if isinstance(value, torch.Tensor)]
    name = data.draw(st.sampled_from(tensors))
    kind = data.draw(st.sampled_from(["missing", "unexpected", "shape", "type"]))
    if name.endswith("num_batches_tracked") and kind == "missing":
        kind = "shape"  # torch's own old files lack it
    if kind == "missing":
        del given_state[name]
    elif kind == "unexpected":
        given_state[name + "_more"] = torch.ones(1)
    else:
        value = given_state[name]
        given_state[name] = torch.ones(*value.shape, 2) if kind == "shape" else "text"
    options = StateDictOptions(full_state_dict=full)
    with pytest.raises(RuntimeError, match="Error\\(s\\) in loading state_dict"):
        set_model_state_dict(target, given_state, options=options)
    assert_same(snapshot(target), before)


@settings(max_examples=60)
@given(layers, st.data())
def test_a_lax_load_takes_what_there_is(plan: list[tuple[str, str, bool]], data: st.DataObject) -> None:
    source, target = network(plan, 0), network(plan, 1)
    whole: dict[str, Any] = snapshot(source)
    before = snapshot(target)
    kept = data.draw(st.sets(st.sampled_from(sorted(whole))))
    part = {name: value for name, value in whole.items() if name in kept}
    result = set_model_state_dict(target, {**part, "stray": torch.ones(1)}, options=StateDictOptions(strict=False))
    counts = {name for name in whole if name.endswith("num_batches_tracked")}
    assert set(result.missing_keys) - counts == whole.keys() - kept - counts and result.unexpected_keys == ["stray"]
    after = snapshot(target)
    ties = {
        name: other for name in whole if name.endswith("second.weight") for other in [name.replace("second", "first")]
    }
    for name in whole:
        partner = next((b if a == name else a for a, b in ties.items() if name in (a, b)), name)
        expected = whole[name] if name in kept or partner in kept else before[name]
        assert torch.equal(after[name], expected) if isinstance(expected, torch.Tensor) else after[name] == expected
