"""OptimState and ParamGroup: torch's dict in all its forms, what is refused and why, and the state as a value."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from types import MappingProxyType
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


def two_groups() -> dict[str, Any]:
    return {
        "state": {0: {"step": t(3.0), "exp_avg": torch.arange(4.0)}, 2: {"step": t(5.0), "exp_avg": torch.ones(0)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
    }


# ------------------------------------------------------------------------------------------ torch's dict


def test_columns_and_groups_of_a_plain_dict() -> None:
    osd = two_groups()
    state = OptimState.from_torch(osd, ["a.w", "a.b", "b.w"])
    assert list(state.slots) == ["step", "exp_avg"]
    assert list(state.slots["exp_avg"]) == ["a.w", "b.w"]
    assert state.slots["exp_avg"]["a.w"] is osd["state"][0]["exp_avg"]
    assert state.fqns == ("a.w", "a.b", "b.w")
    assert state.groups[0] == ParamGroup(("a.w", "a.b"), {"lr": 0.1, "betas": (0.9, 0.99)})
    assert state.slots_of("b.w") == {"step": osd["state"][2]["step"], "exp_avg": osd["state"][2]["exp_avg"]}
    assert state.slots_of("a.b") == {}


@pytest.mark.parametrize(
    "entry, slots",
    [
        pytest.param({}, [()], id="empty entry"),
        pytest.param({"step": 3}, ["step"], id="plain slot"),
        pytest.param({"a.b": 3}, ["a.b"], id="a dot in a slot"),
        pytest.param({0: 3}, [(0,)], id="a slot that is no string"),
        pytest.param({None: 3, ("x", 1): 4}, [(None,), (("x", 1),)], id="odd keys"),
        pytest.param({"kron": {0: 3, "0": 4, "x": {"y": 5}}}, [("kron", 0), ("kron", "0"), ("kron", "x", "y")]),
        pytest.param({"kron": {}, "step": 3}, [("kron",), "step"], id="an empty dict within"),
        pytest.param({"kron": {"x": {}}}, [("kron", "x")], id="an empty dict further within"),
        pytest.param({"d": [None, 3], "t": (1, [2])}, ["d", "t"], id="lists and tuples are leaves"),
        pytest.param(7, [()], id="no dict at all"),
        pytest.param(None, [()], id="None in the place of a dict"),
    ],
)
def test_slots_of_odd_state(entry: Any, slots: list[Any]) -> None:
    osd = {"state": {0: entry}, "param_groups": [{"lr": 1.5, "params": [0, 1]}]}
    state = OptimState.from_torch(osd, ["w", "b"])
    assert sorted(state.slots, key=str) == sorted([s if s != ("kron",) else "kron" for s in slots], key=str)
    assert state.to_torch(ids=True) == osd
    assert state.to_torch() == {"state": {"w": entry}, "param_groups": [{"lr": 1.5, "params": ["w", "b"]}]}


def test_an_empty_entry_is_not_a_missing_entry() -> None:
    groups = [{"lr": 0.1, "params": [0, 1]}]
    empty = OptimState.from_torch({"state": {0: {}}, "param_groups": groups}, ["w", "b"])
    missing = OptimState.from_torch({"state": {}, "param_groups": groups}, ["w", "b"])
    assert empty != missing
    assert empty.slots_of("w") == missing.slots_of("w") == {}
    assert empty.to_torch(ids=True)["state"] == {0: {}}
    assert missing.to_torch(ids=True)["state"] == {}


def test_a_live_optimizer_that_fills_its_empty_entry_does_not_reach_the_state() -> None:
    entry: dict[str, Any] = {}
    state = OptimState.from_torch({"state": {0: entry}, "param_groups": [{"params": [0]}]}, ["w"])
    entry["step"] = 1
    assert state.to_torch()["state"] == {"w": {}}


def test_containers_keep_their_types() -> None:
    ordered = OrderedDict(x=1)
    osd = {
        "state": {"w": {"o": ordered, "l": [1], "t": (1,)}},
        "param_groups": [{"betas": (0.9, 0.95), "pair": [0.9, 0.95], "params": ["w"]}],
    }
    made = OptimState.from_torch(osd).to_torch()
    assert made["state"]["w"]["o"] is ordered
    assert type(made["param_groups"][0]["betas"]) is tuple
    assert type(made["param_groups"][0]["pair"]) is list
    assert {type(made), type(made["state"]), type(made["state"]["w"])} == {dict}
    assert type(made["param_groups"]) is list


def test_any_mapping_is_read() -> None:
    osd = OrderedDict(
        state=OrderedDict(w=MappingProxyType({"step": 3})), param_groups=[MappingProxyType({"params": ["w"], "lr": 1})]
    )
    assert OptimState.from_torch(osd).slots_of("w") == {"step": 3}


@pytest.mark.parametrize("ids", [True, False])
def test_empty_groups_stateless_optimizers_and_extra_keys(ids: bool) -> None:
    osd = {"state": {}, "param_groups": [{"lr": 0.1, "params": []}, {"lr": 0.2, "params": []}], "version": 3}
    assert OptimState.from_torch(osd).to_torch(ids=ids) == osd
    nothing: dict[str, Any] = {"state": {}, "param_groups": []}
    assert OptimState.from_torch(nothing, []).to_torch(ids=ids) == nothing


def test_state_under_names_that_no_group_lists_stays() -> None:
    osd = {"state": {"global": {"n": 3}, 0: {"step": 4}}, "param_groups": [{"params": [0]}]}
    state = OptimState.from_torch(osd, ["w"])
    assert state.to_torch(ids=True) == osd
    assert list(state.to_torch()["state"]) == ["w", "global"]  # parameters first, in group order
    assert state.slots_of("global") == {"n": 3}


def test_state_comes_in_group_order() -> None:
    osd = {"state": {2: {"s": 1}, 0: {"s": 2}, 1: {"s": 3}}, "param_groups": [{"params": [2, 1]}, {"params": [0]}]}
    state = OptimState.from_torch(osd, ["zero", "one", "two"])
    assert state.fqns == ("two", "one", "zero")
    assert list(state.slots["s"]) == ["two", "one", "zero"]
    assert state.to_torch(ids=True) == {
        "state": {0: {"s": 1}, 1: {"s": 3}, 2: {"s": 2}},
        "param_groups": [{"params": [0, 1]}, {"params": [2]}],
    }


def test_param_names() -> None:
    osd = {"state": {1: {"step": 3}}, "param_groups": [{"lr": 1, "param_names": ["w", "b"], "params": [0, 1]}]}
    state = OptimState.from_torch(osd)
    assert state.groups == (ParamGroup(("w", "b"), {"lr": 1}, named=True),)
    assert state.to_torch(ids=True) == osd
    assert state.to_torch()["param_groups"] == [{"lr": 1, "param_names": ["w", "b"], "params": ["w", "b"]}]
    renamed = state.replace(groups=[ParamGroup(("x.w", "x.b"), {"lr": 1}, named=True)])
    assert renamed.to_torch(ids=True)["param_groups"][0]["param_names"] == ["x.w", "x.b"]


def test_other_names_win_over_param_names_and_lose_nothing() -> None:
    osd = {"state": {0: {"step": 3}}, "param_groups": [{"param_names": ["0.w"], "params": [0]}]}
    state = OptimState.from_torch(osd, ["model.w"])
    assert state.fqns == ("model.w",)
    assert state.groups[0].options == {"param_names": ["0.w"]}
    assert state.to_torch(ids=True) == osd


def test_names_that_repeat_the_dict_s_own_are_fine() -> None:
    osd = {"state": {}, "param_groups": [{"params": ["w", "b"]}]}
    assert OptimState.from_torch(osd, ["w", "b"]) == OptimState.from_torch(osd)


IDS = {"state": {0: {"s": 1}}, "param_groups": [{"params": [0, 1]}, {"params": [2]}]}
NAMED = {"state": {"w": {"s": 1}}, "param_groups": [{"params": ["w"]}]}


@pytest.mark.parametrize(
    "osd, fqns, error, texts",
    [
        pytest.param(IDS, None, UnknownName, ["without names", "named_parameters()", "3 names"], id="no names"),
        pytest.param(
            {**IDS, "param_groups": [{"params": [0], "param_names": ["a"]}, {"params": [1]}]},
            None, UnknownName, ["in group 1", "2 names"], id="param_names in one group only",
        ),
        pytest.param(IDS, ["a", "b"], SpecMismatch, ["2 names", "3 parameters"], id="too few names"),
        pytest.param(IDS, list("abcd"), SpecMismatch, ["4 names", "3 parameters"], id="too many names"),
        pytest.param(IDS, {0: "a", 1: "b"}, SpecMismatch, ["without a name: 2"], id="an id without a name"),
        pytest.param(IDS, dict(enumerate("abcd")), SpecMismatch, ["in no group: 3"], id="an id in no group"),
        pytest.param(IDS, ["a", "b", "a"], NameConflict, ["two parameters", "'a'"], id="a name twice"),
        pytest.param(IDS, "abc", SpecMismatch, ["'abc'"], id="a string is no list of names"),
        pytest.param(IDS, ["a", 3, None], SpecMismatch, ["3", "None"], id="names that are no strings"),
        pytest.param(
            {"state": {}, "param_groups": [{"params": [0, 1]}, {"params": [1]}]},
            ["a", "b", "c"], NameConflict, ["ids 1"], id="an id in two groups",
        ),
        pytest.param(
            {"state": {}, "param_groups": [{"params": ["a"]}, {"params": ["a"]}]},
            None, NameConflict, ["names 'a'"], id="a name in two groups",
        ),
        pytest.param(
            {"state": {}, "param_groups": [{"params": ["a"]}, {"params": [1]}]},
            None, Unsupported, ["ids (1)", "names ('a')"], id="groups mix ids and names",
        ),
        pytest.param({**NAMED, "state": {0: {}}}, None, Unsupported, ["ids", "0"], id="state by ids, groups by names"),
        pytest.param({**IDS, "state": {"b": {}}}, list("abc"), Unsupported, ["'b'"], id="state by names, groups by ids"),
        pytest.param({**IDS, "state": {"0": {}}}, list("abc"), Unsupported, ["'0'"], id="ids that went through JSON"),
        pytest.param({**IDS, "state": {7: {}, 9: {}}}, list("abc"), UnknownName, ["7, 9"], id="state of stray ids"),
        pytest.param({**NAMED, "state": {(1, 2): {}}}, None, Unsupported, ["(1, 2)"], id="a key of no kind"),
        pytest.param({"state": {}}, None, UnknownName, ["'param_groups'", "state_dict()"], id="no groups"),
        pytest.param({"param_groups": []}, None, UnknownName, ["'state'"], id="no state"),
        pytest.param({"state.w.step": 1}, None, UnknownName, ["unflatten_optim"], id="the flat form"),
        pytest.param({"state": [], "param_groups": []}, None, Unsupported, ["list"], id="state is a list"),
        pytest.param({"state": {}, "param_groups": [{"lr": 1}]}, None, UnknownName, ["'params'"], id="no params"),
        pytest.param(
            {"state": {}, "param_groups": [{"params": [torch.ones(2)]}]},
            None, Unsupported, ["state_dict()"], id="the optimizer's own groups",
        ),
        pytest.param({"state": {}, "param_groups": [{"params": [1.5]}]}, None, Unsupported, ["1.5"], id="an odd id"),
        pytest.param(NAMED, ["x"], NameConflict, ["rename_fqns"], id="other names for a dict by names"),
        pytest.param([], None, Unsupported, ["list"], id="no dict"),
        pytest.param(
            {"state": {}, "param_groups": [{"params": [0, 1], "param_names": ["w"]}]},
            None, SpecMismatch, ["group 0", "2 parameters", "1 name"], id="param_names of another length",
        ),
    ],
)  # fmt: skip
def test_refused_dicts(osd: Any, fqns: Any, error: type[FdsdError], texts: list[str]) -> None:
    with pytest.raises(error) as caught:
        OptimState.from_torch(osd, fqns)
    assert [text for text in texts if text not in str(caught.value)] == []


def test_state_nested_without_end_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["x"] = loop
    with pytest.raises(Unsupported, match="nested more than"):
        OptimState.from_torch({"state": {"w": loop}, "param_groups": [{"params": ["w"]}]})


# ------------------------------------------------------------------------------------------ as a value


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
        (lambda: OptimState({3: {}}), Unsupported, "not 3"),  # type: ignore[dict-item]
        (lambda: OptimState({}, [{"lr": 1}]), SpecMismatch, "'dict'"),  # type: ignore[list-item]
        (lambda: OptimState({}, [ParamGroup(["a", "b"]), ParamGroup(["b"])]), NameConflict, "'b'"),  # type: ignore[arg-type]
        (lambda: OptimState(extra={"state": 1}), NameConflict, "'state'"),
        (lambda: ParamGroup("weight"), SpecMismatch, "('weight',)"),  # type: ignore[arg-type]
        (lambda: ParamGroup(["a", 1]), SpecMismatch, "1"),  # type: ignore[list-item, arg-type]
        (lambda: ParamGroup(["a", "b", "a"]), NameConflict, "'a'"),  # type: ignore[arg-type]
        (lambda: ParamGroup(["a"], {"params": ["a"]}), Unsupported, "'params'"),  # type: ignore[arg-type]
        (lambda: ParamGroup(["a"], {"param_names": ["b"]}, named=True), Unsupported, "'param_names'"),  # type: ignore[arg-type]
        (lambda: state_of(step={"w": 1}).slots_of("v"), UnknownName, "'v' is not in"),
        (lambda: OptimState({}, [ParamGroup(("layer.weight",))]).slots_of("layer.wieght"), UnknownName, "'layer.weight'"),
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
        lambda: state.slots.__setitem__("s", 1),  # type: ignore[attr-defined]
        lambda: state.extra.__setitem__("s", 1),  # type: ignore[attr-defined]
        lambda: state.groups[0].options.__setitem__("lr", 1),  # type: ignore[attr-defined]
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
    assert [has_tensor(v) for v in (None, "x", {"a": [t(1.0)]}, {"a": []}, object())] == [False, False, True, False, False]


def test_many_parameters_are_read_in_linear_time() -> None:
    calls = 0

    class Counted(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal calls
            calls += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = [Counted(f"layers.{i}.w") for i in range(2000)]
    osd = {"state": {i: {"s": i} for i in range(2000)}, "param_groups": [{"params": list(range(2000))}]}
    OptimState.from_torch(osd, names).to_torch(ids=True)
    assert calls < 100_000  # a search through a list for each name would take 2,000,000
