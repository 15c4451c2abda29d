"""Torch's own optimizers as oracles: their dicts round-trip, load, and training goes on to the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fdsd.data.columns import Item
from fdsd.data.flat_optim import flatten, unflatten
from fdsd.data.optim import OptimState

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adam tensor betas": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(0.01), betas=(torch.tensor(0.8), torch.tensor(0.9)), foreach=False
    ),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, weight_decay=0.2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}
STEPS = [0, 1, 2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 4)
        self.idle = nn.Linear(2, 2)  # gets no gradient
        self.frozen = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


def groups_of(net: Net, *, is_named: bool = False) -> list[dict[str, Any]]:
    """Two groups and an empty one, with a frozen and an idle parameter, in another order than the model's."""

    def members(*modules: str) -> list[Any]:
        found = [(name, p) for name, p in net.named_parameters() if name.split(".")[0] in modules]
        return found if is_named else [p for _, p in found]

    empty = [] if is_named else [{"params": []}]  # torch refuses an empty group among named ones
    return [{"params": members("last", "idle")}, *empty, {"params": members("frozen", "first"), "lr": 0.02}]


def names_of(net: Net) -> list[str]:
    return [name for group in groups_of(net, is_named=True) for name, _ in group["params"]]


def train(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs = torch.linspace(-1, 1, 15).reshape(5, 3) * (step + 1)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def numbers(value: torch.Tensor) -> list[int]:
    flat = value.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def same_bits(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape, numbers(a)) == (b.dtype, b.shape, numbers(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return bool(a == b)


def same_objects(a: Any, b: Any) -> bool:
    if isinstance(a, dict | list | tuple):
        keys = list(a) if isinstance(a, dict) else range(len(a))
        return type(a) is type(b) and len(a) == len(b) and all(same_objects(a[key], b[key]) for key in keys)
    return a is b or (isinstance(a, int | float | str) and a == b)


@pytest.fixture(params=OPTIMIZERS)
def make(request: pytest.FixtureRequest) -> Make:
    return OPTIMIZERS[request.param]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("is_named", [False, True])
def test_dicts_round_trip_and_training_goes_on(make: Make, steps: int, is_named: bool) -> None:
    net = Net()
    optimizer = make(groups_of(net, is_named=is_named))
    train(net, optimizer, range(steps))
    osd = optimizer.state_dict()
    before = copy.deepcopy(osd)
    state = OptimState.from_torch(osd, None if is_named else names_of(net))
    assert state.fqns == tuple(names_of(net))
    assert same_objects(state.to_torch(ids=True), osd)
    assert same_bits(osd, before)

    for ids in (True, False):
        twin = copy.deepcopy(net)
        other = make(groups_of(twin, is_named=is_named))
        other.load_state_dict(copy.deepcopy(state.to_torch(ids=ids)))
        assert same_bits(other.state_dict(), osd)
        reference, own = copy.deepcopy((net, optimizer))
        train(reference, own, range(steps, steps + 3))
        train(twin, other, range(steps, steps + 3))
        assert same_bits(twin.state_dict(), reference.state_dict())
        assert same_bits(other.state_dict(), own.state_dict())


@pytest.mark.parametrize("steps", STEPS)
def test_lbfgs(steps: int) -> None:
    def make(net: Net) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3, history_size=2)

    net = Net()
    net.requires_grad_()
    optimizer = make(net)
    train(net, optimizer, range(steps))
    osd = optimizer.state_dict()
    names = [name for name, _ in net.named_parameters()]
    state = OptimState.from_torch(osd, names)
    assert same_objects(state.to_torch(ids=True), osd)
    assert (("old_dirs", Item(0)) in state.slots) is (steps > 0)

    twin = copy.deepcopy(net)
    other = make(twin)
    other.load_state_dict(copy.deepcopy(state.to_torch()))
    train(net, optimizer, range(steps, steps + 2))
    train(twin, other, range(steps, steps + 2))
    assert same_bits(twin.state_dict(), net.state_dict())


@pytest.mark.parametrize("steps", STEPS)
def test_the_flat_form_restores_a_training_run(make: Make, steps: int) -> None:
    net = Net()
    optimizer = make(groups_of(net))
    train(net, optimizer, range(steps))
    state = OptimState.from_torch(optimizer.state_dict(), names_of(net))
    assert unflatten(flatten(state), like=state) == state

    twin = copy.deepcopy(net)
    other = make(groups_of(twin))
    fresh = OptimState.from_torch(other.state_dict(), names_of(net))
    back = unflatten(flatten(state), like=fresh)
    assert dict(back.slots) == dict(state.slots)
    assert [g for g in back.groups if g.fqns] == [g for g in state.groups if g.fqns]
    other.load_state_dict(copy.deepcopy(back.to_torch(ids=True)))
    train(net, optimizer, range(steps, steps + 2))
    train(twin, other, range(steps, steps + 2))
    assert same_bits(twin.state_dict(), net.state_dict())


# ------------------------------------------------------------------------------------------ torch's getters


def trained(make: Make) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    optimizer = make([{"params": net.first.parameters(), "lr": 0.3}, {"params": net.last.parameters()}])
    train(net, optimizer, range(2))
    return net, optimizer


def named_state(net: Net, optimizer: torch.optim.Optimizer) -> OptimState:
    return OptimState.from_torch(optimizer.state_dict(), ["first.weight", "first.bias", "last.weight"])


def test_get_optimizer_state_dict_is_read_and_written(make: Make) -> None:
    net, optimizer = trained(make)
    theirs = get_optimizer_state_dict(net, optimizer)
    if optimizer.state_dict()["state"]:  # for a stateless optimizer torch steps, and may make up entries
        state = named_state(net, optimizer)
        assert OptimState.from_torch(theirs) == state
        assert same_objects(state.to_torch(), theirs)
        osd = state.to_torch()
        set_optimizer_state_dict(net, optimizer, osd)
        assert same_bits(optimizer.state_dict(), state.to_torch(ids=True))
    assert same_objects(OptimState.from_torch(theirs).to_torch(), theirs)


def test_flattening_agrees_with_torch(make: Make) -> None:
    net, optimizer = trained(make)
    state = named_state(net, optimizer)
    theirs = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    flat = flatten(state)
    assert list(flat) == list(theirs)
    assert same_objects(flat.to_dict(), theirs)
    assert unflatten(theirs, like=state) == state
    assert unflatten(theirs).fqns == state.fqns
