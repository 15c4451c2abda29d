"""OptimState and ParamGroup as values: one form, equality, immutability, trees. Torch's dict is in test_osd."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import optree
import pytest
import torch

from fdsd.data.errors import FdsdError, NameConflict, SpecMismatch, UnknownName, Unsupported
from fdsd.data.groups import twice
from fdsd.data.optim import OptimState, ParamGroup
from fdsd.data.statedict import StateDict
from fdsd.data.values import has_tensor, same_value


def t(value: float) -> torch.Tensor:
    return torch.tensor(value)


def state_of(**slots: Any) -> OptimState:
    return OptimState(slots, (ParamGroup(("w", "b"), {"lr": 0.1}),))


def test_slots_are_brought_into_one_form() -> None:
    state = OptimState({"kron": {"w": {0: 3, "x": {}}}, ("step",): {"w": 1}, "gone": {}})
    assert dict(state.slots) == {("kron", 0): {"w": 3}, ("kron", "x"): {"w": {}}, "step": {"w": 1}}
    assert all(isinstance(column, StateDict) for column in state.slots.values())
    assert OptimState({"step": {"w": 1}, ("step",): {"b": 2}}).slots["step"] == {"w": 1, "b": 2}


@pytest.mark.parametrize(
    "slots",
    [
        {"kron": {"w": 3}, ("kron", 0): {"w": 4}},
        {("kron", 0): {"w": 3}, ("kron",): {"w": 4}},
        {(): {"w": {}}, "step": {"w": 3}},
        {"step": {"w": 3}, ("step",): {"w": 4}},
        {"kron": {"w": {}}, ("kron", 0): {"w": 4}},
    ],
)
def test_two_values_in_one_place_are_refused(slots: Any) -> None:
    with pytest.raises(NameConflict, match="'w' would have two values"):
        OptimState(slots)


def test_one_place_may_be_a_value_for_one_parameter_and_a_dict_for_another() -> None:
    osd = {"state": {"w": {"k": 1}, "b": {"k": {"x": 2}}}, "param_groups": [{"params": ["w", "b"]}]}
    assert OptimState.from_torch(osd).to_torch() == osd


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: OptimState({3: {}}), Unsupported, "not 3"),
        (lambda: OptimState({}, [{"lr": 1}]), SpecMismatch, "'dict'"),
        (lambda: OptimState({}, [ParamGroup(["a", "b"]), ParamGroup(["b"])]), NameConflict, "'b'"),
        (lambda: OptimState(extra={"state": 1}), NameConflict, "'state'"),
        (lambda: ParamGroup("weight"), SpecMismatch, "('weight',)"),
        (lambda: ParamGroup(["a", 1]), SpecMismatch, "1"),
        (lambda: ParamGroup(["a", "b", "a"]), NameConflict, "'a'"),
        (lambda: ParamGroup(["a"], {"params": ["a"]}), Unsupported, "'params'"),
        (lambda: ParamGroup(["a"], {"param_names": ["b"]}, named=True), Unsupported, "'param_names'"),
        (lambda: state_of(step={"w": 1}).slots_of("v"), UnknownName, "'v' is not in"),
        (lambda: OptimState({}, [ParamGroup(("a.weight",))]).slots_of("a.wieght"), UnknownName, "'a.weight'"),
    ],
)  # fmt: skip
def test_refused_values(make: Any, error: type[FdsdError], text: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


def test_equality() -> None:
    w, v = torch.arange(3.0), torch.arange(3.0)
    assert state_of(s={"w": w}, u={"b": 1}) == state_of(u={"b": 1}, s={"w": w})
    assert state_of(s={"w": w}) != state_of(s={"w": v})
    assert state_of(s={"w": w}) != state_of(s={"w": w}, u={"b": 1})
    assert state_of() != state_of().replace(groups=[ParamGroup(("b", "w"), {"lr": 0.1})])
    assert state_of() != state_of().replace(extra={"version": 1})
    assert state_of() != "no state"
    assert ParamGroup(()) != "no group"


@pytest.mark.parametrize(
    "a, b, same",
    [
        ({"lr": 0.1}, {"lr": 0.1}, True),
        ({"lr": 0.1}, {"lr": 0.2}, False),
        ({"lr": 1}, {"lr": 1.0}, False),
        ({"lr": 1}, {"lr": True}, False),
        ({"lr": float("nan")}, {"lr": float("nan")}, True),
        ({"betas": (1.0, 2.0)}, {"betas": [1.0, 2.0]}, False),
        ({"betas": (1.0, float("nan"))}, {"betas": (1.0, float("nan"))}, True),
        ({"lr": t(0.1)}, {"lr": t(0.1)}, False),
        ({"betas": (t(0.1), t(0.2))}, {"betas": (t(0.1), t(0.2))}, False),
        ({"x": torch.ones(3)}, {"x": torch.ones(3)}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": {"b": {}}}, {"a": {"b": {}}}, True),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, False),
    ],
)
def test_options_compare_item_by_item(a: Any, b: Any, same: bool) -> None:
    assert (ParamGroup(("w",), a) == ParamGroup(("w",), b)) is same
    assert ParamGroup(("w",), a) == ParamGroup(("w",), dict(a))


def test_values_that_contain_themselves_compare() -> None:
    a: list[Any] = []
    b: list[Any] = []
    a.append(a)
    b.append(b)
    assert same_value(a, a)
    assert not same_value(a, b)


def test_immutable_and_unhashable() -> None:
    options = {"lr": 0.1}
    state = OptimState({"s": {"w": 1}}, [ParamGroup(("w",), options)], extra={"v": 1})
    options["lr"] = 0.2
    assert state.groups[0].options["lr"] == 0.1
    for write in (
        lambda: state.slots.__setitem__("s", 1),
        lambda: state.extra.__setitem__("s", 1),
        lambda: state.groups[0].options.__setitem__("lr", 1),
        lambda: setattr(state, "slots", {}),
        lambda: setattr(state.groups[0], "fqns", ()),
    ):
        with pytest.raises((AttributeError, TypeError)):
            write()
    for value in (state, state.groups[0]):
        with pytest.raises(TypeError, match="unhashable"):
            hash(value)


def test_replace_keeps_the_rest() -> None:
    state = OptimState({"s": {"w": 1}}, [ParamGroup(("w",))], extra={"v": 1})
    assert state.replace() == state
    assert state.replace(slots={}) == OptimState({}, state.groups, extra={"v": 1})
    assert state.replace(groups=[]) == OptimState(state.slots, extra={"v": 1})
    assert state.replace(extra={}) == OptimState(state.slots, state.groups)


def test_repr_is_short() -> None:
    groups = [ParamGroup(tuple(f"g{g}.{i}" for i in range(9)), {"lr": 0.5}) for g in range(6)]
    state = OptimState({"step": {"g0.0": 1, "g0.1": 2}, ("kron", 0): {"g0.0": 3}}, groups)
    text = repr(state)
    assert "'step': 2 names, ('kron', 0): 1 name" in text
    assert "... 3 more" in text
    assert "... and 2 more" in text
    assert len(text.splitlines()) == 7
    assert repr(OptimState()) == "OptimState({}, ())"
    assert repr(ParamGroup(("w",), {"lr": 1}, named=True)) == "ParamGroup(('w',), {'lr': 1}, named=True)"
    assert "... and 8 more" in repr(OptimState({str(i): {"w": i} for i in range(20)}))
    assert repr(OptimState(extra={"v": 1})).endswith("extra={'v': 1})")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
def test_copies_and_pickles(copied: Any) -> None:
    state = OptimState.from_torch(
        {"state": {"w": {"s": 1, "k": {0: "x", 1: {}}}, "b": {}}, "param_groups": [{"lr": 0.1, "params": ["w", "b"]}]}
    )
    again = copied(state)
    assert again == state
    assert again.to_torch() == state.to_torch()


def test_tree_leaves_are_slot_values_and_options_with_tensors() -> None:
    w, lr, beta = torch.arange(3.0), t(0.1), t(0.9)
    state = OptimState(
        {"s": {"w": w, "b": 7}, ("k", 0): {"w": 8}},
        [ParamGroup(("w",), {"eps": 1e-8, "lr": lr}), ParamGroup(("b",), {"betas": (beta, 0.99), "lr": 0.2})],
        extra={"rng": beta, "version": 3},
    )
    paths, leaves, _ = optree.tree_flatten_with_path(state, namespace="fdsd")
    assert list(zip(paths, leaves, strict=True)) == [
        ((("slots", "s"), "w"), w),
        ((("slots", "s"), "b"), 7),
        ((("slots", ("k", 0)), "w"), 8),
        ((("groups", 0, "lr"),), lr),
        ((("groups", 1, "betas"), 0), beta),
        ((("groups", 1, "betas"), 1), 0.99),
        ((("extra", "rng"),), beta),
    ]
    accessors = optree.tree_accessors(state, namespace="fdsd")
    assert [a.codify("s") for a in accessors[2:4]] == ["s.slots[('k', 0)]['w']", "s.groups[0].options['lr']"]
    assert accessors[-1].codify("s") == "s.extra['rng']"


def test_tree_map_reaches_tensors_of_options_and_keeps_the_others() -> None:
    state = OptimState({"s": {"w": t(1.0)}}, [ParamGroup(("w",), {"a": 1, "lr": t(2.0), "z": 3})])
    doubled: Any = optree.tree_map(lambda leaf: leaf * 2, state, namespace="fdsd")
    assert doubled.slots["s"]["w"].item() == 2.0
    assert list(doubled.groups[0].options) == ["a", "lr", "z"]
    assert doubled.groups[0].options["lr"].item() == 4.0
    summed: Any = optree.tree_map(lambda a, b: a + b, state, doubled, namespace="fdsd")
    assert summed.slots["s"]["w"].item() == 3.0


def test_tree_structures_compare_by_what_is_no_leaf() -> None:
    def structure(lr: Any, slot: str = "s") -> Any:
        return optree.tree_structure(OptimState({slot: {"w": 1}}, [ParamGroup(("w",), {"lr": lr})]), namespace="fdsd")

    assert structure(0.1) == structure(0.1)
    assert hash(structure(0.1)) == hash(structure(0.1))
    assert structure(0.1) != structure(0.2)
    assert structure(t(0.1)) == structure(t(0.2))
    assert structure(0.1) != structure(0.1, "u")
    assert "slots" in repr(structure(0.1))


def test_helpers() -> None:
    assert twice([1, 2, 2, 1, 3]) == [1, 2]
    assert [has_tensor(v) for v in (None, "x", {"a": [t(1.0)]}, {"a": []}, object())] == [
        False,
        False,
        True,
        False,
        False,
    ]
