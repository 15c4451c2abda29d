"""Templates: what the state would be, with values from which training goes on as if nothing had been loaded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from fdsd import OptimState
from fdsd.comms.modules import read_modules
from fdsd.comms.optimizer_probe import first_row
from fdsd.comms.optimizer_templates import read_or_template, template_of
from fdsd.comms.optimizer_writing import write_optimizers
from fdsd.comms.optimizers import read_optimizers
from fdsd.data.columns import as_path
from fdsd.data.errors import Unsupported
from fdsd.data.spec import spec_of
from tests.helpers.optimizers import CASES, Setup, by_name, setups, small_model, told, told_all, train

TEMPLATED = tuple(case for case in CASES if not case.needs_closure)
EXACT = tuple(case for case in TEMPLATED if case.is_exact)


@given(setups(EXACT))
def test_a_template_trains_as_a_fresh_optimizer_does(setup: Setup) -> None:
    fresh = setup.make()
    loaded = setup.make()
    modules = read_modules(loaded[0])
    for optimizer in loaded[1]:
        write_optimizers(template_of(modules, optimizer), modules, optimizer, dtype="source")
    for model, optimizers in (fresh, loaded):
        setup.train(model, optimizers, 3)
        # a zero that has lost its sign is the one difference: 0 * 0.9 + -0.0 is 0.0
        for p in model.parameters():
            p.data += 0.0
    assert told_all(fresh[0], [])[0] == told_all(loaded[0], [])[0]


@given(setups(EXACT))
def test_a_template_has_the_slots_shapes_and_dtypes_of_a_trained_state(setup: Setup) -> None:
    model, optimizers = setup.make()
    template = read_or_template(read_modules(model), optimizers)
    setup = Setup(setup.case, setup.shapes, setup.dtype, setup.groups, frozenset(), frozenset(), setup.tied)
    trained, steppers = setup.trained(1)
    state = read_optimizers(read_modules(trained), steppers)
    assert told_slots(template) == told_slots(state)
    assert [(g.fqns, list(g.options)) for g in template.groups] == [(g.fqns, list(g.options)) for g in state.groups]


def told_slots(state: OptimState) -> Any:
    return {
        (slot, fqn): spec_of(value) or type(value)
        for slot, column in state.slots.items()
        for fqn, value in column.items()
        if as_path(slot)[0] not in ("note", "last")  # None at first, and a text later; a list that grows
    }


@given(setups(TEMPLATED))
@settings(max_examples=30)
def test_tensors_of_a_template_are_its_own(setup: Setup) -> None:
    model, optimizers = setup.make()
    modules = read_modules(model)
    a, b = template_of(modules, optimizers), template_of(modules, optimizers)
    tensors = [v for s in (a, b) for c in s.slots.values() for v in c.values() if isinstance(v, torch.Tensor)]
    filled = [t for t in tensors if t.numel()]
    live = [v for o in optimizers for row in o.state.values() for v in row.values() if isinstance(v, torch.Tensor)]
    pointers = [t.untyped_storage().data_ptr() for t in [*filled, *live] if t.numel()]
    assert len(set(pointers)) == len(pointers)


def test_sgd_with_dampening_has_a_buffer_to_load_into() -> None:
    model = small_model()
    sgd = by_name("SGD(dampening)").make(list(model.parameters()))
    state = template_of(read_modules(model), sgd)
    assert all(not value.any() for value in state.slots["momentum_buffer"].values())
    assert list(state.slots["momentum_buffer"]) == list(state.fqns)


TABLE: list[tuple[str, dict[Any, Any]]] = [
    ("Adam", {"step": 0.0, "exp_avg": [0.0, 0.0], "exp_avg_sq": [0.0, 0.0]}),
    ("SGD", {}),
    ("SGD(momentum)", {"momentum_buffer": [0.0, 0.0]}),
    ("Adagrad", {"step": 0.0, "sum": [0.25, 0.25]}),
    ("RMSprop(centered)", {"step": 0.0, "square_avg": [0.0] * 2, "momentum_buffer": [0.0] * 2, "grad_avg": [0.0] * 2}),
    ("NAdam", {"step": 0.0, "mu_product": 1.0, "exp_avg": [0.0, 0.0], "exp_avg_sq": [0.0, 0.0]}),
    ("ASGD", {"step": 0.0, "eta": 0.1, "mu": 1.0, "ax": [0.0, 0.0]}),
    ("Rprop", {"step": 0.0, "prev": [0.0, 0.0], "step_size": [0.1, 0.1]}),
    ("Adafactor", {"step": 0.0, "variance": [0.0, 0.0]}),
    ("Adamax", {"step": 0.0, "exp_avg": [0.0, 0.0], "exp_inf": [0.0, 0.0]}),
    ("Nested", {("kron", 0): [0.0, 0.0], ("kron", "right", "scale"): 1.0, "last": [], "note": None, "count": 0}),
]


@pytest.mark.parametrize("name, expected", TABLE, ids=[name for name, _ in TABLE])
def test_values_that_a_state_starts_from(name: str, expected: dict[Any, Any]) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(2, dtype=torch.float64))
    state = template_of(read_modules(model), by_name(name).make([model.w]))
    found = {slot: column["w"] for slot, column in state.slots.items()}
    plain = {slot: v.double().tolist() if isinstance(v, torch.Tensor) else v for slot, v in found.items()}
    rounded = {slot: pytest.approx(v, rel=1e-6) if v is not None and v != [] else v for slot, v in expected.items()}
    assert plain == rounded


def test_frozen_parameters_have_none() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    state = template_of(read_modules(model), torch.optim.Adam(model.parameters()))
    assert list(state.slots["exp_avg"]) == ["weight"]
    assert state.fqns == ("weight", "bias")


def test_options_of_each_group_count() -> None:
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    state = template_of(read_modules(model), torch.optim.Rprop(groups))
    assert {fqn: value.unique().item() for fqn, value in state.slots["step_size"].items()} == {
        "weight": 0.5,
        "bias": 0.25,
    }


def test_each_optimizer_is_judged_by_itself() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    first, second = (torch.optim.Adam(model[name].parameters()) for name in ("a", "b"))
    train(model, [first], 3)
    state = read_or_template(read_modules(model), [first, second])
    assert {fqn: value.item() for fqn, value in state.slots["step"].items()} == {
        "a.weight": 3.0,
        "a.bias": 3.0,
        "b.weight": 0.0,
        "b.bias": 0.0,
    }
    del first.state[model["a"].weight]
    assert list(read_or_template(read_modules(model), [first]).slots["step"]) == ["a.bias"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes_are_those_of_the_optimizer(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(3, dtype=dtype))
    adam = torch.optim.Adam([model.w])
    state = template_of(read_modules(model), adam)
    assert state.slots["exp_avg"]["w"].dtype == dtype
    assert state.slots["step"]["w"].dtype == torch.float32


def test_strides_are_those_of_the_parameter() -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    state = template_of(read_modules(model), torch.optim.Adam(model.parameters()))
    assert state.slots["exp_avg"]["weight"].stride() == model.weight.stride()


def test_a_meta_model_has_a_template_on_meta() -> None:
    model = nn.Linear(2, 1, device="meta")
    state = template_of(read_modules(model), torch.optim.AdamW(model.parameters()))
    assert state.slots["exp_avg"]["weight"].is_meta
    assert tuple(state.slots["exp_avg"]["weight"].shape) == (1, 2)


def test_a_scheduled_optimizer_is_not_stepped() -> None:
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)  # it puts a step() of its own on the instance
    template_of(read_modules(model), adam)
    assert len(adam.state) == 0
    assert not getattr(adam, "_opt_called", False)
    with pytest.warns(UserWarning, match=r"before `optimizer.step"):
        scheduler.step()


def test_a_tensor_learning_rate_stays_as_it_is() -> None:
    model = nn.Linear(2, 1)
    lr = torch.tensor(0.1)
    adam = torch.optim.Adam(model.parameters(), lr=lr, foreach=False)
    state = template_of(read_modules(model), adam)
    assert adam.param_groups[0]["lr"] is lr
    assert state.groups[0].options["lr"] is lr
    assert lr.item() == pytest.approx(0.1)


class Drawing(torch.optim.Optimizer):
    """An optimizer that draws random numbers, has a generator, a lock, and lists that its step adds to."""

    def __init__(self, params: Any) -> None:
        import threading

        super().__init__(params, {"lr": 0.1})
        self.generator = torch.Generator().manual_seed(7)
        self.history: list[float] = []
        self.lock = threading.Lock()
        self.everything = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.history.append(torch.rand(()).item() + torch.rand((), generator=self.generator).item())
        for p in self.everything:
            p.add_(1.0)
            self.state.setdefault(p, {})
            self.state[p] = {"noise": torch.zeros_like(p), "calls": self.state[p].get("calls", 0) + 1}


def test_attributes_of_a_users_class_are_not_reached() -> None:
    model = nn.Linear(2, 1)
    drawing = Drawing(model.parameters())
    before = (
        told_all(model, [drawing]),
        drawing.generator.get_state(),
        torch.get_rng_state(),
        copy.copy(drawing.history),
    )
    state = template_of(read_modules(model), drawing)
    after = told_all(model, [drawing]), drawing.generator.get_state(), torch.get_rng_state(), drawing.history
    assert told(list(before)) == told(list(after))
    assert dict(state.slots["calls"]) == {"weight": 0, "bias": 0}


class Closed(torch.optim.Optimizer):
    """An optimizer whose step fails without real gradients."""

    def __init__(self, params: Any, secret: int) -> None:
        super().__init__(params, {"lr": 0.1})
        self.secret = secret

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ArithmeticError("gradients are zero")


def test_a_class_that_cannot_be_stepped_on_zeros_says_so() -> None:
    model = nn.Linear(2, 1)
    closed = Closed(model.parameters(), 3)
    with pytest.raises(Unsupported, match=r"fresh Closed cannot be told .*ArithmeticError: gradients are zero"):
        template_of(read_modules(model), closed)
    assert len(closed.state) == 0


def test_a_failed_probe_puts_hooks_and_random_numbers_back() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    calls: list[int] = []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        model = nn.Linear(2, 1)
        random = torch.get_rng_state()
        with pytest.raises(Unsupported):
            first_row(Closed(model.parameters(), 3), {"lr": 0.1}, model.weight)
        assert torch.equal(torch.get_rng_state(), random)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        sgd.step()
        assert calls == [1]
    finally:
        handle.remove()


def test_parameters_of_one_kind_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fdsd.comms import optimizer_templates

    probes: list[tuple[int, ...]] = []

    def counted(optimizer: Any, options: Any, param: torch.Tensor) -> Any:
        probes.append(tuple(param.shape))
        return first_row(optimizer, options, param)

    monkeypatch.setattr(optimizer_templates, "first_row", counted)
    model = nn.ParameterList([nn.Parameter(torch.zeros(2 + i % 2)) for i in range(1000)])
    template_of(read_modules(model), torch.optim.Adam(model.parameters()))
    assert sorted(probes) == [(2,), (3,)]
