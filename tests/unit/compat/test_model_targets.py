"""Models of which parts are odd: shown in another way than they are, of unknown classes, or that take no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.testing._internal.two_tensor import TwoTensor

from fdsd.compat._state_dict_utils import _copy_state_dict
from fdsd.compat.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from fdsd.engine.opaque import copy_opaque

LAX = StateDictOptions(strict=False)
FULL = StateDictOptions(full_state_dict=True)
CPU = StateDictOptions(cpu_offload=True)
CLEAN = _IncompatibleKeys([], [])
NEW = {"weight": torch.full((1, 2), 3.0), "bias": torch.full((1,), 4.0)}


def halved(module: Any, state: Any, prefix: str, local: Any) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].half()


def versioned(module: Any, state: Any, prefix: str, local: Any) -> None:
    state[prefix + "version"] = torch.tensor(3)


def without_bias(module: Any, state: Any, prefix: str, local: Any) -> None:
    del state[prefix + "bias"]


def linear(hook: Callable[..., None] | None = None, **buffers: torch.Tensor) -> Any:
    made = nn.Linear(2, 1)
    for name, value in buffers.items():
        made.register_buffer(name, value)
    if hook is not None:
        made._register_state_dict_hook(hook)
    return made


class TestHooksThatChangeAPart:
    @pytest.mark.parametrize("options", [None, LAX, FULL])
    def test_what_is_loaded_directly_is_not_missing(self, options: Any) -> None:
        source, target = linear(halved), linear(halved)
        assert set_model_state_dict(target, get_model_state_dict(source), options=options) == CLEAN
        assert torch.equal(target.weight, source.weight.half().float()) and torch.equal(target.bias, source.bias)

    def test_what_is_not_given_is_missing_once(self) -> None:
        target = linear(halved)
        given = {"weight": NEW["weight"].half()}
        assert set_model_state_dict(target, given, options=LAX) == _IncompatibleKeys(["bias"], [])
        assert torch.equal(target.weight, NEW["weight"])

    def test_a_name_that_nobody_takes_is_the_only_one_told(self) -> None:
        target = linear(versioned)
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"version"') as raised:
            set_model_state_dict(target, {**NEW, "version": torch.tensor(3)})
        assert "Missing" not in str(raised.value)

    @pytest.mark.parametrize("options", [None, LAX])
    def test_what_a_hook_hides_is_loaded_if_given(self, options: Any) -> None:
        target = linear(without_bias)
        assert set_model_state_dict(target, NEW, options=options) == CLEAN
        assert torch.equal(target.weight, NEW["weight"]) and torch.equal(target.bias, NEW["bias"])

    def test_what_a_hook_hides_need_not_be_given(self) -> None:
        target = linear(without_bias)
        before = target.bias.clone()
        assert set_model_state_dict(target, {"weight": NEW["weight"]}) == CLEAN
        assert torch.equal(target.bias, before)

    def test_what_a_hook_hides_has_to_fit(self) -> None:
        target = linear(without_bias)
        before = target.weight.clone()
        with pytest.raises(RuntimeError, match="size mismatch for bias"):
            set_model_state_dict(target, {**NEW, "bias": torch.ones(7)})
        assert torch.equal(target.weight, before)

    def test_buffers_that_are_never_saved_are_not_expected(self) -> None:
        target = linear(without_bias)
        target.register_buffer("cache", torch.zeros(2), persistent=False)
        given = {**NEW, "cache": torch.ones(2)}
        assert set_model_state_dict(target, given, options=LAX) == _IncompatibleKeys([], ["cache"])
        assert torch.equal(target.cache, torch.zeros(2))


class OwnParameter(nn.Parameter):
    """Is a plain parameter in all but its class."""


class Refusing(torch.Tensor):
    """Takes no values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            raise ValueError("no values, please")
        return super().__torch_function__(func, types, args, kwargs or {})


def two(value: float) -> Any:
    return TwoTensor(torch.full((1, 2), value), torch.full((1, 2), 2 * value))


class TestClassesOfTensors:
    @pytest.mark.parametrize("options", [None, FULL])
    def test_what_only_its_class_knows_is_copied_by_it(self, options: Any) -> None:
        source, target = linear(), linear()
        source.weight, target.weight = nn.Parameter(two(1.0)), nn.Parameter(two(5.0))
        held = target.weight
        assert set_model_state_dict(target, get_model_state_dict(source), options=options) == CLEAN
        assert target.weight is held and torch.equal(target.bias, source.bias)
        assert torch.equal(held.a, torch.ones(1, 2)) and torch.equal(held.b, torch.full((1, 2), 2.0))
        assert set_model_state_dict(target, get_model_state_dict(target), options=options) == CLEAN
        assert torch.equal(held.b, torch.full((1, 2), 2.0))

    def test_a_parameter_of_its_own_class_is_a_value(self) -> None:
        target = linear()
        assert set_model_state_dict(target, {**NEW, "weight": OwnParameter(NEW["weight"].clone())}) == CLEAN
        assert type(target.weight) is nn.Parameter and torch.equal(target.weight, NEW["weight"])

    def test_swapped_ones_are_swapped(self) -> None:
        a, b = two(1.0), two(2.0)
        copy_opaque({"a": (b.detach(), a), "b": (a.detach(), b)})
        assert torch.equal(a.a, torch.full((1, 2), 2.0)) and torch.equal(b.a, torch.ones(1, 2))

    @pytest.mark.parametrize("layout", ["to_sparse", "to_mkldnn"])
    def test_layouts_without_strides(self, layout: str) -> None:
        def laid(value: float) -> torch.Tensor:
            made: torch.Tensor = getattr(torch.full((2,), value), layout)()
            return made

        source, target = linear(odd=laid(1.0)), linear(odd=laid(7.0))
        assert set_model_state_dict(target, get_model_state_dict(source)) == CLEAN
        assert torch.equal(target.odd.to_dense(), torch.ones(2)) and torch.equal(target.weight, source.weight)
        other = {"a": laid(9.0), "w": torch.zeros(2)}
        _copy_state_dict({"a": laid(2.0), "w": torch.ones(2)}, other)
        assert torch.equal(other["a"].to_dense(), torch.full((2,), 2.0)) and torch.equal(other["w"], torch.ones(2))

    def test_a_value_that_a_class_refuses_changes_nothing(self) -> None:
        target = linear(first=torch.zeros(2).to_sparse(), last=torch.zeros(2).as_subclass(Refusing))
        before = target.weight.clone()
        given = {**NEW, "first": torch.ones(2).to_sparse(), "last": torch.ones(2)}
        with pytest.raises(RuntimeError, match="'last', a Refusing, does not take a Tensor: no values, please"):
            set_model_state_dict(target, given)
        assert torch.equal(target.weight, before) and torch.equal(target.first.to_dense(), torch.zeros(2))


class TestLazyModules:
    @pytest.mark.parametrize("options", [None, FULL, CPU])
    def test_what_has_not_run_is_shown_as_it_is(self, options: Any) -> None:
        lazy = nn.LazyLinear(1)
        assert get_model_state_dict(lazy, options=options)["weight"] is lazy.weight
        assert set_model_state_dict(nn.LazyLinear(1), get_model_state_dict(lazy), options=options) == CLEAN

    @pytest.mark.parametrize("options", [None, FULL])
    def test_values_give_it_its_shape(self, options: Any) -> None:
        lazy = nn.Sequential(nn.LazyLinear(1))
        given = {f"0.{name}": value for name, value in NEW.items()}
        assert set_model_state_dict(lazy, given, options=options) == CLEAN
        assert type(lazy[0].weight) is nn.Parameter and torch.equal(lazy[0].weight, NEW["weight"])

    def test_it_stays_lazy_if_the_load_is_refused(self) -> None:
        lazy = nn.LazyLinear(1)
        kind = type(lazy.weight)
        with pytest.raises(RuntimeError, match=r'Missing key.*"bias"'):
            set_model_state_dict(lazy, {"weight": NEW["weight"]})
        assert type(lazy.weight) is kind and set_model_state_dict(lazy, NEW) == CLEAN
        assert torch.equal(lazy.weight, NEW["weight"])


class TestWhatTakesNoValues:
    @pytest.mark.parametrize("options", [None, LAX, FULL])
    def test_memory_that_overlaps_itself_is_refused_before_anything_is_written(self, options: Any) -> None:
        target = linear(wide=torch.zeros(1).expand(4))
        before = target.weight.clone()
        with pytest.raises(RuntimeError, match=r"'wide' has several elements in one place .*clone\(\)"):
            set_model_state_dict(target, {**NEW, "wide": torch.ones(4)}, options=options)
        assert torch.equal(target.weight, before)
        assert set_model_state_dict(target, get_model_state_dict(target), options=options) == CLEAN

    def test_memory_of_inference_mode(self) -> None:
        with torch.inference_mode():
            target = linear(seen=torch.zeros(4))
        with pytest.raises(RuntimeError, match=r"'bias' was made under torch.inference_mode"):
            set_model_state_dict(target, {**NEW, "seen": torch.ones(4)})
        with torch.inference_mode():
            set_model_state_dict(target, {**NEW, "seen": torch.ones(4)})
            assert torch.equal(target.seen, torch.ones(4))
