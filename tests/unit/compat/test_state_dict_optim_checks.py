"""Optimizers in one process: what is refused before anything is written, what is put back, and what is fresh."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fdsd.compat.state_dict import (
    StateDictOptions,
    _init_optim_state,  # pyright: ignore[reportPrivateUsage]  # imported by users
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from fdsd.errors import FdsdError
from tests.helpers.optimizers import told

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True)
LAX = StateDictOptions(strict=False)


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def step(model: nn.Module, *optimizers: Any) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for optimizer in optimizers:
        optimizer.step()


def dampened(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)


def trained(make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[nn.Linear, Any, Any]:
    model = network()
    optimizer = make(model.parameters())
    step(model, optimizer)
    return model, optimizer, copy.deepcopy(get_optimizer_state_dict(model, optimizer))


def refused(model: nn.Module, optimizers: Any, state: Any, match: str, options: Any = None) -> None:
    """Nothing has changed once a state has been refused."""
    before = told(get_optimizer_state_dict(model, optimizers))
    with pytest.raises(FdsdError, match=match):
        set_optimizer_state_dict(model, optimizers, state, options=options)
    assert told(get_optimizer_state_dict(model, optimizers)) == before


class TestWhatIsMissing:
    """Seen: a strict load passed, and the next step raised KeyError; or the own learning rate stayed without a word."""

    @pytest.mark.parametrize("fresh", [False, True])
    def test_a_value_of_a_parameter(self, fresh: bool) -> None:
        model, adam, state = trained()
        del state["state"]["weight"]["exp_avg"]
        target = torch.optim.AdamW(model.parameters()) if fresh else adam
        refused(model, target, state, r"state\.weight\.exp_avg'.*\n.*strict=False")

    def test_an_option(self) -> None:
        model, adam, state = trained()
        del state["param_groups"][0]["lr"]
        adam.param_groups[0]["lr"] = 7.0
        refused(model, adam, state, r"Missing key.*param_groups\.weight\.lr")
        set_optimizer_state_dict(model, adam, state, options=LAX)
        assert adam.param_groups[0]["lr"] == 7

    @pytest.mark.parametrize("groups", [[], [{"params": ["old.weight"], "lr": 3.0}]])
    def test_groups(self, groups: Any) -> None:
        model, adam, state = trained()
        refused(model, adam, {**state, "param_groups": groups}, r"param_groups\.weight\.lr")
        refused(model, adam, {"state": state["state"]}, r"param_groups\.weight\.lr")

    def test_options_that_the_class_adds_to_older_files(self) -> None:
        model, adam, state = trained()
        del state["param_groups"][0]["capturable"], state["param_groups"][0]["fused"]
        set_optimizer_state_dict(model, adam, state)
        step(model, adam)

    def test_options_that_a_scheduler_has_added(self) -> None:
        model, adam, state = trained()
        torch.optim.lr_scheduler.StepLR(adam, 1)
        set_optimizer_state_dict(model, adam, state)
        assert "initial_lr" in adam.param_groups[0]

    def test_what_the_options_of_the_file_do_not_need(self) -> None:
        model, _, state = trained()
        other = torch.optim.AdamW(model.parameters(), amsgrad=True)
        step(model, other)
        set_optimizer_state_dict(model, other, state)
        assert "max_exp_avg_sq" not in other.state[model.weight] and not other.param_groups[0]["amsgrad"]
        step(model, other)

    def test_momentum_of_parameters_that_never_trained(self) -> None:
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, sgd)
        state: Any = copy.deepcopy(get_optimizer_state_dict(model, sgd))
        state["param_groups"][0]["momentum"] = 0.9
        set_optimizer_state_dict(model, sgd, state)
        step(model, sgd)


class TestStateOfAnotherClass:
    """Seen: a bare KeyError out of ``Optimizer.__setstate__``, with state and learning rate replaced."""

    def test_of_sgd_for_adam(self) -> None:
        model, _, state = trained(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
        refused(
            model, torch.optim.Adam(model.parameters()), state, "Adam cannot use the state of 'weight': KeyError", LAX
        )
        refused(model, torch.optim.Adam(model.parameters()), state, "exp_avg")

    @pytest.mark.parametrize("value", [None, "text", [1, 2]])
    def test_a_count_that_is_no_number(self, value: Any) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in model]
        step(model, *optimizers)
        state: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizers))
        state["param_groups"][0]["lr"] = 9.0
        state["state"]["0.weight"]["exp_avg"] += 9
        state["state"]["1.weight"]["step"] = value
        refused(model, optimizers, state, "step")

    def test_a_tensor_instead_of_a_dict(self) -> None:
        model, adam, state = trained()
        state["state"]["weight"] = torch.ones(2, 2)
        refused(model, adam, state, "'weight' is Tensor, and should be a dict", LAX)

    @pytest.mark.parametrize(
        "groups", [None, {0: 1}, 3, ["a"], [{"params": "weight", "lr": 5.0}], [{"params": None}], [{"lr": 1.0}]]
    )
    def test_groups_that_are_none(self, groups: Any) -> None:
        """Seen: bare TypeError and AttributeError; ``params="weight"`` was taken, and its learning rate was not."""
        model, adam, state = trained()
        refused(model, adam, {**state, "param_groups": groups}, "param_groups")


class Settling(torch.optim.SGD):
    """Fails after it has changed something."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            group["seen"] = True
        self.seen = True
        if any(group["lr"] == 5 for group in self.param_groups):
            raise ValueError("no 5")


class Loading(torch.optim.SGD):
    """Fails after it has changed something."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.seen = True
        if any(group["lr"] == 5 for group in self.param_groups):
            raise ValueError("no 5")


@pytest.mark.parametrize("cls", [Settling, Loading])
def test_code_of_others_that_fails_leaves_all_optimizers_as_they_were(cls: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizers: list[Any] = [torch.optim.AdamW(model[0].parameters()), cls(model[1].parameters(), lr=0.1, momentum=0.9)]
    step(model, *optimizers)
    state: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizers))
    before = told(state)
    for group in state["param_groups"]:
        group["lr"] = 5.0
    state["state"]["0.weight"]["exp_avg"] += 9
    state["state"]["1.weight"]["momentum_buffer"] += 9
    tables = [optimizer.state for optimizer in optimizers]
    with pytest.raises(ValueError, match="no 5"):
        set_optimizer_state_dict(model, optimizers, state)
    assert told(get_optimizer_state_dict(model, optimizers)) == before
    assert [optimizer.state for optimizer in optimizers] == tables and not hasattr(optimizers[1], "seen")
    state["param_groups"][1]["lr"] = 0.1
    set_optimizer_state_dict(model, optimizers, state)
    assert optimizers[1].seen and optimizers[0].param_groups[0]["lr"] == 5


class TestMomentumThatIsNotThereYet:
    """With dampening, zeros are not like no momentum."""

    def losses(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        for _ in range(3):
            step(model, optimizer)
        return [param.sum().item() for param in model.parameters()]

    @pytest.mark.parametrize("options", [None, FLAT, FULL])
    @pytest.mark.parametrize("way", ["as it is", "copied", "saved"])
    def test_reading_it_changes_no_training(self, way: str, options: Any) -> None:
        model, other = network(), network()
        state: Any = get_optimizer_state_dict(model, dampened(model), options=options)
        if way == "copied":
            state = copy.deepcopy(state)
        if way == "saved":
            torch.save(state, file := io.BytesIO())
            file.seek(0)
            state = torch.load(file)
        optimizer = dampened(model)
        set_optimizer_state_dict(model, optimizer, state, options=options)
        assert self.losses(model, optimizer) == self.losses(other, dampened(other))

    def test_nothing_but_values_is_in_a_file(self) -> None:
        model = network()
        state: Any = get_optimizer_state_dict(model, dampened(model))
        buffer = state["state"]["weight"]["momentum_buffer"]
        assert type(buffer) is torch.Tensor and not vars(buffer) and bool((buffer == 0).all())

    def test_a_momentum_of_zero_that_is_loaded_into_it(self) -> None:
        """Seen: it became None, and the next step was another one."""
        model, other = network(), network()
        old, new = dampened(model), dampened(other)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        old.step()
        state: Any = get_optimizer_state_dict(other, new)
        for fqn, param in model.named_parameters():
            state["state"][fqn]["momentum_buffer"].copy_(old.state[param]["momentum_buffer"])
        set_optimizer_state_dict(other, new, state)
        step(model, old)
        step(other, new)
        assert torch.equal(model.weight, other.weight)


def test_state_of_no_parameter_in_the_flat_form() -> None:
    """Seen: it was written there, and dropped when it was read."""
    model = network()
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2)]
    a, b = optimizers
    step(model, a)
    a.state["global"] = 3
    a.state["more"] = {"count": 4}
    set_optimizer_state_dict(model, b, get_optimizer_state_dict(model, a, options=FLAT))
    assert b.state["global"] == 3 and b.state["more"] == {"count": 4}


class Named(torch.Tensor):
    """A class of a user's."""


@pytest.mark.parametrize("options", [None, FULL])
def test_state_of_a_class_of_users(options: Any) -> None:
    """Seen: refused, also what the getter had just given."""
    model, optimizer, state = trained(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    fresh: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for value in (torch.arange(4.0).reshape(2, 2), torch.ones(2, 2)):
        state["state"]["weight"]["momentum_buffer"] = value.as_subclass(Named)
        for one in (optimizer, fresh):
            set_optimizer_state_dict(model, one, state, options=options)
            assert torch.equal(one.state[model.weight]["momentum_buffer"], value)
        assert type(fresh.state[model.weight]["momentum_buffer"]) is Named
        set_optimizer_state_dict(model, fresh, get_optimizer_state_dict(model, fresh), options=options)


class TestInit:
    def test_a_fresh_optimizer_gets_its_first_state(self) -> None:
        model = network()
        step(model, torch.optim.SGD(model.parameters(), lr=0.0))
        before = [(param.clone(), param.grad) for param in model.parameters()]
        adam: Any = torch.optim.Adam(model.parameters(), amsgrad=True)
        adam.register_step_post_hook(lambda *_: pytest.fail("stepped"))
        _init_optim_state(adam)
        row = adam.state[model.weight]
        assert list(row) == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"] and row["step"] == 0
        assert not row["exp_avg"].any() and row["exp_avg"].data_ptr() != row["exp_avg_sq"].data_ptr()
        for param, (value, grad) in zip(model.parameters(), before, strict=True):
            assert torch.equal(param, value) and param.grad is grad

    def test_state_that_is_there_stays(self) -> None:
        _, adam, _ = trained()
        rows = [dict(row) for row in adam.state.values()]
        _init_optim_state(adam)
        assert [list(row.values()) for row in adam.state.values()] == [list(row.values()) for row in rows]

    def test_frozen_parameters_get_none(self) -> None:
        model = network()
        model.bias.requires_grad_(False)
        adam = torch.optim.Adam(model.parameters())
        _init_optim_state(adam)
        assert list(adam.state) == [model.weight]

    def test_a_class_that_cannot_tell(self) -> None:
        lbfgs = torch.optim.LBFGS(network().parameters())
        with pytest.raises(FdsdError, match="LBFGS"):
            _init_optim_state(lbfgs)
        assert not lbfgs.state
