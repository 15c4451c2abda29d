"""index_select, pad, crop and permute_rope: exact values and refusals."""

from __future__ import annotations

from operator import invert
from typing import Any

import pytest
import torch

from fdsd import Pipeline, crop, index_select, pad, permute_rope
from fdsd.errors import FdsdError, NotInvertible, SpecMismatch
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_laws, assert_round_trip, assert_same
from tests.helpers.refusing import assert_refused

M = torch.arange(6).reshape(2, 3)
STATE = {"m": M, "v": torch.tensor([5, 6, 7]), "s": torch.tensor(1.0), "e": torch.empty(2, 0)}


@pytest.mark.parametrize(
    ("p", "name", "expected"),
    [
        (index_select("v", [2, 0]), "v", [7, 5]),
        (index_select("v", [1, 1, 1]), "v", [6, 6, 6]),
        (index_select("v", []), "v", []),
        (index_select("v", torch.tensor([2, 1, 0])), "v", [7, 6, 5]),
        (index_select("v", range(2)), "v", [5, 6]),
        (index_select("m", [2, 0], dim=1), "m", [[2, 0], [5, 3]]),
        (index_select("m", [2, 0], dim=-1), "m", [[2, 0], [5, 3]]),
        (pad("v", 5), "v", [5, 6, 7, 0, 0]),
        (pad("v", 3), "v", [5, 6, 7]),
        (pad("m", 4, dim=1), "m", [[0, 1, 2, 0], [3, 4, 5, 0]]),
        (pad("m", 3, dim=-2), "m", [[0, 1, 2], [3, 4, 5], [0, 0, 0]]),
        (pad("e", 1, dim=1), "e", [[0], [0]]),
        (crop("v", 2), "v", [5, 6]),
        (crop("v", 0), "v", []),
        (crop("m", 1, dim=-1), "m", [[0], [3]]),
        (crop("v", 3), "v", [5, 6, 7]),
    ],
    ids=str,
)
def test_values(p: Pipeline, name: str, expected: list[Any]) -> None:
    assert p(STATE)[name].tolist() == expected
    assert p(STATE)[name].dtype == STATE[name].dtype
    assert_laws(p, STATE)


@pytest.mark.parametrize(
    ("p", "texts"),
    [
        (index_select("v", [0, 3]), ["'v'", "no index 3", "(3,)"]),
        (index_select("v", [-1]), ["no index -1"]),
        (index_select("m", [0], dim=2), ["'m'", "no dim 2"]),
        (index_select("s", [0]), ["'s'", "no dim 0"]),
        (pad("v", 2), ["size 3", "2", "crop()"]),
        (pad("v", 5, from_size=4), ["size 3", "from_size=4"]),
        (crop("v", 4), ["size 3", "4", "pad()"]),
        (crop("v", 1, from_size=4), ["from_size=4"]),
        (pad("s", 1), ["no dim 0"]),
    ],
    ids=str,
)
def test_refusals(p: Pipeline, texts: list[str]) -> None:
    assert_refused(p, STATE, SpecMismatch, *texts)


@pytest.mark.parametrize(
    "make",
    [
        lambda: index_select("v", [True, False]),
        lambda: index_select("v", [0.5]),  # type: ignore[list-item]
        lambda: pad("v", -1),
        lambda: crop("v", -1),
        lambda: pad("v", 2, from_size=-1),
        lambda: permute_rope("v", heads=0, to="pairs"),
        lambda: permute_rope("v", heads=1, to="half"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_never_fit(make: Any) -> None:
    with pytest.raises(SpecMismatch):
        make()


@pytest.mark.parametrize("index", [torch.tensor([[0, 1]]), torch.tensor([0.7]), torch.tensor([True, False])], ids=str)
def test_a_mask_or_fractions_are_no_indices(index: torch.Tensor) -> None:
    with pytest.raises(SpecMismatch):
        index_select("v", index)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint64, torch.float8_e5m2, torch.complex64])
def test_padding_is_zero_in_every_dtype(dtype: torch.dtype) -> None:
    state = {"v": torch.tensor([1, 1]).to(dtype)}
    made = pad("v", 4)(state)["v"]
    assert made.dtype == dtype and made.view(torch.uint8)[2 * dtype.itemsize :].tolist() == [0] * 2 * dtype.itemsize
    assert_laws(pad("v", 4), state)


def test_grades_and_inverses() -> None:
    assert ~index_select("v", [2, 0, 1], dim=1) == index_select("v", [1, 2, 0], dim=1)
    assert ~pad("v", 5, dim=1, from_size=3) == crop("v", 3, dim=1, from_size=5)
    assert ~crop("v", 3, from_size=5) == pad("v", 5, from_size=3)
    assert pad("v", 5, from_size=3).grade is Grade.EXACT
    assert crop("v", 3, from_size=5).grade is Grade.ONE_SIDED
    assert pad("v", 5).grade is crop("v", 3).grade is index_select("v", [0, 0]).grade is Grade.NONE
    for p, text in ((pad("v", 5), "from_size="), (crop("v", 1), "from_size="), (index_select("v", [1]), "permutation")):
        with pytest.raises(NotInvertible, match=text):
            invert(p)


def test_crop_comes_back_with_zeros() -> None:
    p = crop("v", 2).bind(STATE)
    assert (~p)(p(STATE))["v"].tolist() == [5, 6, 0]
    assert_round_trip(p, STATE)


def test_bind_makes_a_step_for_each_distinct_size() -> None:
    state = {"a": torch.arange(2), "b": torch.arange(3), "c": torch.arange(5, 7)}
    bound = pad("{_}", 4).bind(state)
    assert len(bound.steps) == 2 and bound.grade is Grade.EXACT
    assert_laws(pad("{_}", 4), state)


# -- rotary embeddings ---------------------------------------------------------------------------------------------


def to_hf(w: torch.Tensor, heads: int) -> torch.Tensor:
    """As transformers' convert_llama_weights_to_hf.py has it."""
    return w.view(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def to_meta(w: torch.Tensor, heads: int) -> torch.Tensor:
    return w.view(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


@pytest.mark.parametrize("heads", [1, 2, 4, 6])
@pytest.mark.parametrize("shape", [(24, 5), (24,), (24, 2, 3)])
def test_rope_is_the_rule_of_transformers(heads: int, shape: tuple[int, ...]) -> None:
    w = torch.arange(torch.Size(shape).numel()).reshape(shape)
    halves = permute_rope("q", heads=heads, to="halves")
    pairs = permute_rope("q", heads=heads, to="pairs")
    assert torch.equal(halves({"q": w})["q"], to_hf(w, heads))
    assert torch.equal(pairs({"q": w})["q"], to_meta(w, heads))
    assert ~halves == pairs and ~pairs == halves
    assert_laws(halves, {"q": w})


def test_rope_rows_by_hand() -> None:
    q = torch.arange(8)
    assert permute_rope("q", heads=1, to="halves")({"q": q})["q"].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert permute_rope("q", heads=2, to="halves")({"q": q})["q"].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert permute_rope("q", heads=1, to="pairs")({"q": q})["q"].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize(("rows", "heads"), [(8, 3), (6, 2), (4, 4), (5, 1)])
def test_rope_rows_that_do_not_divide(rows: int, heads: int) -> None:
    p = permute_rope("k", heads=heads, to="pairs")
    assert_refused(p, {"k": torch.zeros(rows, 2)}, SpecMismatch, "'k'", f"({rows}, 2)", f"{heads} heads", "keys")


def test_rope_of_no_dims() -> None:
    assert_refused(permute_rope("s", heads=1, to="pairs"), STATE, SpecMismatch, "()")


def test_an_order_of_the_first_indices_only() -> None:
    p = index_select("v", [1, 0])
    assert_same(p(STATE)["v"], torch.tensor([6, 5]))
    with pytest.raises(FdsdError):
        (~p.bind(STATE))(p(STATE))


class TestIndicesOfALongerDim:
    """A permutation of its own indices that leaves out some of the dim: known once the dim is."""

    P = index_select("v", [1, 0])

    def test_binding_grades_it_none_and_goes_on(self) -> None:
        bound = (self.P >> pad("v", 3)).bind(STATE)
        assert str(bound.steps[0].call_text()) == "index_select('v', [1, 0], from_size=3)"
        assert bound.grade is bound.steps[0].grade is Grade.NONE
        assert bound.steps[1].grade is Grade.EXACT
        assert bound == bound.bind(STATE)
        assert_same(bound(STATE), (self.P >> pad("v", 3))(STATE))
        with pytest.raises(NotInvertible, match="left out"):
            invert(bound)

    def test_of_its_own_size_it_stays_exact(self) -> None:
        state = {"v": torch.tensor([5, 6])}
        assert self.P.bind(state) == self.P
        assert_round_trip(self.P, state)
        assert_laws(index_select("v", [1, 0], from_size=2), state)

    def test_tensors_of_several_sizes_are_graded_apart(self) -> None:
        state = {"a": torch.tensor([5, 6]), "b": torch.tensor([7, 8, 9])}
        bound = index_select("{_}", [1, 0]).bind(state)
        assert sorted([step.grade is Grade.EXACT for step in bound.steps]) == [False, True]
        assert_same(bound(state), {"a": torch.tensor([6, 5]), "b": torch.tensor([8, 7])})

    def test_all_laws(self) -> None:
        assert_laws(self.P, STATE)
        assert_laws(index_select("v", [0, 1], from_size=3), STATE)

    def test_another_size_is_refused(self) -> None:
        assert_refused(index_select("v", [1, 0], from_size=2), STATE, SpecMismatch, "size 3", "from_size=2")
