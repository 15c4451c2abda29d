"""The flat form of optimizer state: what is written, how it is read alone and with ``like``, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd.data.errors import NameConflict, SpecMismatch, UnknownName, Unsupported
from fdsd.data.flat_optim import flatten, unflatten
from fdsd.data.optim import OptimState, ParamGroup


def group(*fqns: str, **options: Any) -> ParamGroup:
    return ParamGroup(fqns, options)


def read(osd_state: dict[str, Any], *groups: ParamGroup) -> OptimState:
    packed = [{**g.options, "params": list(g.fqns)} for g in groups]
    return OptimState.from_torch({"state": osd_state, "param_groups": packed})


# ------------------------------------------------------------------------------------------ writing


def test_the_form_and_its_order() -> None:
    w = torch.arange(3.0)
    betas = (0.9, 0.99)
    state = read(
        {"b.w": {"step": 4}, "a.w": {"step": 3, "exp_avg": w}},
        group("a.w", "a.b", lr=0.1, betas=betas),
        group("b.w", lr=0.2, initial_lr=0.3),
    )
    flat = flatten(state)
    assert list(flat.items()) == [
        ("state.a.w.step", 3),
        ("state.a.w.exp_avg", w),
        ("state.b.w.step", 4),
        ("param_groups.a.w.lr", 0.1),
        ("param_groups.a.w.betas", betas),
        ("param_groups.a.b.lr", 0.1),
        ("param_groups.a.b.betas", betas),
        ("param_groups.b.w.lr", 0.2),
        ("param_groups.b.w.initial_lr", 0.3),
    ]
    assert flat["state.a.w.exp_avg"] is w
    assert flat["param_groups.a.b.betas"] is betas


def test_nested_state_is_joined_by_dots() -> None:
    state = read({"w": {"kron": {0: 1, "x": {("y", 2): 3}}, "a.b": 4, "none": {}}}, group("w"))
    assert flatten(state) == {"state.w.kron.0": 1, "state.w.kron.x.('y', 2)": 3, "state.w.a.b": 4}


def test_empty_parts_leave_nothing() -> None:
    assert flatten(OptimState()) == {}
    assert flatten(read({"w": {}}, group("w"), group(lr=3))) == {}


def test_param_names_are_written_as_torch_does() -> None:
    state = OptimState({}, (ParamGroup(("w", "b"), {"lr": 1}, named=True),))
    assert flatten(state) == {
        "param_groups.w.lr": 1,
        "param_groups.w.param_names": ["w", "b"],
        "param_groups.b.lr": 1,
        "param_groups.b.param_names": ["w", "b"],
    }
    assert unflatten(flatten(state)) == state


@pytest.mark.parametrize(
    "state, key",
    [
        (read({"w": {"kron": {0: 1, "0": 2}}}, group("w")), "'state.w.kron.0'"),
        (read({"w": {"kron": {"0": 1}, "kron.0": 2}}, group("w")), "'state.w.kron.0'"),
        (read({"a": {"b.c": 1}, "a.b": {"c": 2}}, group("a", "a.b")), "'state.a.b.c'"),
        (read({"a": 1, "": {"a": 2}, ".a": 3}, group("a")), "'state..a'"),
        (OptimState({}, (ParamGroup(("w",), {0: 1, "0": 2}),)), "'param_groups.w.0'"),
    ],
)
def test_two_values_for_one_flat_name_are_refused(state: OptimState, key: str) -> None:
    with pytest.raises(NameConflict) as caught:
        flatten(state)
    assert key in str(caught.value)
    with pytest.raises(NameConflict):
        unflatten({}, like=state)


def test_an_option_with_a_dot_would_be_read_as_a_parameter() -> None:
    with pytest.raises(Unsupported, match=r"'weight\.decay'"):
        flatten(OptimState({}, (ParamGroup(("w",), {"weight.decay": 1}),)))


# ------------------------------------------------------------------------------------------ reading alone


def test_alone_parameters_with_equal_options_form_one_group() -> None:
    flat = {
        "param_groups.c.lr": 0.1,
        "param_groups.a.lr": 0.2,
        "param_groups.b.lr": 0.1,
        "param_groups.b.betas": (0.9, float("nan")),
        "param_groups.c.betas": (0.9, float("nan")),
        "param_groups.a.betas": (0.9, float("nan")),
        "param_groups.d.betas": [0.9, float("nan")],
        "param_groups.d.lr": 0.1,
        "param_groups.e.lr": 0.1,
        "state.b.step": 7,
    }
    state = unflatten(flat)
    assert [g.fqns for g in state.groups] == [("c", "b"), ("a",), ("d",), ("e",)]
    assert state.slots_of("b") == {"step": 7}


def test_alone_tensors_are_grouped_by_identity() -> None:
    lr, other = torch.tensor(0.1), torch.tensor(0.1)
    state = unflatten({"param_groups.a.lr": lr, "param_groups.b.lr": other, "param_groups.c.lr": lr})
    assert [g.fqns for g in state.groups] == [("a", "c"), ("b",)]


def test_alone_keys_of_nested_state_are_strings() -> None:
    state = unflatten({"state.w.kron.0": 1, "param_groups.w.lr": 2})
    assert dict(state.slots) == {("kron", "0"): {"w": 1}}


def test_alone_state_of_unlisted_names_is_cut_at_the_last_dot() -> None:
    state = unflatten({"state.kfac.A.step": 1, "state.n": 2})
    assert state.groups == ()
    assert dict(state.slots) == {"step": {"kfac.A": 1}, (): {"n": 2}}


def test_alone_ambiguous_keys_are_refused_all_at_once() -> None:
    flat = {"param_groups.a.lr": 1, "param_groups.a.b.lr": 2, "state.a.b.c": 3, "state.a.b": 4, "state.a.d": 5}
    with pytest.raises(NameConflict) as caught:
        unflatten(flat)
    text = str(caught.value)
    assert "2 keys" in text
    assert "'state.a.b.c'" in text
    assert "slot 'b.c' of 'a'" in text
    assert "slot 'c' of 'a.b'" in text
    assert "state.a.d" not in text
    assert "like=" in text


def test_a_value_beside_a_dict_of_its_name_is_refused() -> None:
    with pytest.raises(NameConflict, match="two values"):
        unflatten({"param_groups.w.lr": 1, "state.w.k": 2, "state.w.k.x": 3})


@pytest.mark.parametrize("key", ["step", "states.w.step", "param_groups.lr", "param_group.w.lr", 3])
def test_keys_of_neither_form_are_refused(key: Any) -> None:
    with pytest.raises(UnknownName) as caught:
        unflatten({key: 1, "param_groups.w.lr": 1})
    assert repr(key) in str(caught.value)


def test_many_parameters_with_options_of_their_own_are_grouped_in_linear_time(monkeypatch: Any) -> None:
    calls = []

    def counted(a: Any, b: Any) -> bool:
        calls.append(1)
        return dict(a) == dict(b)

    monkeypatch.setitem(unflatten.__globals__, "same_mapping", counted)
    state = unflatten({f"param_groups.p{i}.lr": i / 7 for i in range(3000)})
    assert len(state.groups) == 3000
    assert len(calls) < 3000


# ------------------------------------------------------------------------------------------ reading with like


LIKE = read(
    {"a": {"kron": {0: 1, "x": {}}, "step": 2}, "b": {}, "free": {"n": 3}},
    group("a", "b", lr=0.1, betas=(0.9, 0.99)),
    group(lr=0.3),
    group("c", lr=0.1, betas=(0.9, 0.99)),
).replace(extra={"version": 1})


def test_like_restores_what_the_flat_form_cannot_carry() -> None:
    assert unflatten(flatten(LIKE), like=LIKE) == LIKE
    alone = unflatten(flatten(LIKE))
    assert [g.fqns for g in alone.groups] == [("a", "b", "c")]
    assert alone.to_torch()["state"] == {"a": {"kron": {"0": 1}, "step": 2}, "free": {"n": 3}}
    assert alone.extra == {}


def test_values_come_from_the_flat_form() -> None:
    flat = {**flatten(LIKE), "state.a.step": 9, "param_groups.c.lr": 0.7, "param_groups.c.initial_lr": 0.8}
    state = unflatten(flat, like=LIKE)
    assert state.slots["step"]["a"] == 9
    assert state.groups[2] == group("c", lr=0.7, betas=(0.9, 0.99), initial_lr=0.8)
    assert state.groups[:2] == LIKE.groups[:2]


def test_like_without_state_takes_what_there_is() -> None:
    fresh = LIKE.replace(slots={})
    state = unflatten({k: v for k, v in flatten(LIKE).items() if "free" not in k}, like=fresh)
    assert state.groups == LIKE.groups
    assert dict(state.slots) == {("kron", "0"): {"a": 1}, "step": {"a": 2}}


def test_like_tells_an_ambiguous_key() -> None:
    groups = [group("a", "a.b", lr=1)]
    one, other = read({"a": {"b": {"c": 3}}}, *groups), read({"a.b": {"c": 3}}, *groups)
    assert flatten(one) == flatten(other)
    assert unflatten(flatten(one), like=one) == one
    assert unflatten(flatten(one), like=other) == other
    with pytest.raises(NameConflict, match="two ways"):
        unflatten(flatten(one), like=read({}, *groups))


def test_slots_of_other_parameters_of_like_tell_too() -> None:
    like = read({"d": {"c": 1, "kron": {0: 2}}}, group("a", "a.b", "d", lr=1))
    flat = {**flatten(like), "state.a.b.c": 3, "state.a.kron.0": 4}
    assert unflatten(flat, like=like).to_torch()["state"] == {
        "a": {"kron": {0: 4}},
        "a.b": {"c": 3},
        "d": {"c": 1, "kron": {0: 2}},
    }


def test_differing_options_within_a_group_are_refused_never_the_first_taken() -> None:
    flat = {**flatten(LIKE), "param_groups.b.lr": 0.5, "param_groups.b.betas": (0.9, 0.999)}
    for strict in (True, False):
        with pytest.raises(SpecMismatch) as caught:
            unflatten(flat, like=LIKE, strict=strict)
        text = str(caught.value)
        assert "'lr' is 0.1 for 'a' and 0.5 for 'b'" in text
        assert "'betas' is (0.9, 0.99) for 'a' and (0.9, 0.999) for 'b'" in text


def test_strict_names_all_that_is_missing_and_unknown() -> None:
    flat = flatten(LIKE).to_dict()
    for key in ("state.a.step", "param_groups.b.lr", "param_groups.c.betas"):
        del flat[key]
    with pytest.raises(UnknownName) as caught:
        unflatten({**flat, "param_groups.x.lr": 1, "state.y.step": 2}, like=LIKE)
    text = str(caught.value)
    for part in ("3 keys", "'state.a.step'", "'param_groups.b.lr'", "'param_groups.c.betas'", "2 names", "'x', 'y'"):
        assert part in text
    assert "strict=False" in text


def test_lax_keeps_like_s_options_and_leaves_missing_state_out() -> None:
    state = unflatten(
        {"param_groups.a.lr": 0.7, "param_groups.x.lr": 1, "state.y.step": 2, "state.a.kron.0": 5},
        like=LIKE,
        strict=False,
    )
    assert state.groups[0] == group("a", "b", lr=0.7, betas=(0.9, 0.99))
    assert state.groups[1:] == LIKE.groups[1:]
    assert state.to_torch()["state"] == {"a": {"kron": {0: 5, "x": {}}}, "b": {}}
    assert state.extra == {"version": 1}


def test_lax_leaves_a_parameter_without_saved_state_uninitialised() -> None:
    state = unflatten({}, like=LIKE, strict=False)
    assert state.groups == LIKE.groups
    assert state.to_torch()["state"] == {"b": {}}


def test_an_option_that_only_some_of_a_group_have() -> None:
    flat = {**flatten(LIKE), "param_groups.a.initial_lr": 0.5}
    with pytest.raises(UnknownName, match=r"'param_groups\.b\.initial_lr'"):
        unflatten(flat, like=LIKE)
    assert unflatten(flat, like=LIKE, strict=False).groups[0].options["initial_lr"] == 0.5


def test_param_names_come_from_like_or_else_from_the_flat_form() -> None:
    plain = read({}, group("w", "b", lr=1))
    named = OptimState({}, (ParamGroup(("w", "b"), {"lr": 1}, named=True),))
    assert unflatten(flatten(plain), like=named) == named
    assert unflatten(flatten(named), like=named) == named
    assert unflatten(flatten(named), like=plain) == named


def test_a_saved_state_wins_over_an_empty_one() -> None:
    like = read({"w": {}, "v": {"k": {}}}, group("w", "v"))
    state = unflatten({"state.w.step": 1, "state.v.k.x": 2}, like=like)
    assert state.to_torch()["state"] == {"w": {"step": 1}, "v": {"k": {"x": 2}}}
