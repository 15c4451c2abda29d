"""Restoring in one process: what fits, what is refused before anything is written, and what is reported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fdsd
from fdsd.errors import FdsdError, SpecMismatch, UnknownName, Unsupported
from tests.helpers.models import Net, filled, make
from tests.helpers.tensors import same_bytes


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a model, non-persistent ones too."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def assert_holds(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = values(model)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not same_bytes(found[name], expected[name])] == []


def meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def embed(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model.embed.weight, model.head.weight


NEW: dict[str, torch.Tensor] = {"embed.weight": torch.arange(30.0).view(6, 5) * 2 + 700}


def full(**changes: Any) -> dict[str, Any]:
    """The state dict of another model, every value of its own."""
    return {**filled(Net(scalar=True), 5000).state_dict(), **{k.replace("__", "."): v for k, v in changes.items()}}


# -- ties --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("names", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")])
def test_a_tied_weight_loads_by_any_of_its_names(names: tuple[str, ...], on_meta: bool) -> None:
    model: Any = meta(Net) if on_meta else Net()
    state = {k: v for k, v in filled(Net(), 5000).state_dict().items() if k not in ("embed.weight", "head.weight")}
    state.update(dict.fromkeys(names, NEW["embed.weight"]))
    report = fdsd.restore(state, model, init=lambda fqn, spec: torch.zeros(spec.shape))
    a, b = embed(model)
    assert a is b and torch.equal(a, NEW["embed.weight"]) and isinstance(a, nn.Parameter)
    assert {"embed.weight", "head.weight"} <= set(report.loaded) and report.missing == report.untied == ()


@pytest.mark.parametrize("staged", [False, True])
def test_equal_tensors_of_their_own_load_into_a_tied_weight_and_are_reported(staged: bool) -> None:
    model = make()
    state = {**model.state_dict(), "embed.weight": NEW["embed.weight"], "head.weight": NEW["embed.weight"].clone()}
    report = fdsd.restore(state, model, staged=staged)
    assert report.untied == ("head.weight",)
    a, b = embed(model)
    assert a is b and torch.equal(a, NEW["embed.weight"])


def test_different_tensors_are_no_tied_weight(tmp_path: Path) -> None:
    model = make()
    before = values(model)
    state = {**full(temperature=torch.ones(1)), "embed.weight": NEW["embed.weight"]}
    fdsd.save(fdsd.drop("{_...}._extra_state")(state), tmp_path / "x.safetensors")
    for given in (state, {**fdsd.open(tmp_path / "x.safetensors"), "counter._extra_state": None}):
        with pytest.raises(SpecMismatch, match=r"'head.weight' and 'embed.weight'.*drop\(\)"):
            fdsd.restore(given, model)
    assert_holds(model, before)
    fdsd.restore(fdsd.drop("head.weight")(state), model)
    assert torch.equal(embed(model)[1], NEW["embed.weight"])


def test_a_tied_state_loads_into_untied_weights() -> None:
    model: Any = make()
    model.head.weight = nn.Parameter(torch.zeros(6, 5))
    fdsd.restore({**model.state_dict(), **dict.fromkeys(("embed.weight", "head.weight"), NEW["embed.weight"])}, model)
    a, b = embed(model)
    assert a is not b and torch.equal(a, b) and torch.equal(a, NEW["embed.weight"])
    empty: Any = meta(untied)
    fdsd.restore(fdsd.defer(model.state_dict()), empty, init=lambda fqn, spec: torch.zeros(spec.shape))
    a, b = embed(empty)
    assert a is not b and torch.equal(a, b) and a.data_ptr() != b.data_ptr()


def untied() -> nn.Module:
    model: Any = Net()
    model.head.weight = nn.Parameter(torch.zeros(6, 5))
    return model


def test_a_filter_may_leave_one_of_the_tied_names_out() -> None:
    for name in ("embed.weight", "head.weight"):
        model: Any = meta(Net)
        keep = fdsd.drop(name)
        state = keep(
            {**filled(Net(), 5000).state_dict(), **dict.fromkeys(("embed.weight", "head.weight"), NEW["embed.weight"])}
        )
        fdsd.restore(state, model, filter=keep, init=lambda fqn, spec: torch.zeros(spec.shape))
        a, b = embed(model)
        assert a is b and torch.equal(a, NEW["embed.weight"])


# -- meta --------------------------------------------------------------------------------------------------------------


def test_buffers_that_no_state_has_are_reported_or_made() -> None:
    model: Any = meta(Net)
    report = fdsd.restore(make().state_dict(), model)
    assert report.left_on_meta == ("cache",) and model.cache.is_meta
    assert not any(p.is_meta for p in model.parameters()) and "left on meta: 'cache'" in repr(report)
    asked: list[str] = []

    def init(fqn: str, spec: fdsd.TensorSpec) -> torch.Tensor:
        asked.append(fqn)
        return torch.full(spec.shape, 3.0, dtype=torch.float64)

    report = fdsd.restore(make().state_dict(), model, init=init)
    assert report.initialised == ("cache",) == tuple(asked) and report.left_on_meta == ()
    assert torch.equal(model.cache, torch.full((4,), 3.0)) and "cache" not in model.state_dict()


def test_what_is_missing_and_on_meta_is_made_or_refused() -> None:
    state = fdsd.drop("adapter.weight")(make().state_dict())
    model: Any = meta(Net)
    with pytest.raises(UnknownName, match=r"'adapter.weight'.*meta.*init="):
        fdsd.restore(state, model, allow_missing="adapter.{_}")
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(SpecMismatch, match=r"init gave float32\[1\] for '(cache|adapter.weight)'"):
        fdsd.restore(state, model, allow_missing="adapter.{_}", init=lambda fqn, spec: torch.zeros(1))
    with pytest.raises(SpecMismatch, match=r"init gave nothing for 'adapter.weight'"):
        fdsd.restore(state, model, allow_missing="adapter.{_}", init=lambda fqn, spec: None)
    assert all(p.is_meta for p in model.parameters())
    report = fdsd.restore(state, model, allow_missing="adapter.{_}", init=lambda fqn, spec: torch.full(spec.shape, 7.0))
    assert set(report.initialised) == {"adapter.weight", "cache"} and report.missing == ("adapter.weight",)
    assert torch.equal(model.adapter.weight, torch.full((5, 5), 7.0)) and not model.adapter.weight.requires_grad


def test_what_a_filter_leaves_out_may_stay_on_meta() -> None:
    model: Any = meta(Net)
    model.embed.weight.tag = "kept"
    keep = fdsd.drop("adapter.weight")
    report = fdsd.restore(keep(make().state_dict()), model, filter=keep)
    assert set(report.left_on_meta) == {"adapter.weight", "cache"} and model.adapter.weight.is_meta
    assert model.embed.weight.tag == "kept"
    only = fdsd.select("adapter.weight")
    fdsd.restore(only(make().state_dict()), model, filter=only)
    assert torch.equal(model.adapter.weight, make().adapter.weight)  # type: ignore[union-attr, arg-type]


def test_a_recurrent_module_knows_its_new_weights() -> None:
    model: Any = meta(lambda: nn.LSTM(3, 4))
    expected = nn.LSTM(3, 4)
    fdsd.restore(expected.state_dict(), model)
    x = torch.randn(2, 3)
    assert torch.equal(model(x)[0], expected(x)[0])


def test_optimizers_of_parameters_on_meta_are_refused() -> None:
    source = nn.Linear(2, 1)
    state = fdsd.capture(source, torch.optim.SGD(source.parameters(), lr=0.1))
    model = nn.Linear(2, 1, device="meta")
    with pytest.raises(Unsupported, match=r"'bias', 'weight'.*meta.*make the optimizers"):
        fdsd.restore(state, model, torch.optim.SGD(model.parameters(), lr=0.2))
    assert model.weight.is_meta


def test_a_state_without_data_is_refused() -> None:
    model = make()
    before = values(model)
    for hollow in (fdsd.specs(model.state_dict()), fdsd.capture(meta(Net)).model):
        with pytest.raises(SpecMismatch, match="have no data"):
            fdsd.restore(hollow, model)
    with pytest.raises(FdsdError, match="meta"):
        fdsd.restore(fdsd.defer(fdsd.capture(meta(Net)).model), model)
    assert_holds(model, before)


# -- dtypes ------------------------------------------------------------------------------------------------------------


def test_dtypes_of_every_kind() -> None:
    model: Any = make("scalar")
    count = model.batch.num_batches_tracked
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = full(temperature=torch.tensor(4.5, dtype=torch.float64), batch__num_batches_tracked=torch.tensor(9))
    before = values(model)
    with pytest.raises(SpecMismatch, match=r"'temperature' is float64.*float32.*dtype="):
        fdsd.restore(state, model)
    with pytest.raises(Unsupported, match="dtype is"):
        fdsd.restore(state, model, dtype="float")  # type: ignore[arg-type]
    assert_holds(model, before)
    fdsd.restore(state, model, dtype="target")
    assert model.temperature.dtype is torch.float32 and model.temperature.item() == 4.5 and count == 9
    live = model.temperature
    state["embed.weight"] = state["head.weight"] = state["embed.weight"].bfloat16()
    fdsd.restore(state, model, dtype="source")
    assert model.temperature is live and live.dtype is torch.float64
    assert embed(model)[0] is embed(model)[1] and embed(model)[0].dtype is torch.bfloat16
    model.temperature.grad = torch.ones((), dtype=torch.float64)
    optimizer.step()
    assert model.temperature.item() == 3.5  # the optimizer still has it
    empty: Any = meta(Net)
    fdsd.restore({**state, "temperature": torch.ones(1)}, empty, dtype="source")
    assert empty.embed.weight.dtype is torch.bfloat16 and empty.embed.weight is empty.head.weight


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(5, dtype=torch.int32))
        self.register_buffer("wave", torch.tensor([1 + 2j]))
        self.register_buffer("none", None)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("on_meta", [False, True])
def test_zero_size_0_dim_integers_booleans_and_complex(staged: bool, on_meta: bool) -> None:
    model: Any = meta(Odd) if on_meta else Odd()
    state = {
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(2.5),
        "mask": torch.tensor([False, True, True]),
        "count": torch.tensor(-7, dtype=torch.int32),
        "wave": torch.tensor([3 - 1j]),
    }
    fdsd.restore(fdsd.defer(state), model, staged=staged)
    found = model.state_dict()
    assert found.keys() == state.keys() and all(same_bytes(found[name], state[name]) for name in state)
    assert isinstance(model.empty, nn.Parameter) and not isinstance(model.mask, nn.Parameter)


# -- extra state, and code of modules' own -----------------------------------------------------------------------------


def test_extra_states() -> None:
    model: Any = make()
    state = model.state_dict()
    report = fdsd.restore(fdsd.drop("counter._extra_state")(state), model, allow_missing="counter._extra_state")
    assert report.missing == ("counter._extra_state",) and model.counter.note == {"seen": 3}
    with pytest.raises(UnknownName, match=r"'counter\._extra_state'"):
        fdsd.restore(fdsd.drop("counter._extra_state")(state), model)
    fdsd.restore({**state, "counter._extra_state": None}, model)
    assert model.counter.note is None


def test_extra_state_as_a_tensor(tmp_path: Path) -> None:
    """As Transformer Engine has it: bytes in a tensor, of a size of its own each time."""
    model: Any = make()
    model.counter.note = torch.arange(7, dtype=torch.uint8)
    path = tmp_path / "model.safetensors"
    fdsd.save(model.state_dict(), path)
    other: Any = make()
    other.counter.note = torch.zeros(3, dtype=torch.uint8)
    fdsd.restore(fdsd.open(path), other)
    assert same_bytes(other.counter.note, model.counter.note)
    fdsd.restore(fdsd.open(path), make())  # where there was a dict
    with pytest.raises(SpecMismatch, match=r"'batch.num_batches_tracked' is a str in the state"):
        fdsd.restore({**model.state_dict(), "batch.num_batches_tracked": "many"}, other)


def test_extra_states_of_two_modules_that_are_one_tensor() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = make().counter, make().counter

    source: Any = Two()
    source.a.note = source.b.note = torch.ones(2)
    target: Any = Two()
    target.a.note = target.b.note = torch.zeros(2)
    fdsd.restore(source.state_dict(), target)
    assert torch.equal(target.a.note, torch.ones(2)) and torch.equal(target.b.note, torch.ones(2))


class Doubling(nn.Module):
    """Stores twice its weight, by code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.broken = False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"] * 2

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "weight" in state:
            state[prefix + "weight"] = state[prefix + "weight"] / 2
        super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[misc]
        if self.broken:
            raise ArithmeticError("not today")


def mixed() -> Any:
    return nn.Sequential(nn.Linear(3, 3), Doubling(), nn.Linear(3, 2))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("on_meta", [False, True])
def test_modules_that_load_by_code_of_their_own(on_meta: bool, staged: bool) -> None:
    source = filled(mixed(), 10)
    target = meta(mixed) if on_meta else mixed()
    report = fdsd.restore(fdsd.capture(source).model, target, staged=staged)
    assert report.left_on_meta == (("1.table",) if on_meta else ())
    for name, expected in source.named_parameters():
        assert torch.equal(target.get_parameter(name), expected), name
    part = fdsd.drop("1.bias")(fdsd.capture(source).model)
    other = meta(mixed) if on_meta else filled(mixed(), 500)
    kept = None if on_meta else other[1].bias.detach().clone()
    fdsd.restore(part, other, allow_missing="1.bias", staged=staged, init=lambda fqn, spec: torch.full(spec.shape, 4.0))
    assert torch.equal(other[1].weight, source[1].weight)
    assert torch.equal(other[1].bias, torch.full((3,), 4.0) if kept is None else kept)


@pytest.mark.parametrize("on_meta", [False, True])
def test_staged_is_all_or_nothing_when_code_of_a_module_raises(on_meta: bool) -> None:
    source = filled(mixed(), 10)
    target = meta(mixed) if on_meta else filled(mixed(), 500)
    objects = dict(target.named_parameters())
    optimizer = torch.optim.SGD(target.parameters(), lr=0.5)
    target[1].broken = True
    before = None if on_meta else values(target)
    with pytest.raises(SpecMismatch, match="not today"):
        fdsd.restore(fdsd.capture(source).model, target, staged=True)
    assert all(target.get_parameter(name) is one for name, one in objects.items())
    if before is None:
        assert all(one.is_meta for one in target.parameters())
    else:
        assert_holds(target, before)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(SpecMismatch, match="not today") as caught:
        fdsd.restore(fdsd.capture(source).model, target)
    assert "staged=True" in " ".join(caught.value.__notes__)


def test_staged_puts_extra_state_back_too() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(2))

        def get_extra_state(self) -> Any:
            return "old"

        def set_extra_state(self, state: Any) -> None:
            if state != "old":
                raise ValueError(f"{state!r} is not known here")

    model: Any = nn.ModuleDict({"a": make(), "b": Fragile()})
    state = {**model.state_dict(), "a.counter._extra_state": "new", "b._extra_state": "newer", "b.gain": torch.zeros(2)}
    with pytest.raises(ValueError, match="newer"):
        fdsd.restore(state, model, staged=True)
    assert model["a"].counter.note == {"seen": 3} and torch.equal(model["b"].gain, torch.ones(2))


# -- sources that are targets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [False, True])
def test_layers_may_be_swapped_and_transposed_in_place(staged: bool) -> None:
    model: Any = filled(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    before = values(model)
    swap = fdsd.rename_fqns({"0.{x}": "1.{x}", "1.{x}": "0.{x}"})
    fdsd.restore(swap(fdsd.capture(model).model), model, staged=staged)
    assert_holds(model, {swap_name(name): before[swap_name(name)] for name in before} | swapped(before))
    fdsd.restore(fdsd.transpose("{_}.weight")(fdsd.defer(fdsd.capture(model).model)), model, staged=staged)
    assert torch.equal(model[0].weight, before["1.weight"].t()) and torch.equal(model[1].weight, before["0.weight"].t())


def swap_name(name: str) -> str:
    return ("1" if name[0] == "0" else "0") + name[1:]


def swapped(before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: before[swap_name(name)] for name in before}


def test_optimizer_state_is_swapped_along() -> None:
    model: Any = filled(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    old = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    swap = fdsd.rename_fqns({"0.{x}": "1.{x}", "1.{x}": "0.{x}"})
    fdsd.restore(swap(fdsd.capture(model, optimizer)), model, optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], old[swap_name(name)])


def test_restoring_what_was_captured_changes_nothing() -> None:
    model: Any = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    before = values(model)
    for state in (fdsd.capture(model, optimizer), fdsd.snapshot(fdsd.capture(model, optimizer))):
        report = fdsd.restore(state, model, optimizer)
        assert report.missing == report.unexpected == report.untied == ()
        assert_holds(model, before)


# -- optimizers --------------------------------------------------------------------------------------------------------


def trained(model: Any, *, only: str = "") -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if only in name], lr=0.125)
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.requires_grad:
            parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return optimizer


def moments(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {n: optimizer.state[p]["exp_avg"].clone() for n, p in model.named_parameters() if p in optimizer.state}


def test_the_state_of_optimizers_alone() -> None:
    source, target = make(), filled(Net(), 900)
    state = fdsd.capture(source, trained(source)).optim
    assert state is not None
    optimizer = trained(target)
    before = values(target)
    report = fdsd.restore(state, target, optimizer)
    assert report.loaded == () and report.without_state == ("adapter.weight",)
    assert_holds(target, before)
    assert all(torch.equal(state.slots["exp_avg"][name], value) for name, value in moments(target, optimizer).items())
    with pytest.raises(Unsupported, match="no optimizers were given"):
        fdsd.restore(state, target)
    with pytest.raises(Unsupported, match="the state holds none"):
        fdsd.restore(make().state_dict(), target, optimizer)
    with pytest.raises(Unsupported, match="the state holds none"):
        fdsd.restore(fdsd.capture(source), target, optimizer)


def test_optimizers_over_parts_of_a_model() -> None:
    source, target = make(), filled(Net(), 900)
    state = fdsd.capture(source, [trained(source, only="blocks"), trained(source, only="embed")])
    pair = trained(target, only="embed"), trained(target, only="blocks")
    fdsd.restore(state, target, pair)
    for optimizer in pair:
        for name, value in moments(target, optimizer).items():
            assert torch.equal(value, moments(source, trained(source))[name]) or value.numel(), name
    old = moments(target, pair[0])
    with pytest.raises(UnknownName, match=r"no optimizer has: 'blocks.0"):
        fdsd.restore(state, target, pair[0])
    fdsd.restore(state, target, pair[0], allow_unexpected="blocks.{_...}")
    assert all(torch.equal(old[name], value) for name, value in moments(target, pair[0]).items())


def test_a_filter_is_for_the_optimizer_too() -> None:
    source, target = make(), filled(Net(), 900)
    whole = fdsd.capture(source, trained(source))
    optimizer = trained(target)
    before, old = values(target), moments(target, optimizer)
    keep = fdsd.drop("blocks.1.{_...}")
    with pytest.raises(UnknownName, match=r"filter leaves 'blocks\.1"):
        fdsd.restore(whole.optim, target, optimizer, filter=keep)  # type: ignore[arg-type]
    fdsd.restore(keep(whole), target, optimizer, filter=keep)
    now = moments(target, optimizer)
    assert whole.optim is not None
    for name in now:
        expected = old[name] if name.startswith("blocks.1.") else whole.optim.slots["exp_avg"][name]
        assert torch.equal(now[name], expected), name
    assert torch.equal(target.blocks[1].up.weight, before["blocks.1.up.weight"])  # type: ignore[index, union-attr]
    frozen = fdsd.filter_frozen(fdsd.describe(source))
    fdsd.restore(frozen(fdsd.capture(source).model), target, filter=frozen)


def test_what_may_be_missing_keeps_its_optimizer_state() -> None:
    source, target = make(), filled(Net(), 900)
    part = fdsd.drop("blocks.1.{_...}")(fdsd.capture(source, trained(source)))
    optimizer = trained(target)
    old = moments(target, optimizer)
    with pytest.raises(UnknownName, match=r"blocks\.1"):
        fdsd.restore(part, target, optimizer)
    fdsd.restore(part, target, optimizer, allow_missing="blocks.1.{_...}")
    assert torch.equal(moments(target, optimizer)["blocks.1.up.weight"], old["blocks.1.up.weight"])


class Refusing(torch.optim.SGD):
    """Loads by code of its own, half way."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise ArithmeticError("not today")


def test_staged_is_all_or_nothing_for_optimizers_too() -> None:
    model = make()
    parts = dict(model.named_parameters())
    del parts["adapter.weight"]
    first = torch.optim.SGD([parts["embed.weight"]], lr=0.5, momentum=0.9)
    names = [name for name in parts if name != "embed.weight"]
    second = Refusing([parts[name] for name in names], lr=0.25, momentum=0.9)
    for parameter in parts.values():
        parameter.grad = parameter.detach() * 0.5
    first.step()
    second.step()
    kept = copy.deepcopy((first.state_dict(), second.state_dict()))
    before = values(model)
    state = fdsd.capture(model, [first, second])
    assert state.optim is not None
    doubled = {slot: {n: v * 2 for n, v in column.items()} for slot, column in state.optim.slots.items()}
    groups = [fdsd.ParamGroup(g.fqns, {**g.options, "lr": 8.0}) for g in state.optim.groups]
    new = fdsd.TrainState(
        {name: v * 2 if isinstance(v, torch.Tensor) else v for name, v in state.model.items()},
        fdsd.OptimState(doubled, groups),
    )
    with pytest.raises(ArithmeticError, match="not today"):
        fdsd.restore(new, model, [first, second], staged=True)
    assert_holds(model, before)
    for optimizer, old in zip((first, second), kept, strict=True):
        now = optimizer.state_dict()
        assert now["param_groups"] == old["param_groups"]
        assert all(
            torch.equal(now["state"][i]["momentum_buffer"], old["state"][i]["momentum_buffer"]) for i in old["state"]
        )


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_told_at_once_and_nothing_written() -> None:
    model = make()
    optimizer = trained(model)
    before = values(model)
    state = fdsd.capture(filled(Net(), 900), ())
    changed = {**state.model, "scale": torch.ones(3), "stray": torch.ones(1), "blocks.0.up.bias": 3}
    del changed["batch.weight"]
    with pytest.raises(FdsdError) as caught:
        fdsd.restore(fdsd.TrainState(changed, fdsd.OptimState({}, [])), model, optimizer)
    text = str(caught.value)
    for told in ("'scale'", "'stray'", "'blocks.0.up.bias' is a int", "'batch.weight'", "in no group"):
        assert told in text, told
    assert_holds(model, before)


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda m: fdsd.restore(3, m), "mapping"),
        (lambda m: fdsd.restore(m.state_dict(), 3), "torch.nn.Module"),
        (lambda m: fdsd.restore(m.state_dict(), m, filter="x"), "filter is a pipeline"),
        (lambda m: fdsd.restore(fdsd.TrainState(m.state_dict(), fdsd.OptimState()), m, 3), "Optimizer"),
        (lambda m: fdsd.restore(m.state_dict(), m, filter=fdsd.cast(torch.float16)), "only leave names out"),
        (lambda m: fdsd.restore(m.state_dict(), m, filter=fdsd.select("x")), "'x'"),
    ],
)
def test_bad_arguments(call: Callable[[Any], Any], told: str) -> None:
    model = make()
    before = values(model)
    with pytest.raises(FdsdError, match=told):
        call(model)
    assert_holds(model, before)


def test_nothing_at_all() -> None:
    assert repr(fdsd.restore({}, nn.ReLU())) == "<LoadReport: 0 names loaded>"
    assert fdsd.restore({"x": torch.ones(1)}, [], allow_unexpected="x").unexpected == ("x",)
    with pytest.raises(UnknownName, match="missing in the state"):
        fdsd.restore({}, make())


def test_parts_of_one_model() -> None:
    parts = [nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)})]
    state = {
        f"{name}.{kind}": torch.full(shape, float(i))
        for i, (name, kind, shape) in enumerate(
            [("a", "weight", (2, 2)), ("a", "bias", (2,)), ("b", "weight", (2, 2)), ("b", "bias", (2,))]
        )
    }
    assert len(fdsd.restore(state, parts).loaded) == 4
    assert torch.equal(parts[1]["b"].bias, torch.full((2,), 3.0))  # type: ignore[arg-type]
