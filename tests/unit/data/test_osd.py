"""Torch's optimizer dict in all its forms: by ids, by names, with param_names; what is refused, and why."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch

from fdsd.data.errors import FdsdError, NameConflict, SpecMismatch, UnknownName, Unsupported
from fdsd.data.optim import OptimState, ParamGroup


def t(value: float) -> torch.Tensor:
    return torch.tensor(value)


def two_groups() -> dict[str, Any]:
    return {
        "state": {0: {"step": t(3.0), "exp_avg": torch.arange(4.0)}, 2: {"step": t(5.0), "exp_avg": torch.ones(0)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
    }


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
        pytest.param({**NAMED, "state": {0: {}}}, None, Unsupported, ["ids", "0"], id="state by ids, not groups"),
        pytest.param({**IDS, "state": {"b": {}}}, list("abc"), Unsupported, ["'b'"], id="groups by ids, not state"),
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


class TestNamesThatContradictTheDict:
    OSD: ClassVar[dict[str, Any]] = {
        "state": {0: {"step": 1}, 1: {"step": 2}, 2: {"step": 3}},
        "param_groups": [{"params": [0, 2], "param_names": ["w", "n"]}, {"params": [1], "param_names": ["b"]}],
    }

    @pytest.mark.parametrize("fqns", [["b", "w", "n"], ["x", "w", "n"], {0: "n", 1: "b", 2: "w"}])
    def test_another_parameters_name_is_refused(self, fqns: Any) -> None:
        with pytest.raises(
            NameConflict, match=r"contradicts the dict's own 'param_names'.*for id \d, which is '\w' there"
        ):
            OptimState.from_torch(self.OSD, fqns)

    @pytest.mark.parametrize(
        "fqns", [["w", "b", "n"], {0: "w", 1: "b", 2: "n"}, ["m.w", "m.b", "m.n"], ["x", "y", "z"]]
    )
    def test_the_same_and_other_names_are_taken(self, fqns: Any) -> None:
        state = OptimState.from_torch(self.OSD, fqns)
        names = list(fqns.values()) if isinstance(fqns, dict) else fqns
        assert [state.slots["step"][name] for name in names] == [1, 2, 3]

    def test_all_offenders_are_counted(self) -> None:
        names = [f"p{i}" for i in range(30)]
        osd = {"state": {}, "param_groups": [{"params": list(range(30)), "param_names": names}]}
        with pytest.raises(NameConflict, match=r"for 30 parameters: .*; and 20 more\. Leave fqns= out"):
            OptimState.from_torch(osd, names[1:] + names[:1])
