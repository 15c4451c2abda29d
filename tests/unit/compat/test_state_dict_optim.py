"""Reading and writing optimizers in one process: what torch gives, and what is right where it errs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as peer

from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from fdsd.errors import FdsdError
from tests.helpers.optimizers import descend

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LAX = StateDictOptions(strict=False)
FLAT_LAX = StateDictOptions(strict=False, flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True)
FULL_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
FLAT_FULL = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
ALL = [None, FLAT, LAX, FULL, FULL_CPU, FLAT_FULL]


class Nested(torch.optim.Optimizer):
    """Keeps nested state, with keys that are no strings."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(count=0, kron={0: torch.zeros_like(param), 1: {"scale": torch.zeros(())}})
                state["count"] += 1
                state["kron"][0].add_(param.grad)
                state["kron"][1]["scale"].add_(1)
                param.sub_(group["lr"] * state["kron"][0])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True, betas=(0.8, 0.9)),
    "AdamW, tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1)),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "SGD, dampening": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
    "Nested": Nested,
}


def network(salt: int = 0) -> nn.Sequential:
    torch.manual_seed(salt)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def frozen_copy(optimizer: Any) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    else:
        assert a == b


@pytest.fixture(params=OPTIMIZERS, ids=list(OPTIMIZERS))
def make(request: pytest.FixtureRequest) -> Any:
    return OPTIMIZERS[request.param]


class TestReading:
    @pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD, momentum", "Adagrad", "RMSprop", "Adafactor", "Nested"])
    def test_what_torch_gives_for_an_optimizer_that_has_stepped(self, kind: str) -> None:
        net = network()
        optimizer = OPTIMIZERS[kind](net.parameters())
        descend(net, optimizer, 2)
        optimizer.zero_grad()
        assert_same(get_optimizer_state_dict(net, optimizer), peer.get_optimizer_state_dict(net, optimizer))
        mine: Any = get_optimizer_state_dict(net, optimizer, options=FLAT)
        options = peer.StateDictOptions(flatten_optimizer_state_dict=True)
        try:
            theirs: Any = peer.get_optimizer_state_dict(net, optimizer, options=options)
        except NotImplementedError:  # older versions of torch cannot flatten this one
            assert kind == "Nested"
            return
        assert mine.keys() == theirs.keys()
        for key in theirs:
            assert_same(mine[key], theirs[key])

    def test_values_are_the_live_ones(self) -> None:
        net = network()
        optimizer = torch.optim.Adam(net.parameters())
        descend(net, optimizer)
        state: Any = get_optimizer_state_dict(net, optimizer)
        assert state["state"]["0.weight"]["exp_avg"] is optimizer.state[net[0].weight]["exp_avg"]
        assert set(state) == {"state", "param_groups"}

    @pytest.mark.parametrize("options", ALL)
    @pytest.mark.parametrize("steps", [0, 1])
    def test_reading_never_changes(self, make: Any, options: Any, steps: int) -> None:
        """Seen: a fresh Adam is stepped, hooks fire, later training differs; LBFGS breaks; plain SGD asserts."""
        nets = network(), network()
        optimizers = [make(net.parameters()) for net in nets]
        for net, optimizer in zip(nets, optimizers, strict=True):
            descend(net, optimizer, steps)
            optimizer.zero_grad()
        fired: list[str] = []
        optimizers[0].register_step_pre_hook(lambda *args: fired.append("pre"))
        before = frozen_copy(optimizers[0])
        rng = torch.get_rng_state()
        get_optimizer_state_dict(nets[0], optimizers[0], options=options)
        assert_same(frozen_copy(optimizers[0]), before)
        assert fired == [] and torch.equal(torch.get_rng_state(), rng)
        assert all(param.grad is None for param in nets[0].parameters())
        assert descend(nets[0], optimizers[0], 3) == descend(nets[1], optimizers[1], 3)

    def test_a_fresh_optimizer_gives_what_it_would_start_from(self) -> None:
        net = network()
        state: Any = get_optimizer_state_dict(net, torch.optim.Adam(net.parameters()))
        assert list(state["state"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert list(state["state"]["0.bias"]) == ["step", "exp_avg", "exp_avg_sq"]
        assert all(not value.any() for row in state["state"].values() for value in row.values())

    def test_partial_state_stays_partial(self) -> None:
        net = network()
        net[2].requires_grad_(False)
        optimizer = torch.optim.Adam(net.parameters())
        descend(net, optimizer)
        net[2].requires_grad_(True)
        state: Any = get_optimizer_state_dict(net, optimizer)
        assert list(state["state"]) == ["0.weight", "0.bias"]
        assert state["param_groups"][0]["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]

    def test_names_have_no_wrapper_segments(self) -> None:
        net: Any = network()
        net[0] = checkpoint_wrapper(torch.compile(net[0], backend="eager"))
        net = torch.compile(net, backend="eager")
        state: Any = get_optimizer_state_dict(net, torch.optim.Adam(net.parameters()))
        assert list(state["state"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]

    def test_several_optimizers(self) -> None:
        net = network()
        optimizers = [torch.optim.Adam(net[0].parameters(), lr=0.1), torch.optim.SGD(net[2].parameters(), lr=0.2)]
        state: Any = get_optimizer_state_dict(net, optimizers)
        assert [group["lr"] for group in state["param_groups"]] == [0.1, 0.2]
        assert [group["params"] for group in state["param_groups"]] == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]

    def test_tied_parameters_go_by_their_first_name(self) -> None:
        net = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
        net["head"].weight = net["embed"].weight
        optimizer = torch.optim.Adam(net.parameters())
        net["head"](net["embed"](torch.tensor([1]))).sum().backward()
        optimizer.step()
        state: Any = get_optimizer_state_dict(net, optimizer)
        assert list(state["state"]) == ["embed.weight"]

    @pytest.mark.parametrize("options", [FULL, FULL_CPU])
    def test_types_of_values_stay(self, options: Any) -> None:
        """Seen: ``betas`` comes back as a list."""
        net = network()
        optimizer = torch.optim.Adam(net.parameters(), betas=(0.8, 0.9))
        state: Any = get_optimizer_state_dict(net, optimizer, options=options)
        assert state["param_groups"][0]["betas"] == (0.8, 0.9)

    def test_no_optimizers(self) -> None:
        net = network()
        with pytest.raises(RuntimeError, match="Optimizers are not passed in but optim_only is set to True"):
            get_optimizer_state_dict(net, [])
        with pytest.raises(RuntimeError, match="Optimizers are not passed in but optim_only is set to True"):
            set_optimizer_state_dict(net, [], {"state": {}, "param_groups": []})
        model, optim = get_state_dict(net, [])
        assert list(model) == list(net.state_dict()) and optim == {}

    def test_a_parameter_of_another_model(self) -> None:
        """Seen: a bare KeyError."""
        net = network()
        with pytest.raises(FdsdError, match="not in the model"):
            get_optimizer_state_dict(net, torch.optim.Adam([*net.parameters(), nn.Parameter(torch.ones(7))]))

    def test_values_that_cannot_be_gathered(self) -> None:
        net = network()
        optimizer = torch.optim.Adam(net.parameters())
        optimizer.param_groups[0]["odd"] = object()
        with pytest.raises(ValueError, match="Unexpected value type"):
            get_optimizer_state_dict(net, optimizer, options=FULL)

    def test_submodules_only_warn(self) -> None:
        net = network()
        optimizer = torch.optim.Adam(net.parameters())
        with pytest.warns(FutureWarning, match="submodules"):
            state: Any = get_optimizer_state_dict(net, optimizer, submodules={net[0]})
        assert len(state["state"]) == 4

    def test_generators_of_optimizers(self) -> None:
        net = network()
        state: Any = get_optimizer_state_dict(net, (torch.optim.Adam(net[i].parameters()) for i in (0, 2)))
        assert len(state["param_groups"]) == 2


class TestRoundTrip:
    @pytest.mark.parametrize("options", ALL)
    @pytest.mark.parametrize("steps", [0, 2])
    def test_training_goes_on_as_if_nothing_had_happened(self, make: Any, options: Any, steps: int) -> None:
        nets = network(), network(), network(5)
        optimizers = [make(net.parameters()) for net in nets]
        for net, optimizer in zip(nets[:2], optimizers[:2], strict=True):
            descend(net, optimizer, steps)
        weights, state = get_state_dict(nets[0], optimizers[0], options=options)
        set_state_dict(nets[0], optimizers[0], model_state_dict=weights, optim_state_dict=state, options=options)
        set_state_dict(
            nets[2],
            optimizers[2],
            model_state_dict=copy.deepcopy(weights),
            optim_state_dict=copy.deepcopy(state),
            options=options,
        )
        told = descend(nets[1], optimizers[1], 3)
        assert descend(nets[0], optimizers[0], 3) == told
        assert descend(nets[2], optimizers[2], 3) == told

    def test_both_forms_are_taken_whatever_the_options_say(self) -> None:
        net = network()
        old, new = [torch.optim.AdamW(net.parameters()) for _ in range(2)]
        descend(net, old)
        for get, put in ((None, FLAT), (FLAT, None)):
            set_optimizer_state_dict(net, new, get_optimizer_state_dict(net, old, options=get), options=put)
            assert_same(frozen_copy(new), frozen_copy(old))

    def test_dicts_by_id(self) -> None:
        net = network()
        old, new = [torch.optim.Adam(net.parameters()) for _ in range(2)]
        descend(net, old)
        set_optimizer_state_dict(net, new, old.state_dict())
        assert_same(frozen_copy(new), frozen_copy(old))

    def test_the_callers_dict_is_not_changed_now_or_later(self) -> None:
        net = network()
        old, new = [torch.optim.Adam(net.parameters()) for _ in range(2)]
        descend(net, old)
        for options in (None, FLAT):
            given = copy.deepcopy(get_optimizer_state_dict(net, old, options=options))
            kept = copy.deepcopy(given)
            set_optimizer_state_dict(net, new, given, options=options)
            descend(net, new)
            assert_same(given, kept)

    def test_frozen_parameters_keep_their_state(self) -> None:
        """Seen: parameters trained and then frozen lose their state."""
        net = network()
        old, new = [torch.optim.Adam(net.parameters()) for _ in range(2)]
        descend(net, old)
        net[0].requires_grad_(False)
        state = get_optimizer_state_dict(net, old)
        assert "0.weight" in state["state"]
        set_optimizer_state_dict(net, new, state)
        assert_same(frozen_copy(new), frozen_copy(old))

    def test_other_groups_by_the_names_of_their_parameters(self) -> None:
        net = network()
        old = torch.optim.Adam([{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters(), "lr": 0.2}])
        new = torch.optim.Adam([{"params": net[2].parameters()}, {"params": net[0].parameters()}])
        descend(net, old)
        set_optimizer_state_dict(net, new, get_optimizer_state_dict(net, old))
        assert [group["lr"] for group in new.param_groups] == [0.2, 0.1]
        assert torch.equal(new.state[net[0].bias]["exp_avg"], old.state[net[0].bias]["exp_avg"])

    def test_options_that_only_the_file_has(self) -> None:
        net = network()
        old, new = [torch.optim.Adam(net.parameters(), lr=0.1) for _ in range(2)]
        torch.optim.lr_scheduler.LambdaLR(old, lambda epoch: 0.5)
        for options in (None, FLAT):
            set_optimizer_state_dict(net, new, get_optimizer_state_dict(net, old, options=options))
            assert new.param_groups[0].pop("initial_lr") == 0.1

    @pytest.mark.parametrize("options", [None, FULL])
    def test_empty_groups(self, options: Any) -> None:
        net = network()

        def groups() -> list[Any]:
            return [{"params": list(net.parameters())}, {"params": [], "lr": 0.2}]

        old, new = torch.optim.AdamW(groups(), lr=0.1), torch.optim.AdamW(groups(), lr=0.3)
        new.param_groups[1]["lr"] = 0.7
        descend(net, old)
        set_optimizer_state_dict(net, new, get_optimizer_state_dict(net, old, options=options), options=options)
        assert [group["lr"] for group in new.param_groups] == [0.1, 0.2]

    def test_one_of_several_optimizers_takes_what_is_its_own(self) -> None:
        net = network()
        olds = [torch.optim.Adam(net[i].parameters(), lr=0.1 * (i + 1)) for i in (0, 2)]
        for optimizer in olds:
            descend(net, optimizer)
        state = get_optimizer_state_dict(net, olds)
        new = torch.optim.Adam(net[2].parameters())
        set_optimizer_state_dict(net, new, state)
        assert_same(frozen_copy(new), frozen_copy(olds[1]))

    def test_values_take_the_dtype_of_the_optimizer(self) -> None:
        net = network().to(torch.bfloat16)
        optimizer = torch.optim.Adam(net.parameters())
        whole = network()
        old = torch.optim.Adam(whole.parameters())
        descend(whole, old)
        set_optimizer_state_dict(net, optimizer, get_optimizer_state_dict(whole, old))
        row = optimizer.state[net[0].weight]
        assert row["exp_avg"].dtype == torch.bfloat16 and row["step"].dtype == torch.float32


class TestRefusals:
    @pytest.mark.parametrize("options", [None, FLAT])
    def test_a_parameter_without_saved_state(self, options: Any) -> None:
        net = network()
        old, new = [torch.optim.Adam(net.parameters()) for _ in range(2)]
        descend(net, old)
        del old.state[net[0].bias]
        state = get_optimizer_state_dict(net, old, options=options)
        message = (
            r"Missing optimizer state for parameter '0\.bias' in checkpoint\. The parameter requires gradients "
            r"but has no "
            r"saved optimizer state\..*To load anyway, use StateDictOptions\(strict=False\)"
        )
        before = frozen_copy(new)
        with pytest.raises(RuntimeError, match=message):
            set_optimizer_state_dict(net, new, state, options=options)
        assert_same(frozen_copy(new), before)
        set_optimizer_state_dict(net, new, state, options=FLAT_LAX if options else LAX)
        assert net[0].bias not in new.state and net[0].weight in new.state
        descend(net, new)

    def test_a_file_older_than_a_hyper_parameter(self) -> None:
        """Seen: KeyError."""
        net = network()
        old, new = [torch.optim.Adam(net.parameters(), lr=lr) for lr in (0.1, 0.2)]
        descend(net, old)
        state: Any = get_optimizer_state_dict(net, old, options=FLAT)
        state = {key: value for key, value in state.items() if not key.endswith(".capturable")}
        with pytest.raises(RuntimeError, match=r"param_groups\.0\.weight\.capturable"):
            set_optimizer_state_dict(net, new, state)
        new.param_groups[0]["capturable"] = False
        set_optimizer_state_dict(net, new, state, options=LAX)
        assert new.param_groups[0]["lr"] == 0.1 and new.param_groups[0]["capturable"] is False

    def test_two_learning_rates_for_one_group(self) -> None:
        """Seen: the first is taken without a word."""
        net = network()
        old = torch.optim.Adam([{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters(), "lr": 0.2}])
        new = torch.optim.Adam(net.parameters(), lr=0.3)
        descend(net, old)
        for options in (None, FLAT):
            state = get_optimizer_state_dict(net, old, options=options)
            with pytest.raises(FdsdError, match=r"'lr' is 0.1 for '0.weight' and 0.2 for '2.weight'"):
                set_optimizer_state_dict(net, new, state)
            assert new.param_groups[0]["lr"] == 0.3 and not new.state

    def test_flat_names_of_slots_that_are_missing(self) -> None:
        net = network()
        old, new = [torch.optim.Adam(net.parameters()) for _ in range(2)]
        descend(net, old)
        state: Any = get_optimizer_state_dict(net, old, options=FLAT)
        del state["state.0.bias.exp_avg_sq"]
        with pytest.raises(RuntimeError, match=r"state\.0\.bias\.exp_avg_sq"):
            set_optimizer_state_dict(net, new, state)
        set_optimizer_state_dict(net, new, state, options=LAX)
        descend(net, new)

    @pytest.mark.parametrize("shape", [(3, 1), (6,), (2, 3)])
    def test_other_shapes(self, shape: Any) -> None:
        net = network()
        old, new = [torch.optim.Adam(net.parameters()) for _ in range(2)]
        descend(net, old)
        descend(net, new)
        before = frozen_copy(new)
        state: Any = copy.deepcopy(get_optimizer_state_dict(net, old))
        state["state"]["0.weight"]["exp_avg"] = torch.ones(shape)
        for options in (None, LAX):
            with pytest.raises(RuntimeError, match=r"'exp_avg'.*'0\.weight'"):
                set_optimizer_state_dict(net, new, state, options=options)
            assert_same(frozen_copy(new), before)

    @pytest.mark.parametrize("given", [{}, None])
    def test_nothing_at_all(self, given: Any) -> None:
        net = network()
        with pytest.raises(RuntimeError, match="optim state_dict is empty"):
            set_optimizer_state_dict(net, torch.optim.Adam(net.parameters()), given)

    def test_another_number_of_ids(self) -> None:
        net, small = network(), nn.Linear(2, 2)
        state = torch.optim.Adam(small.parameters()).state_dict()
        with pytest.raises(RuntimeError, match="2 parameters by id, and the optimizers have 4"):
            set_optimizer_state_dict(net, torch.optim.Adam(net.parameters()), state)

    def test_nothing_is_written_to_the_optimizer_if_the_model_refuses(self) -> None:
        net = network()
        old, new = [torch.optim.Adam(net.parameters()) for _ in range(2)]
        descend(net, old)
        weights = {**get_model_state_dict(net), "0.bias": torch.ones(8)}
        with pytest.raises(RuntimeError, match=r"size mismatch for 0.bias"):
            set_state_dict(net, new, model_state_dict=weights, optim_state_dict=get_optimizer_state_dict(net, old))
        assert not new.state


class TestSetStateDict:
    def test_an_empty_model_state_dict_is_the_optimizer_only(self) -> None:
        net = network()
        old, new = [torch.optim.Adam(net.parameters()) for _ in range(2)]
        descend(net, old)
        before = copy.deepcopy(net.state_dict())
        result = set_state_dict(net, new, model_state_dict={}, optim_state_dict=get_optimizer_state_dict(net, old))
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert_same(frozen_copy(new), frozen_copy(old))
        assert_same(dict(net.state_dict()), dict(before))

    def test_without_optimizers(self) -> None:
        net, other = network(), network(3)
        set_state_dict(net, [], model_state_dict=other.state_dict(), optim_state_dict={})
        assert torch.equal(net[0].weight, other[0].weight)
        with pytest.raises(RuntimeError, match="Optimizers are not passed in"):
            set_state_dict(net, [], model_state_dict={}, optim_state_dict={})
