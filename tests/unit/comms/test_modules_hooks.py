"""Modules that save or load by code of their own: it runs as in ``state_dict()``, and works in both directions."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fdsd.comms.modules import Modules, leaf_of, memory_of, read_modules
from fdsd.errors import NameConflict, SpecMismatch, Unsupported
from tests.helpers.models import filled
from tests.unit.comms.test_modules import compiled


class Renamed(nn.Module):
    """Shows ``embedding.weight`` as ``weight``, by hooks in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.other = nn.Linear(2, 2)
        self.register_state_dict_post_hook(Renamed.show)
        self.register_load_state_dict_pre_hook(Renamed.take)

    @staticmethod
    def show(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "embedding.weight")

    @staticmethod
    def take(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "embedding.weight"] = state.pop(prefix + "weight")

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "embedding"}


class OneWay(Renamed):
    """The same without a way back."""

    def __init__(self) -> None:
        super().__init__()
        self._load_state_dict_pre_hooks.clear()


class Halved(nn.Module):
    """Saves half of its weight, and the other things that code of the user's own may save."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.bias = nn.Parameter(torch.ones(2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach() / 2
        destination[prefix + "scale"] = torch.tensor(0.5)
        destination[prefix + "format"] = "halved"

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict.pop(prefix + "format")
        scale = state_dict.pop(prefix + "scale")
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] / scale
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Detaching(nn.Linear):
    """Saves other tensor objects over the same memory."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "bias"] = self.bias.data
        destination[prefix + "weight"] = self.weight.detach()


class Prefixed(nn.Module):
    """Has a ``state_dict`` and a ``load_state_dict`` of its own, which take no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def state_dict(self) -> Any:  # type: ignore[override]
        return OrderedDict([("shown." + name, value) for name, value in super().state_dict().items()])

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict({name.removeprefix("shown."): value for name, value in state.items()})


class Inside(nn.Linear):
    """Has a ``state_dict`` that changes what it puts in."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state[kwargs.get("prefix", "") + "added"] = torch.tensor(3.0)
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict.pop(prefix + "added")
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Old(nn.Linear):
    """Reads names of an older version."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if prefix + "w" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "w")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def hooked(hook: Callable[..., Any]) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(hook)
    return model


def private(hook: Callable[..., Any]) -> nn.Module:
    model = nn.Linear(2, 2)
    model._register_state_dict_hook(hook)
    return model


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "renamed": Renamed,
    "halved": Halved,
    "detaching": lambda: Detaching(2, 2),
    "prefixed": Prefixed,
    "inside": lambda: Inside(2, 2),
    "old": lambda: Old(2, 2),
    "spectral": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "copied": lambda: private(lambda module, state, prefix, metadata: OrderedDict(state)),
}
PLACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": lambda module: module,
    "below": lambda module: nn.Sequential(nn.Linear(2, 2), module),
}
CASES = [(maker, place) for maker in MAKERS for place in PLACES if (maker, place) != ("prefixed", "below")]
"""A ``state_dict`` that takes no arguments stands at the top, or torch cannot call it either."""

WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda module: module,
    "compile": compiled,
    "checkpoint in compile": lambda module: compiled(checkpoint_wrapper(module)),
    "parallel": lambda module: nn.DataParallel(checkpoint_wrapper(compiled(module))),
}


def values(modules: Modules) -> dict[str, Any]:
    return {
        name: leaf_of(modules.tensors[name]) if name in modules.tensors else modules.extra[name].value
        for name in modules.names
    }


def assert_same(found: dict[str, Any], expected: Any) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name


def write(modules: Modules, state: dict[str, Any]) -> None:
    """Write as a loader does: into memory, and what has to go through code of a module's own through that."""
    for machine in modules.machines():
        through = {name: state[name] for name, other in modules.through.items() if other is machine}
        machine.load(through, modules.metadata)
    for name, live in modules.tensors.items():
        if live.persistent and name not in modules.through:
            memory_of(live).copy_(state[name])


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("maker, place", CASES)
def test_names_and_values_are_those_of_state_dict(maker: str, place: str, wrapped: str) -> None:
    model = PLACES[place](filled(MAKERS[maker]()))
    expected = model.state_dict()
    modules = read_modules(WRAPPED[wrapped](model))
    assert_same(values(modules), expected)
    assert modules.metadata == dict(getattr(expected, "_metadata", modules.metadata))


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("maker, place", CASES)
def test_what_was_read_can_be_written(maker: str, place: str, wrapped: str) -> None:
    source = PLACES[place](filled(MAKERS[maker](), 100))
    target = PLACES[place](filled(MAKERS[maker](), 1))
    state = {name: copy.deepcopy(value) for name, value in values(read_modules(source)).items()}
    with torch.no_grad():
        write(read_modules(WRAPPED[wrapped](target)), state)
    assert_same(dict(target.state_dict()), source.state_dict())
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_renamed_tensor_is_live_and_known_to_optimizers() -> None:
    model = Renamed()
    modules = read_modules(model)
    live = modules.tensors["weight"]
    assert live.tensor is model.embedding.weight and live.owner is model.embedding and live.is_memory
    assert modules.fqn_of(model.embedding.weight) == "weight"
    assert modules.through["weight"].module is model


def test_a_name_that_only_saving_changes_is_written_in_place() -> None:
    model = OneWay()
    modules = read_modules(model)
    assert list(modules.names) == list(model.state_dict()) and not modules.through
    memory_of(modules.tensors["weight"]).fill_(7)
    assert (model.embedding.weight == 7).all()


def test_a_made_value_is_no_memory() -> None:
    modules = read_modules(nn.Sequential(Halved()))
    live = modules.tensors["0.weight"]
    assert not live.is_memory and live.kind == "parameter" and modules.extra["0.format"].value == "halved"
    with pytest.raises(Unsupported, match=r"'0.weight' is made by code of its module \(Halved\)"):
        memory_of(live)
    assert modules.fqn_of(modules.through["0.weight"].module.weight) == "0.weight"  # type: ignore[arg-type]


def test_a_made_value_under_another_name() -> None:
    def show(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "embedding.weight") * 2

    model = Renamed()
    model._state_dict_hooks.clear()
    model.register_state_dict_post_hook(show)
    live = read_modules(model).tensors["weight"]
    assert (live.kind, live.trainable, live.owner) == ("parameter", True, model.embedding)
    live = read_modules(model, fqn_modifiers="_nothing").tensors["weight"]
    assert (live.kind, live.trainable, live.owner) == ("buffer", False, model)


def test_what_a_hook_leaves_out_is_no_part_of_the_state_dict() -> None:
    def show(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        del state[prefix + "weight"]

    model = nn.Sequential(hooked(show))
    modules = read_modules(model)
    assert modules.names == ("0.bias",) and [*modules.tensors] == ["0.bias", "0.weight"]
    assert not modules.tensors["0.weight"].persistent
    assert modules.fqn_of(model[0].weight) == "0.weight"  # type: ignore[arg-type]


def test_tied_tensors_stay_tied_below_a_hook() -> None:
    model = nn.Sequential(Renamed(), nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].embedding.weight  # type: ignore[union-attr]
    modules = read_modules(model)
    assert list(modules.names) == list(model.state_dict())
    assert modules.tensors["1.weight"].tied_to == "0.weight"


def test_a_private_hook_at_the_top_may_give_another_dict() -> None:
    model = private(lambda module, state, prefix, metadata: {"w": state["weight"]})
    modules = read_modules(compiled(model))
    assert modules.names == ("w",) and modules.tensors["w"].tensor is model.weight


def test_hooks_see_canonical_names() -> None:
    seen: list[Any] = []
    model = hooked(lambda module, state, prefix, metadata: seen.append((prefix, list(state), dict(metadata))))
    read_modules(nn.Sequential(nn.PReLU(), compiled(checkpoint_wrapper(model))))
    assert seen == [("1.", ["0.weight", "1.weight", "1.bias"], {"version": 1})]


def test_pre_hooks_run_before_anything_is_read() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    fresh = nn.Parameter(torch.tensor([[7.0]]))

    def swap(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        model[0].weight = fresh

    model[1].register_state_dict_pre_hook(swap)
    assert read_modules(model).tensors["0.weight"].tensor is fresh


def test_a_getter_put_in_the_place_of_state_dict_is_not_called() -> None:
    from torch.distributed.checkpoint.state_dict import _patch_model_state_dict

    model = nn.Linear(2, 2)
    _patch_model_state_dict(model)
    modules = read_modules(model)
    assert modules.names == ("weight", "bias") and not modules.through


def test_a_state_dict_put_in_by_the_user_is_called() -> None:
    model = nn.Linear(2, 2)
    model.state_dict = lambda: {"w": model.weight.detach()}  # type: ignore[method-assign]
    modules = read_modules(nn.DataParallel(model))
    assert modules.names == ("w",) and modules.tensors["w"].tensor is model.weight


def test_renaming_onto_a_name_that_is_there() -> None:
    def show(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state["bias"], state["weight"] = state.pop("weight"), state.pop("bias")

    model = hooked(show)
    modules = read_modules(model)
    assert modules.tensors["bias"].tensor is model.weight and modules.tensors["weight"].tensor is model.bias
    assert modules.fqn_of(model.weight) == "bias"  # type: ignore[arg-type]


def test_wrapped_names_that_meet_are_refused_below_a_hook_too() -> None:
    class Mine(nn.DataParallel[nn.Module]):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.weight = nn.Parameter(torch.ones(1))

    model = hooked(lambda module, state, prefix, metadata: None)
    with pytest.raises(NameConflict, match=r"named 'weight': 'weight', 'module.weight'"):
        read_modules(Mine(model))


# -- errors name the module and its code -----------------------------------------------------------------------------


def test_a_hook_that_raises_is_named() -> None:
    def broken(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        raise KeyError("w")

    with pytest.raises(KeyError) as caught:
        read_modules(nn.Sequential(hooked(broken)))
    (note,) = caught.value.__notes__
    assert note == "Raised by Linear at '0', which has 'the state dict hook broken', while its state dict was taken."


def test_a_public_hook_must_give_none() -> None:
    with pytest.raises(Unsupported, match=r"Linear at 'the top'.*must return None"):
        read_modules(hooked(lambda module, state, prefix, metadata: {}))


def test_a_state_dict_that_is_none() -> None:
    model = nn.Linear(1, 1)
    model.state_dict = lambda: [1]  # type: ignore[method-assign]
    with pytest.raises(Unsupported, match="gives list and no mapping"):
        read_modules(model)


def test_code_that_refuses_to_load_is_named() -> None:
    modules = read_modules(nn.Sequential(Halved()))
    (machine,) = modules.machines()
    state = {name: value for name, value in values(modules).items() if name != "0.bias"}
    with pytest.raises(SpecMismatch, match=r"(?s)Halved at '0', which has .*_load_from_state_dict.*Missing key.*bias"):
        machine.load(state)


def test_versions_reach_the_code_that_loads() -> None:
    seen: list[Any] = []

    class Versioned(nn.Linear):
        _version = 5

        def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            seen.append(metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    model = compiled(nn.Sequential(checkpoint_wrapper(Versioned(2, 2))))
    modules = read_modules(model)
    assert modules.metadata["0"] == {"version": 5}
    (machine,) = modules.machines()
    machine.load(values(modules), {"0": {"version": 3}})
    machine.load(values(modules))
    assert seen == [3, None]
