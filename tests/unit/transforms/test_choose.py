"""Choosing and adding tensors: inverses of choices, insert, partition, combine, frozen parameters and their aliases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd import (
    ModelSpec,
    StateDict,
    TensorEntry,
    TensorSpec,
    combine,
    defer,
    drop,
    filter_frozen,
    insert,
    materialize,
    partition,
    select,
    specs,
)
from fdsd.errors import FdsdError, NameConflict, NotInvertible, SpecMismatch
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_laws, assert_round_trip, assert_same
from tests.helpers.refusing import assert_refused

W = torch.arange(6.0).reshape(2, 3)
STATE = StateDict({"embed": W, "norm": torch.tensor([7.0]), "head": W, "n": torch.tensor(8)})


class TestInverses:
    def test_grades(self) -> None:
        assert select("a").grade is drop("a").grade is filter_frozen(["a"]).grade is Grade.ONE_SIDED
        assert insert("a", TensorSpec((), torch.int8), init=0).grade is Grade.ONE_SIDED

    def test_undoing_drop_asserts_absence(self) -> None:
        p = drop("norm", "n?")
        assert_same((~p)(p(STATE)), p(STATE), order=True)
        with pytest.raises(NotInvertible, match=r"'n', 'norm'"):
            (~p)(STATE)
        assert (~p).check(STATE).problems[0].names == ("norm", "n")

    def test_undoing_select_refuses_the_rest(self) -> None:
        p = select("norm")
        assert_same((~p)(p(STATE)), p(STATE))
        with pytest.raises(NotInvertible, match=r"'embed', 'head', 'n'"):
            (~p)(STATE)

    def test_undoing_twice_and_printing(self) -> None:
        p = drop("norm")
        assert ~~p == p
        assert repr(~p) == "~drop('norm')"
        assert (~p).grade is Grade.ONE_SIDED

    def test_round_trips_and_laws(self) -> None:
        for p in (drop("norm"), select("norm"), filter_frozen(["embed"]), drop("x?")):
            assert_round_trip(p, STATE)
            assert_laws(p, STATE)


class TestInsert:
    SPEC = TensorSpec((2,), torch.bfloat16)

    @pytest.mark.parametrize(
        ("dtype", "init", "value"),
        [
            (torch.float32, 1.5, [1.5, 1.5]),
            (torch.float32, 0, [0.0, 0.0]),
            (torch.int64, -3, [-3, -3]),
            (torch.bool, True, [True, True]),
            (torch.bool, 0, [False, False]),
            (torch.uint16, 65535, [65535, 65535]),
            (torch.complex64, 1j, [1j, 1j]),
            (torch.float32, float("inf"), [float("inf")] * 2),
        ],
    )
    def test_a_value(self, dtype: torch.dtype, init: Any, value: list[Any]) -> None:
        made = insert("new", TensorSpec((2,), dtype), init=init)(STATE)
        assert list(made) == [*STATE, "new"]
        assert made["new"].tolist() == value and made["new"].dtype == dtype

    def test_laws(self) -> None:
        for init in (1.0, -0.0, init_of_ones):
            assert_laws(insert("new", self.SPEC, init=init), STATE)
        assert_laws(insert("new", TensorSpec((0, 3), torch.int8), init=1), STATE)

    def test_a_function_gets_the_spec(self) -> None:
        made = insert("new", self.SPEC, init=init_of_ones)(STATE)["new"]
        assert made.dtype == torch.bfloat16 and made.tolist() == [1.0, 1.0]
        lazy = insert("new", self.SPEC, init=init_of_ones)(defer(STATE))
        assert_same(materialize(lazy)["new"], made)

    def test_a_name_that_is_there(self) -> None:
        assert_refused(insert("norm", self.SPEC, init=0), STATE, NameConflict, "'norm'", "there already")

    def test_into_nothing(self) -> None:
        made = insert("new", self.SPEC, init=2.0)({})
        assert made["new"].tolist() == [2.0, 2.0]

    def test_a_function_that_makes_something_else(self) -> None:
        with pytest.raises(SpecMismatch, match=r"new.*bfloat16\[3\]|new.*float32\[3\]"):
            insert("new", self.SPEC, init=lambda spec: torch.ones(3))(STATE)
        with pytest.raises(FdsdError, match=r"new.*int"):
            insert("new", self.SPEC, init=lambda spec: 3)(STATE)  # type: ignore[arg-type, return-value]

    @pytest.mark.parametrize(("dtype", "init"), [(torch.int8, 1000), (torch.float32, "x"), (torch.float32, [1.0])])
    def test_values_that_do_not_fit(self, dtype: torch.dtype, init: Any) -> None:
        with pytest.raises(FdsdError, match=r"new|init"):
            insert("new", TensorSpec((2,), dtype), init=init)(STATE)

    def test_a_fraction_is_not_rounded_away(self) -> None:
        with pytest.raises(FdsdError, match=r"1\.5"):
            insert("new", TensorSpec((2,), torch.int8), init=1.5)(STATE)

    def test_no_spec(self) -> None:
        with pytest.raises(SpecMismatch, match="TensorSpec"):
            insert("new", (2,), init=0)  # type: ignore[arg-type]

    def test_names_with_braces_can_be_undone(self) -> None:
        assert_round_trip(insert("a{b}?", self.SPEC, init=0), STATE)


def init_of_ones(spec: TensorSpec) -> torch.Tensor:
    return torch.ones(spec.shape, dtype=spec.dtype)


class TestFilterFrozen:
    def test_aliases_go_too(self) -> None:
        for form in (STATE, defer(STATE), specs(STATE)):
            assert list(filter_frozen(["embed"])(form)) == ["norm", "n"]
            assert list(filter_frozen(["head"])(form)) == ["norm", "n"]

    def test_equal_values_are_no_ties(self) -> None:
        state = {"embed": W, "head": W.clone()}
        assert list(filter_frozen(["embed"])(state)) == ["head"]

    def test_views_are_no_ties(self) -> None:
        assert list(filter_frozen(["embed"])({"embed": W, "head": W[:1], "t": W.t()})) == ["head", "t"]

    def test_empty_tensors_are_no_ties(self) -> None:
        state = {"a": torch.empty(0), "b": torch.empty(0), "m": torch.ones(2, device="meta")}
        assert list(filter_frozen(["a"])(state)) == ["b", "m"]
        assert list(filter_frozen(["m"])({**state, "k": torch.ones(2, device="meta")})) == ["a", "b", "k"]

    def test_a_model_spec_says_what_is_frozen(self) -> None:
        entries = {
            "embed": TensorEntry(TensorSpec((2, 3), torch.float32), trainable=False),
            "norm": TensorEntry(TensorSpec((1,), torch.float32)),
            "gone": TensorEntry(TensorSpec((1,), torch.float32), trainable=False),
        }
        assert list(filter_frozen(ModelSpec(entries))(STATE)) == ["norm", "n"]


class TestPartitionAndCombine:
    def test_both_parts(self) -> None:
        chosen, others = partition(STATE, "norm", "n")
        assert (list(chosen), list(others)) == (["norm", "n"], ["embed", "head"])
        assert_same(combine(chosen, others), STATE)
        assert isinstance(chosen, StateDict) and isinstance(others, StateDict)

    def test_nothing(self) -> None:
        assert [list(part) for part in partition({}, "x?")] == [[], []]
        assert list(combine()) == [] == list(combine({}))

    def test_a_name_twice(self) -> None:
        with pytest.raises(NameConflict, match=r"combine: 'a', 'b' in more than one state"):
            combine({"b": 1, "a": 2}, {"c": 1}, {"a": 1}, {"b": 3})

    def test_metadata_is_joined(self) -> None:
        bn, linear = torch.nn.BatchNorm1d(2).state_dict(prefix="bn."), torch.nn.Linear(1, 1).state_dict(prefix="l.")
        assert dict(combine(bn, linear).metadata or {}) == {"bn": {"version": 2}, "l": {"version": 1}}
