"""tie and untie on tensors, lazy tensors and specs: one tensor, all names; nothing silently untied."""

from __future__ import annotations

from operator import invert
from typing import Any

import pytest
import torch

from fdsd import (
    Pipeline,
    StateDict,
    add_prefix,
    concat,
    defer,
    filter_frozen,
    materialize,
    rename_fqns,
    specs,
    tie,
    transpose,
    untie,
)
from fdsd.data.ties import ties
from fdsd.errors import BadPattern, FdsdError, NameConflict, NotInvertible, SpecMismatch, UnknownName
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_laws, assert_round_trip, assert_same
from tests.helpers.refusing import assert_refused

W = torch.arange(6.0).reshape(2, 3)


def state() -> StateDict[Any]:
    return StateDict({"embed": W, "norm": torch.tensor([7.0])})


FORMS = [lambda x: x, defer]


class TestTie:
    @pytest.mark.parametrize("form", FORMS)
    def test_one_tensor_two_names(self, form: Any) -> None:
        made = tie({"head": "embed"})(form(state()))
        assert list(made) == ["embed", "norm", "head"]
        assert made["head"] is made["embed"]
        whole = materialize(made)
        assert whole["head"] is whole["embed"]
        assert_laws(tie({"head": "embed"}), state())

    def test_patterns(self) -> None:
        x = {f"{i}.w": torch.tensor([float(i)]) for i in range(3)}
        made = tie({"{i}.alias": "{i}.w"})(x)
        assert all(made[f"{i}.alias"] is x[f"{i}.w"] for i in range(3))
        assert_laws(tie({"{i}.alias": "{i}.w"}), x)

    def test_an_alias_that_is_tied_already_stays_where_it_is(self) -> None:
        x = {"head": W, "embed": W}
        made = tie({"head": "embed"})(x)
        assert list(made) == ["head", "embed"] and made["head"] is W

    @pytest.mark.parametrize("form", FORMS)
    def test_equal_tensors_become_one(self, form: Any) -> None:
        made = materialize(tie({"head": "embed"})(form({"head": W.clone(), "embed": W})))
        assert list(made) == ["head", "embed"] and made["head"] is made["embed"]
        assert_same(made["head"], W)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("other", [W + 1, torch.where(W == 0, -0.0, W), W.t().contiguous().view(2, 3)])
    def test_two_unequal_values_are_an_error(self, form: Any, other: torch.Tensor) -> None:
        with pytest.raises(SpecMismatch) as caught:
            materialize(tie({"head": "embed"})(form({"head": other, "embed": W})))
        assert "'head'" in str(caught.value) and "'embed'" in str(caught.value) and "unequal" in str(caught.value)

    def test_nans_are_compared_by_bytes(self) -> None:
        x = {"head": torch.tensor([float("nan")]), "embed": torch.tensor([float("nan")])}
        assert materialize(tie({"head": "embed"})(x))["head"].isnan().all()

    @pytest.mark.parametrize("shape", [(1,), (2, 1)])
    def test_equal_values_in_any_memory(self, shape: tuple[int, ...]) -> None:
        wide = (
            torch.arange(8).reshape(4, 2)[: shape[0], 1:].reshape(shape) if len(shape) == 2 else torch.arange(3)[1::2]
        )
        for form in FORMS:
            made = materialize(tie({"b": "a"})(form({"a": wide, "b": wide.clone()})))  # type: ignore[no-untyped-call]
            assert_same(made["b"], wide)

    def test_shapes_and_dtypes_must_agree(self) -> None:
        p = tie({"head": "embed"})
        assert_refused(p, {"embed": W, "head": W.t()}, SpecMismatch, "'head'", "[2, 3]", "[3, 2]")
        assert_refused(p, {"embed": W, "head": W.double()}, SpecMismatch, "float64")

    def test_refusals(self) -> None:
        assert_refused(tie({"head": "embd"}), state(), UnknownName, "'embd'", "'embed'")
        assert_refused(tie({"a": "norm", "b": "a"}), {**state(), "a": W[0, :1]}, FdsdError, "'b'")
        both = tie({"{x}.c": "{x}.a", "q.{y}": "r.{y}"})
        assert_refused(both, {"q.a": W, "r.c": W}, NameConflict, "'q.c'")

    @pytest.mark.parametrize("aliases", [{"head?": "embed"}, {"h.{i}": "embed"}, {"head": "e.{i}"}, {"{_}": "{_}"}])
    def test_patterns_that_do_not_fit(self, aliases: dict[str, str]) -> None:
        with pytest.raises(BadPattern):
            tie(aliases)

    def test_an_absent_owner_may_be_excused(self) -> None:
        assert_same(tie({"head": "embd?"})(state()), state())

    def test_inverse(self) -> None:
        p = tie({"head": "embed"})
        assert p.grade is (~p).grade is Grade.EXACT and ~~p == p
        assert_round_trip(p, state())
        assert repr(~p) == "~tie({'head': 'embed'})"
        for form in (*FORMS, specs):
            assert list((~p)(p(form(state())))) == ["embed", "norm"]  # type: ignore[no-untyped-call]

    def test_undoing_what_was_not_done(self) -> None:
        p = ~tie({"head": "embed"})
        with pytest.raises(FdsdError, match="'head'"):
            p(state())
        with pytest.raises(FdsdError) as caught:
            p({**state(), "head": W + 1})
        assert "'head'" in str(caught.value) and "'embed'" in str(caught.value)

    def test_a_tie_can_be_undone_after_one_name_was_rearranged(self) -> None:
        """Which unties it: the owner comes back as a tensor of its own, equal to the alias."""
        x = {"embed": torch.arange(4.0), "b": torch.arange(4.0, 6.0)}
        p = tie({"head": "embed"}) >> concat(["embed", "b"], "eb", dim=0)
        assert_round_trip(p, x)

    def test_objects_are_shared_too(self) -> None:
        assert tie({"b": "a"})({"a": "text"})["b"] == "text"


class TestTiesThroughVerbs:
    @pytest.mark.parametrize("form", [*FORMS, specs])
    @pytest.mark.parametrize("p", [transpose("{_}"), rename_fqns({"{x}": "m.{x}"}), add_prefix("m.")], ids=str)
    def test_what_is_done_to_all_names_keeps_the_tie(self, form: Any, p: Pipeline) -> None:
        x = StateDict({"a": W, "b": W, "c": W.clone()})
        groups = ties(p(form(x)))
        assert [len(group) for group in groups] == [2]

    def test_what_is_done_to_one_name_unties_it(self) -> None:
        x = StateDict({"a": W, "b": W})
        for form in FORMS:
            assert ties(transpose("a")(form(x))) == []  # type: ignore[no-untyped-call]

    def test_ties_on_specs_are_those_that_tie_makes(self) -> None:
        p = tie({"head": "embed"}) >> filter_frozen(["embed"])
        assert list(p(specs(state()))) == list(p(state())) == ["norm"]
        assert p.check(state(), expect={"norm": torch.zeros(1)}).ok


class TestUntie:
    @pytest.mark.parametrize("form", FORMS)
    def test_a_tensor_of_its_own(self, form: Any) -> None:
        x = form(StateDict({"embed": W, "head": W, "third": W}))
        made = untie("head")(x)
        whole = materialize(made)
        assert whole["head"] is not whole["embed"] is whole["third"]
        assert_same(whole["head"], W)
        assert whole["head"].untyped_storage().data_ptr() != whole["embed"].untyped_storage().data_ptr()

    @pytest.mark.parametrize("form", FORMS)
    def test_of_all_names_the_first_keeps_the_tensor(self, form: Any) -> None:
        x = form(StateDict({"embed": W, "head": W, "third": W}))
        made = untie("head", "embed", "third")(x)
        assert made["embed"] is x["embed"]
        assert ties(materialize(made)) == [] == ties(made)

    @pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bool])
    def test_every_dtype(self, dtype: torch.dtype) -> None:
        w = torch.tensor([[1, 0], [0, 1]]).to(dtype)
        assert_laws(untie("b"), {"a": w, "b": w})

    def test_what_is_not_tied_stays(self) -> None:
        x = state()
        assert untie("norm")(x)["norm"] is x["norm"]
        assert untie("{_}")({"o": "text"})["o"] == "text"

    def test_there_is_no_inverse(self) -> None:
        assert untie("a").grade is Grade.NONE
        with pytest.raises(NotInvertible, match=r"tie\(\{alias: owner\}\)"):
            invert(untie("a"))


def test_leaves_without_storage_are_no_ties_and_no_crash() -> None:
    sparse = torch.eye(2).to_sparse()
    x = {"s": sparse, "t": sparse, "w": W}
    assert list(rename_fqns({"s": "u"})(x)) == ["u", "t", "w"]
    for p in (untie("w"), filter_frozen(["w"]), tie({"v": "w"})):
        made = p(x)
        assert made["s"] is sparse
