"""transpose, permute and reshape: exact values, every spelling of a dim, and refusals."""

from __future__ import annotations

from operator import invert
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd import Pipeline, defer, materialize, permute, reshape, transpose
from fdsd.errors import NotInvertible, SpecMismatch
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_laws, assert_same
from fdsd.transforms.dims import reshape_ops
from tests.helpers.refusing import assert_refused

X = torch.arange(24).reshape(2, 3, 4)
STATE = {
    "x": X,
    "m": torch.arange(6.0).reshape(2, 3),
    "v": torch.arange(3),
    "s": torch.tensor(7),
    "e": torch.empty(0, 3),
}


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (transpose("x"), X.transpose(-2, -1)),
        (transpose("x", 0, 1), X.transpose(0, 1)),
        (transpose("x", -1, 0), X.transpose(-1, 0)),
        (transpose("x", 1, 1), X),
        (permute("x", (2, 0, 1)), X.permute(2, 0, 1)),
        (permute("x", [-1, 0, -2]), X.permute(2, 0, 1)),
        (permute("x", (0, 1, 2)), X),
        (reshape("x", (6, 4)), X.reshape(6, 4)),
        (reshape("x", (4, 6)), X.reshape(4, 6)),
        (reshape("x", (-1,)), X.reshape(-1)),
        (reshape("x", (2, 1, -1, 2, 1)), X.reshape(2, 1, 6, 2, 1)),
        (reshape("x", (24, 1)), X.reshape(24, 1)),
        (reshape("x", X.shape), X),
        (reshape("x", (6, 4), from_shape=(2, 3, 4)), X.reshape(6, 4)),
        (reshape("x", torch.Size([3, 8])), X.reshape(3, 8)),
    ],
    ids=str,
)
def test_values(p: Pipeline, expected: torch.Tensor) -> None:
    for form in (STATE, defer(STATE)):
        assert_same(materialize(p(form))["x"], expected)
    assert_laws(p, STATE)


def test_zero_dims_and_empty_tensors() -> None:
    for p in (
        permute("s", ()),
        reshape("s", ()),
        reshape("s", (1, 1)),
        reshape("e", (3, 0)),
        reshape("e", (0,)),
        transpose("e"),
        reshape("e", (2, 0, 5)),
    ):
        assert_laws(p, STATE)
    assert reshape("s", (1, 1))(STATE)["s"].tolist() == [[7]]
    assert reshape("v", (3, 1, 1))(STATE)["v"].tolist() == [[[0]], [[1]], [[2]]]


def test_a_square_is_transposed_when_it_is_asked_for() -> None:
    w = torch.arange(9).reshape(3, 3)
    assert torch.equal(transpose("w")({"w": w})["w"], w.t())
    assert torch.equal(transpose("c", 0, 2)({"c": torch.arange(8).reshape(2, 2, 2)})["c"][1, 0], torch.tensor([1, 5]))


@pytest.mark.parametrize(
    ("p", "texts"),
    [
        (transpose("v"), ["'v'", "(3,)", "no dim -2"]),
        (transpose("m", 0, 2), ["'m'", "no dim 2", "(2, 3)"]),
        (transpose(["s", "v"]), ["'s'", "'v'"]),
        (permute("m", (0, 1, 2)), ["'m'", "(2, 3)"]),
        (permute("m", (0,)), ["(2, 3)"]),
        (reshape("m", (4, 2)), ["6 elements", "(4, 2)"]),
        (reshape("m", (-1, 4)), ["(-1, 4)"]),
        (reshape("e", (0, -1)), ["(0, -1)"]),
        (reshape("m", (6,), from_shape=(3, 2)), ["(2, 3)", "(3, 2)"]),
    ],
    ids=str,
)
def test_refusals(p: Pipeline, texts: list[str]) -> None:
    assert_refused(p, STATE, SpecMismatch, *texts)


@pytest.mark.parametrize(
    "make",
    [
        lambda: permute("m", (0, 0)),
        lambda: permute("m", (0, 2)),
        lambda: permute("m", (1,)),
        lambda: reshape("m", (-1, -1)),
        lambda: reshape("m", (-2, 3)),
    ],
)
def test_arguments_that_never_fit(make: Any) -> None:
    with pytest.raises(SpecMismatch):
        make()


def test_inverses() -> None:
    assert ~transpose("x", 0, 2) == transpose("x", 0, 2)
    assert ~permute("x", (2, 0, 1)) == permute("x", (1, 2, 0))
    assert ~reshape("x", (6, 4), from_shape=(2, 3, 4)) == reshape("x", (2, 3, 4), from_shape=(6, 4))
    assert ~reshape("x", (6, -1), from_shape=(2, 3, 4)) == reshape("x", (2, 3, 4), from_shape=(6, 4))
    assert reshape("x", (6, 4)).grade is Grade.NONE
    with pytest.raises(NotInvertible, match=r"from_shape=.*bind"):
        invert(reshape("x", (6, 4)))


def test_bind_makes_a_step_for_each_distinct_shape() -> None:
    state = {
        "a{0}?": torch.arange(6).reshape(2, 3),
        "b": torch.arange(6).reshape(3, 2),
        "c": torch.arange(6.0).reshape(2, 3),
    }
    bound = reshape("{_}", (-1,)).bind(state)
    assert bound.grade is Grade.EXACT and len(bound.steps) == 2
    assert_laws(reshape("{_}", (-1,)), state)


SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=4)


@given(SIZES, st.randoms(use_true_random=False))
def test_reshape_is_torchs_reshape_from_any_shape_to_any(sizes: list[int], random: Any) -> None:
    x = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    pieces = [p for size in sizes for p in {4: [2, 2], 6: [2, 3]}.get(size, [size])]
    random.shuffle(pieces)
    target: list[int] = []
    while pieces:
        take = random.randint(1, len(pieces))
        target.append(torch.Size(pieces[:take]).numel())
        pieces = pieces[take:]
    made = reshape("x", target)({"x": x.transpose(0, -1) if len(sizes) > 1 else x})["x"]
    expected = (x.transpose(0, -1) if len(sizes) > 1 else x).reshape(target)
    assert torch.equal(made, expected)
    lazy = materialize(reshape("x", target)(defer({"x": x})))["x"]
    assert torch.equal(lazy, x.reshape(target))


def test_reshape_leaves_dims_that_stay_alone() -> None:
    assert list(reshape_ops((5, 7), (5, 7))) == []
    assert len(list(reshape_ops((5, 6, 7), (5, 2, 3, 7)))) == 1
