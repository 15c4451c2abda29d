"""What goes wrong with optimizer state elsewhere, and what is right: torch's dict, and the flat form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fdsd import OptimState, ParamGroup, TrainState, flatten_optim, rename_fqns, unflatten_optim
from fdsd.data.flat_optim import unflatten
from fdsd.errors import FdsdError, NameConflict, SpecMismatch, UnknownName
from fdsd.testing import assert_same


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


OPTIMIZERS: list[Any] = [
    lambda params: torch.optim.Adam(params, lr=0.1),
    lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), betas=(0.8, 0.9)),
    lambda params: torch.optim.SGD(params, lr=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.Adagrad(params, lr=0.1),
    lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True),
    lambda params: torch.optim.LBFGS(params, lr=0.1),
    lambda params: torch.optim.Adafactor(params, lr=0.1),
]


def train(net: torch.nn.Module, optimizer: Any) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        made = net(torch.arange(8.0).reshape(4, 2)).square().sum()
        made.backward()
        return made

    optimizer.step(loss)


def names(net: torch.nn.Module) -> list[str]:
    return [name for name, _ in net.named_parameters()]


def weights(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: leaf.clone() for name, leaf in net.state_dict().items()}


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 1, 2])
class TestReadingNeverChanges:
    """Seen: asking a fresh Adam for its state steps it; LBFGS breaks; plain SGD asserts."""

    def test_later_training_is_the_same(self, make: Any, steps: int) -> None:
        nets = network(), network()
        optimizers = [make(net.parameters()) for net in nets]
        for net, optimizer in zip(nets, optimizers, strict=True):
            for _ in range(steps):
                train(net, optimizer)
        osd = optimizers[0].state_dict()
        state = OptimState.from_torch(osd, names(nets[0]))
        flat = flatten_optim()(state)
        unflatten_optim(state)(flat)
        rename_fqns({"{x...}": "m.{x...}"})(TrainState(nets[0].state_dict(), state))
        state.to_torch(), state.to_torch(ids=True)
        for net, optimizer in zip(nets, optimizers, strict=True):
            train(net, optimizer)
        assert_same(weights(nets[0]), weights(nets[1]))

    def test_every_form_goes_back_into_an_optimizer(self, make: Any, steps: int) -> None:
        net, twin = network(), network()
        optimizer, other = make(net.parameters()), make(twin.parameters())
        for _ in range(steps):
            train(net, optimizer)
        twin.load_state_dict(weights(net))
        state = OptimState.from_torch(copy.deepcopy(optimizer.state_dict()), names(net))
        there = unflatten_optim(state)(flatten_optim()(state))
        assert there == state
        other.load_state_dict(there.to_torch(ids=True))
        train(net, optimizer)
        train(twin, other)
        assert_same(weights(twin), weights(net))


class TestPartialState:
    """Seen: parameters trained and then frozen lose their state; one never touched cannot load its own save."""

    def case(self) -> tuple[torch.nn.Module, Any, OptimState]:
        net = network()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        train(net, optimizer)
        net[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
        del optimizer.state[net[1].bias]  # type: ignore[index]
        return net, optimizer, OptimState.from_torch(optimizer.state_dict(), names(net))

    def test_frozen_ones_keep_it_and_untouched_ones_have_none(self) -> None:
        net, optimizer, state = self.case()
        assert "0.weight" in state.slots["exp_avg"] and "1.bias" not in state.slots["exp_avg"]
        assert state.fqns == tuple(names(net))
        assert state.slots_of("1.bias") == {}
        again = OptimState.from_torch(state.to_torch(ids=True), names(net))
        assert again == state
        assert state.to_torch(ids=True)["state"].keys() == optimizer.state_dict()["state"].keys()

    def test_the_flat_form_has_no_empty_entries(self) -> None:
        _, _, state = self.case()
        flat = flatten_optim()(state)
        assert not any(name.startswith("state.1.bias") for name in flat)
        back = unflatten_optim()(flat)
        assert "1.bias" in back.fqns and back.slots_of("1.bias") == {}
        assert unflatten_optim(state)(flat) == state
        assert 3 not in back.to_torch(ids=True)["state"]

    def test_it_follows_a_rename(self) -> None:
        net, _, state = self.case()
        made = rename_fqns({"{x...}": "m.{x...}"})(TrainState(net.state_dict(), state)).optim
        assert made is not None and "m.1.bias" not in made.slots["exp_avg"] and "m.1.bias" in made.fqns


class TestStateless:
    """Seen: full load asserts; flat load leaves empty entries. Right: stateless is a state."""

    def test_both_forms(self) -> None:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        state = OptimState.from_torch(optimizer.state_dict(), names(net))
        assert not state.slots
        flat = flatten_optim()(state)
        assert all(name.startswith("param_groups.") for name in flat)
        assert unflatten_optim(state)(flat) == state
        assert unflatten_optim()(flat).to_torch()["state"] == {}
        train(net, optimizer)


class TestFlatForm:
    def test_a_file_older_than_a_hyper_parameter(self) -> None:
        """Seen: KeyError. Right: missing named when strict, the target's value when lax."""
        like = OptimState({}, (ParamGroup(("a",), {"lr": 0.1, "decoupled": True}),))
        with pytest.raises(UnknownName, match=r"param_groups\.a\.decoupled"):
            unflatten_optim(like)({"param_groups.a.lr": 0.5})
        made = unflatten({"param_groups.a.lr": 0.5}, like, strict=False)
        assert dict(made.groups[0].options) == {"lr": 0.5, "decoupled": True}

    def test_missing_state_is_named_when_strict_and_uninitialised_when_lax(self) -> None:
        like = OptimState({"m": {"a": torch.ones(1), "b": torch.ones(1)}}, (ParamGroup(("a", "b"), {}),))
        flat = {"state.a.m": torch.ones(1)}
        with pytest.raises(UnknownName, match=r"state\.b\.m"):
            unflatten_optim(like)(flat)
        assert unflatten(flat, like, strict=False).slots_of("b") == {}

    def test_two_learning_rates_regrouped(self) -> None:
        """Seen: silently the first. Right: a conflict raises."""
        state = OptimState({}, (ParamGroup(("a",), {"lr": 0.1}), ParamGroup(("b",), {"lr": 0.2})))
        like = OptimState({}, (ParamGroup(("a", "b"), {"lr": 0.1}),))
        with pytest.raises(SpecMismatch) as caught:
            unflatten_optim(like)(flatten_optim()(state))
        for text in ("0.1", "0.2", "'a'", "'b'", "'lr'"):
            assert text in str(caught.value)

    def test_empty_groups(self) -> None:
        """Seen: lost. Right: kept with ``like``."""
        state = OptimState(
            {}, (ParamGroup((), {"lr": 0.1}), ParamGroup(("a",), {"lr": 0.2}), ParamGroup((), {"lr": 0.3}))
        )
        assert unflatten_optim(state)(flatten_optim()(state)) == state
        osd = state.to_torch(ids=True)
        assert OptimState.from_torch(osd, ["a"]) == state

    def test_ambiguous_names(self) -> None:
        flat = {"state.a.b.c": 1, "param_groups.a.lr": 0.1, "param_groups.a.b.lr": 0.2}
        with pytest.raises(NameConflict, match="two ways"):
            unflatten_optim()(flat)

    def test_options_of_groups_only_in_the_file(self) -> None:
        like = OptimState({}, (ParamGroup(("a",), {"lr": 0.1}),))
        made = unflatten_optim(like)({"param_groups.a.lr": 0.5, "param_groups.a.initial_lr": 1.0})
        assert dict(made.groups[0].options) == {"lr": 0.5, "initial_lr": 1.0}


class TestTypesOfOptions:
    """Seen: ``betas`` comes back as a list. Right: the same types come back."""

    @pytest.mark.parametrize(
        "value", [(0.9, 0.95), [0.9, 0.95], 1, True, 1.0, None, "x", {"a": (1,)}, float("nan"), torch.tensor(0.1), ()]
    )
    def test_through_every_form(self, value: Any) -> None:
        state = OptimState({}, (ParamGroup(("a",), {"betas": value}),))
        for made in (
            OptimState.from_torch(state.to_torch(ids=True), ["a"]),
            OptimState.from_torch(state.to_torch()),
            unflatten_optim()(flatten_optim()(state)),
            unflatten_optim(state)(flatten_optim()(state)),
            rename_fqns({"a": "b"})(state),
        ):
            found = made.groups[0].options["betas"]
            assert type(found) is type(value) and (found is value or repr(found) == repr(value))


def test_setting_many_parameters_is_linear() -> None:
    """Seen: 20,000 parameters take seconds, as a list is searched for each one."""
    many = [f"layers.{i}.w" for i in range(20_000)]
    leaf = torch.ones(())
    osd = {
        "state": {i: {"step": leaf, "m": leaf} for i in range(len(many))},
        "param_groups": [{"lr": 0.1, "params": list(range(len(many)))}],
    }
    state = OptimState.from_torch(osd, many)
    made = rename_fqns({"layers.{i}.w": "l.{i}"})(state)
    assert len(unflatten_optim(made)(flatten_optim()(made)).slots["m"]) == len(many)


def test_what_is_torchs_own_dict_is_refused_with_the_way() -> None:
    with pytest.raises(FdsdError, match=r"OptimState\.from_torch"):
        flatten_optim()(torch.optim.SGD(network().parameters(), lr=0.1).state_dict())  # type: ignore[arg-type]
