"""concat and split: exact values, interleaved blocks of the real models, positions, and refusals."""

from __future__ import annotations

from operator import invert
from typing import Any

import pytest
import torch

from fdsd import Pipeline, StateDict, concat, defer, materialize, specs, split, transpose
from fdsd.errors import BadPattern, FdsdError, IncompleteGroup, NameConflict, NotInvertible, SpecMismatch, UnknownName
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_laws, assert_round_trip, assert_same
from tests.helpers.refusing import assert_refused


def rows(first: int, count: int, width: int = 0) -> torch.Tensor:
    """Rows that tell their number: row r is r, or [10 r, 10 r + 1, ...]."""
    numbers = torch.arange(first, first + count)
    return numbers if not width else numbers[:, None] * 10 + torch.arange(width)


QKV = {"q": rows(0, 4), "k": rows(10, 2), "v": rows(20, 2)}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (1, [0, 1, 2, 3, 10, 11, 20, 21]),
        (2, [0, 1, 10, 20, 2, 3, 11, 21]),
    ],
)
def test_blocks_are_taken_in_turn(groups: int, expected: list[int]) -> None:
    p = concat(["q", "k", "v"], "qkv", dim=0, groups=groups)
    assert p(QKV)["qkv"].tolist() == expected
    assert_laws(p, QKV)
    bound = p.bind(QKV)
    assert bound == concat(["q", "k", "v"], "qkv", dim=0, sizes=[4, 2, 2], groups=groups)
    assert ~bound == split("qkv", ["q", "k", "v"], dim=0, sizes=[4, 2, 2], groups=groups)


def test_megatron_rows_of_grouped_queries() -> None:
    """Rows of one group: H/G query heads, then its k, then its v; Megatron-Core, get_query_key_value_tensors."""
    H, G, d, D = 6, 2, 4, 3
    q, k, v = (torch.arange(n * d * D).reshape(n * d, D) + 1000 * i for i, n in enumerate((H, G, G)))
    fused = concat(["q", "k", "v"], "qkv", dim=0, groups=G)({"q": q, "k": k, "v": v})["qkv"]
    view = fused.view(G, H // G + 2, d, D)
    assert torch.equal(view[:, : H // G], q.view(G, H // G, d, D))
    assert torch.equal(view[:, H // G], k.view(G, d, D))
    assert torch.equal(view[:, H // G + 1], v.view(G, d, D))


def test_per_head_rows() -> None:
    """GPT-NeoX and BLOOM: (H, 3, d) rows."""
    H, d = 4, 2
    parts = {name: torch.arange(H * d) + 100 * i for i, name in enumerate("qkv")}
    fused = concat(list(parts), "f", dim=0, groups=H)(parts)["f"].view(H, 3, d)
    for i, name in enumerate("qkv"):
        assert torch.equal(fused[:, i].reshape(-1), parts[name])


def test_interleaved_gate_and_up() -> None:
    """gpt-oss: even rows gate, odd rows up."""
    state = {"gate": rows(0, 3, 2), "up": rows(100, 3, 2)}
    fused = concat(["gate", "up"], "gu", dim=0, groups=3)(state)["gu"]
    assert torch.equal(fused[0::2], state["gate"]) and torch.equal(fused[1::2], state["up"])


def test_gate_over_up_on_each_rank() -> None:
    """Megatron linear_fc1 under tp=2 is [gate_0; up_0; gate_1; up_1] globally."""
    state = {"gate": rows(0, 4), "up": rows(10, 4)}
    assert concat(["gate", "up"], "fc1", dim=0, groups=2)(state)["fc1"].tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


@pytest.mark.parametrize("dim", [1, -1])
def test_dims_may_be_negative(dim: int) -> None:
    state = {"a": rows(0, 2, 2), "b": rows(5, 2, 1)}
    made = concat(["a", "b"], "ab", dim=dim)(state)
    assert made["ab"].tolist() == [[0, 1, 50], [10, 11, 60]]
    assert_round_trip(concat(["a", "b"], "ab", dim=dim), state)


def test_each_value_of_the_holes_is_a_group_and_stands_where_its_first_part_stood() -> None:
    state = StateDict(
        {
            "head": rows(0, 1),
            "0.k": rows(1, 1),
            "1.q": rows(2, 1),
            "mid": rows(3, 1),
            "0.q": rows(4, 1),
            "1.k": rows(5, 1),
        }
    )
    made = concat(["{i}.q", "{i}.k"], "{i}.qk", dim=0)(state)
    assert list(made) == ["head", "0.qk", "1.qk", "mid"]
    assert (made["0.qk"].tolist(), made["1.qk"].tolist()) == ([4, 1], [2, 5])


def test_bind_makes_a_step_for_each_distinct_size() -> None:
    state = {f"{i}.{x}": rows(10 * i, i + 1) for i in range(3) for x in "ab"}
    state |= {"3.a": rows(90, 1), "3.b": rows(95, 1)}
    p = concat(["{i}.a", "{i}.b"], "{i}.ab", dim=0)
    bound = p.bind(state)
    assert bound.grade is Grade.EXACT and len(bound.steps) > 1
    assert_same(bound(state), p(state), order=True)
    assert_laws(p, state)


def test_bind_does_not_overrule_sizes() -> None:
    with pytest.raises(SpecMismatch, match=r"\(3, 1\).*\(2, 2\)"):
        concat(["a", "b"], "ab", dim=0, sizes=[2, 2]).bind({"a": rows(0, 3), "b": rows(5, 1)})


def test_the_target_may_have_the_name_of_a_part() -> None:
    state = {"a": rows(0, 2), "b": rows(5, 1), "c": rows(9, 1)}
    assert concat(["a", "b"], "b", dim=0)(state)["b"].tolist() == [0, 1, 5]
    assert_round_trip(concat(["a", "b"], "b", dim=0), state)


def test_zero_sizes_and_single_parts() -> None:
    state = {"a": rows(0, 0), "b": rows(5, 2)}
    assert concat(["a", "b"], "ab", dim=0)(state)["ab"].tolist() == [5, 6]
    assert_laws(concat(["a", "b"], "ab", dim=0), state)
    assert_laws(concat(["b"], "c", dim=0), state)
    assert_laws(split("b", ["x", "y", "z"], dim=0, sizes=[0, 2, 0]), state)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_every_dtype(dtype: torch.dtype) -> None:
    state = {"a": torch.tensor([[0, 1], [2, 3]]).to(dtype), "b": torch.tensor([[1, 0], [3, 2]]).to(dtype)}
    for groups in (1, 2):
        assert_laws(concat(["a", "b"], "ab", dim=0, groups=groups), state)


@pytest.mark.parametrize(
    ("p", "state", "error", "texts"),
    [
        (concat(["{i}.q", "{i}.k"], "{i}.x", dim=0), {"0.q": 1, "0.k": 1, "1.q": 1}, IncompleteGroup, ["'1.k'"]),
        (concat(["q", "k"], "x", dim=0), {"q": 1}, (UnknownName, IncompleteGroup), ["'k'"]),
        (concat(["q", "k"], "x", dim=0), {"a": 1}, UnknownName, ["'q'"]),
        (concat(["q", "k"], "x?", dim=0), {"q": 1}, (UnknownName, IncompleteGroup), ["'x' lacks 'k'"]),
        (concat(["q", "k"], "x", dim=0), {"q": 1, "k": 1, "x": 1}, NameConflict, ["'x'"]),
        (split("q", ["a", "b"], dim=0, sizes=[1, 1]), {"q": 2, "a": 1}, NameConflict, ["'a'"]),
        (split("z", ["a", "b"], dim=0, sizes=[1, 1]), {"q": 2}, UnknownName, ["'z'"]),
    ],
    ids=str,
)
def test_groups_that_are_not_whole(p: Pipeline, state: dict[str, int], error: Any, texts: list[str]) -> None:
    assert_refused(p, {name: rows(0, count) for name, count in state.items()}, error, *texts)


@pytest.mark.parametrize(
    ("p", "state", "texts"),
    [
        (concat(["a", "b"], "x", dim=0), {"a": (2, 3), "b": (2, 4)}, ["(2, 3)", "(2, 4)", "dim 0"]),
        (concat(["a", "b"], "x", dim=0), {"a": (2,), "b": (2, 1)}, ["'x'", "int64[2]", "int64[2, 1]"]),
        (concat(["a", "b"], "x", dim=2), {"a": (2, 3), "b": (2, 3)}, ["no dim 2", "(2, 3)"]),
        (concat(["a", "b"], "x", dim=0), {"a": (), "b": ()}, ["no dim 0", "()"]),
        (concat(["a", "b"], "x", dim=0, sizes=[1, 2]), {"a": (2,), "b": (1,)}, ["(2, 1)", "(1, 2)"]),
        (concat(["a", "b"], "x", dim=0, groups=2), {"a": (3,), "b": (2,)}, ["(3, 2)", "groups=2"]),
        (split("a", ["x", "y"], dim=0, sizes=[2, 1]), {"a": (4,)}, ["size 4", "(2, 1)", "3"]),
        (split("a", ["x", "y"], dim=0, sizes=[4, 4]), {"a": (10, 2)}, ["size 10", "8"]),
        (split("a", ["x", "y"], dim=1, sizes=[4, 4]), {"a": (8,)}, ["no dim 1", "(8,)"]),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(p: Pipeline, state: dict[str, tuple[int, ...]], texts: list[str]) -> None:
    tensors = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in state.items()}
    assert_refused(p, tensors, SpecMismatch, *texts)


def test_dtypes_must_agree() -> None:
    state = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}
    p = concat(["a", "b"], "x", dim=0)
    assert_refused(p, state, SpecMismatch, "'x'", "'a' float32[2]", "'b' bfloat16[2]", "cast()")


def test_objects_are_refused_by_name() -> None:
    assert_refused(concat(["a", "b"], "x", dim=0), {"a": torch.ones(2), "b": "text"}, FdsdError, "'x'", "str")


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: concat([], "x", dim=0), BadPattern, "no patterns"),
        (lambda: concat(["a", "a"], "x", dim=0), BadPattern, "more than once"),
        (lambda: concat(["a?", "b"], "x", dim=0), BadPattern, "'?' stands on the single pattern"),
        (lambda: concat(["a.{i}", "b"], "x.{i}", dim=0), BadPattern, "lacks {i}"),
        (lambda: concat(["a.{i}", "b.{i}"], "x", dim=0), BadPattern, "stack()"),
        (lambda: concat(["a", "b"], "x", dim=0, sizes=[1]), SpecMismatch, "1 sizes for 2 parts"),
        (lambda: concat(["a", "b"], "x", dim=0, sizes=[3, 2], groups=2), SpecMismatch, "2 equal blocks"),
        (lambda: concat(["a", "b"], "x", dim=0, sizes=[-1, 2]), SpecMismatch, "-1"),
        (lambda: concat(["a", "b"], "x", dim=0, groups=0), SpecMismatch, "groups=0"),
        (lambda: split("x", ["a"], dim=0, sizes=[1, 2]), SpecMismatch, "2 sizes for 1 parts"),
        (lambda: split("x", [], dim=0, sizes=[]), BadPattern, "no patterns"),
    ],
)
def test_arguments_that_do_not_fit(make: Any, error: Any, text: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


def test_without_sizes_there_is_no_inverse() -> None:
    p = concat(["a", "b"], "x", dim=0)
    assert p.grade is Grade.NONE
    with pytest.raises(NotInvertible, match=r"sizes=.*bind"):
        invert(p)
    assert split("x", ["a", "b"], dim=0, sizes=[1, 1]).grade is Grade.EXACT


def test_question_marks_excuse_an_absent_group_and_move_with_the_inverse() -> None:
    p = concat(["{i}.a", "{i}.b"], "{i}.x?", dim=0, sizes=[1, 1])
    state = StateDict({"n": rows(0, 1)})
    assert_same(p(state), state)
    assert ~p == split("{i}.x?", ["{i}.a", "{i}.b"], dim=0, sizes=[1, 1])
    assert_same((~p)(state), state)
    assert_laws(p, state)


def test_parts_of_a_tied_tensor_are_parts_of_all_its_names() -> None:
    w = rows(0, 4)
    made = split("{m}.w", ["{m}.a", "{m}.b"], dim=0, sizes=[3, 1])(defer({"0.w": w, "1.w": w}))
    assert made["0.a"] is made["1.a"] and made["0.b"] is made["1.b"] and made["0.a"] is not made["0.b"]
    assert materialize(made)["1.b"].tolist() == [3]


def test_several_wrong_groups_are_told_at_once() -> None:
    state = {f"{i}.{x}": torch.zeros(2 + i) for i in range(3) for x in "ab"}
    assert_refused(
        concat(["{i}.a", "{i}.b"], "{i}.x", dim=0, sizes=[2, 2]), state, SpecMismatch, "'1.x'", "'2.x'", "(4, 4)"
    )


@pytest.mark.parametrize("form", [lambda x: x, defer, specs])
def test_sizes_that_are_not_the_tensors_are_told_once_for_each_source(form: Any) -> None:
    state = form({f"{i}.qk": torch.ones(10, 2) for i in range(2)} | {"2.qk": torch.ones(12, 2)})
    with pytest.raises(SpecMismatch) as told:
        split("{i}.qk", ["{i}.q", "{i}.k"], dim=0, sizes=[4, 8])(state)
    text = "{!r} float32[10, 2]: dim 0 has size 10, but sizes=(4, 8) add up to 12."
    assert str(told.value) == f"split: {text.format('0.qk')} {text.format('1.qk')}"
    report = (split("{i}.qk", ["{i}.q", "{i}.k"], dim=0, sizes=[4, 8]) >> transpose("0.q")).check(state)
    assert [problem.names for problem in report.problems] == [("0.qk",), ("1.qk",)]
