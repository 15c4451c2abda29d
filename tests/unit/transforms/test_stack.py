"""stack and unstack: the index is the index; holes, strays and ragged sets are errors that name them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd import Pipeline, StateDict, stack, unstack
from fdsd.errors import BadPattern, FdsdError, IncompleteGroup, NameConflict, SpecMismatch, UnknownName
from fdsd.pipeline.step import Grade
from fdsd.testing import assert_laws, assert_round_trip, assert_same
from tests.helpers.refusing import assert_refused


def experts(*indices: int, layer: str = "", shape: tuple[int, ...] = (2,)) -> dict[str, torch.Tensor]:
    return {f"{layer}e.{x}.w": torch.full(shape, x) for x in indices}


def test_by_index_not_by_order() -> None:
    state = StateDict({"a": torch.tensor(0), **experts(2, 0, 10, 1, *range(3, 10)), "z": torch.tensor(1)})
    made = stack("e.{x}.w", "e.w")(state)
    assert list(made) == ["a", "e.w", "z"]
    assert made["e.w"][:, 0].tolist() == list(range(11))
    assert_laws(stack("e.{x}.w", "e.w"), state)


@pytest.mark.parametrize(
    ("dim", "shape"), [(0, (4, 2, 3)), (1, (2, 4, 3)), (2, (2, 3, 4)), (-1, (2, 3, 4)), (-3, (4, 2, 3))]
)
def test_where_the_new_dim_stands(dim: int, shape: tuple[int, ...]) -> None:
    state = experts(0, 1, 2, 3, shape=(2, 3))
    p = stack("e.{x}.w", "e.w", dim=dim)
    assert p(state)["e.w"].shape == shape
    assert p(state)["e.w"].movedim(dim, 0)[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert_laws(p, state)
    assert ~p == unstack("e.w", "e.{x}.w", dim=dim)


def test_the_other_holes_make_groups() -> None:
    state = {**experts(0, 1, layer="0."), **experts(1, 0, layer="7.")}
    made = stack("{l}.e.{x}.w", "{l}.e.w", index="x", num=2)(state)
    assert {name: leaf[:, 0].tolist() for name, leaf in made.items()} == {"0.e.w": [0, 1], "7.e.w": [0, 1]}


def test_the_index_may_be_a_suffix_or_shifted() -> None:
    state = {"fc.weight0": torch.tensor(5), "fc.weight1": torch.tensor(6)}
    assert stack("fc.weight{x}", "fc.weight")(state)["fc.weight"].tolist() == [5, 6]
    assert stack("e.{x+8}", "e")({"e.8": torch.tensor(1), "e.9": torch.tensor(2)})["e"].tolist() == [1, 2]


def test_zero_dims_and_empty_tensors() -> None:
    assert_laws(stack("e.{x}", "e"), {"e.0": torch.tensor(1.5), "e.1": torch.tensor(2.5)})
    assert_laws(stack("e.{x}.w", "e.w", dim=1), experts(0, 1, shape=(0,)))
    assert_laws(unstack("e", "e.{x}"), {"e": torch.empty(3, 0)})
    assert_laws(stack("e.{x}.w", "e.w"), experts(0))


@pytest.mark.parametrize(
    ("state", "texts"),
    [
        (experts(0, 2), ["index x", "1"]),
        (experts(1, 2), ["0"]),
        ({**experts(0, 1, 2, layer="0."), **experts(0, 2, layer="1.")}, ["'1.e.w'", "1"]),
        ({**experts(0, 1, layer="0."), **experts(0, 1, 9, layer="1.")}, ["'1.e.w'", "9", "stray"]),
        ({**experts(0, 1, layer="0."), **experts(0, layer="1.")}, ["'1.e.w'", "lacks 1"]),
    ],
    ids=str,
)
def test_holes_strays_and_ragged_sets(state: dict[str, torch.Tensor], texts: list[str]) -> None:
    has_layers = "e.0.w" not in state and "e.1.w" not in state
    p = stack("{l}.e.{x}.w", "{l}.e.w") if has_layers else stack("e.{x}.w", "e.w")
    assert_refused(p, state, IncompleteGroup, *texts)


def test_all_holes_are_listed_at_most_ten() -> None:
    with pytest.raises(IncompleteGroup, match=r"lacks .* and 5 more"):
        stack("e.{x}.w", "e.w", num=20)(experts(0, 1, 2, 3, 4))


@pytest.mark.parametrize("num", [1, 3])
def test_num_must_be_met(num: int) -> None:
    assert_refused(stack("e.{x}.w", "e.w", num=num), experts(0, 1), IncompleteGroup, "'e.w'")


def test_leading_zeros_are_refused() -> None:
    state = {"e.00.w": torch.ones(1), "e.01.w": torch.ones(1)}
    assert_refused(stack("e.{x}.w", "e.w"), state, FdsdError, "00")


def test_shapes_and_dtypes_must_agree() -> None:
    state = {**experts(0, 1), "e.2.w": torch.ones(3, dtype=torch.int64)}
    assert_refused(stack("e.{x}.w", "e.w"), state, SpecMismatch, "'e.w'", "(2,)", "(3,)")
    mixed = {"e.0.w": torch.ones(2), "e.1.w": torch.ones(2, dtype=torch.float16)}
    assert_refused(stack("e.{x}.w", "e.w"), mixed, SpecMismatch, "float16", "float32", "cast()")


def test_dims_that_are_not_there() -> None:
    assert_refused(stack("e.{x}.w", "e.w", dim=2), experts(0, 1), SpecMismatch, "no dim 2")
    assert_refused(unstack("e.0.w", "f.{x}", dim=1), experts(0), FdsdError, "no dim 1")
    assert_refused(unstack("s", "s.{x}"), {"s": torch.tensor(1)}, FdsdError, "no dim 0")


def test_collisions() -> None:
    assert_refused(stack("e.{x}.w", "a"), {**experts(0, 1), "a": torch.ones(1)}, NameConflict, "'a'")
    assert_refused(unstack("e", "e.{x}"), {"e": torch.ones(2), "e.1": torch.ones(1)}, NameConflict, "'e.1'")


def test_nothing_to_stack() -> None:
    assert_refused(stack("e.{x}.w", "e.w"), {"a": torch.ones(1)}, UnknownName, "'e.{x}.w'")
    state = StateDict({"a": torch.ones(1)})
    assert_same(stack("e.{x}.w", "e.w?")(state), state)
    assert_same(unstack("e.w?", "e.{x}.w")(state), state)
    assert ~stack("e.{x}.w", "e.w?") == unstack("e.w?", "e.{x}.w")


def test_num_of_unstack_is_checked() -> None:
    state = {"e": torch.arange(3)}
    assert list(unstack("e", "e.{x}", num=3)(state)) == ["e.0", "e.1", "e.2"]
    assert_refused(unstack("e", "e.{x}", num=2), state, FdsdError, "3", "2")


@pytest.mark.parametrize(
    "make",
    [
        lambda: stack("e.{x}.{y}", "e"),
        lambda: stack("e", "e"),
        lambda: stack("e.{x}", "e.{y}"),
        lambda: stack("e.{x}", "e", index="y"),
        lambda: stack("e.{x}?", "e"),
        lambda: stack("e.{x...}", "e"),
        lambda: stack("e.{_}", "e"),
        lambda: unstack("e", "e"),
        lambda: unstack("e", "e.{x}?"),
    ],
)
def test_patterns_that_do_not_fit(make: Any) -> None:
    with pytest.raises(BadPattern):
        make()


def test_both_are_exact_and_bind_writes_num() -> None:
    p = stack("e.{x}.w", "e.w")
    assert p.grade is (~p).grade is Grade.EXACT
    assert p.bind(experts(0, 1)) == stack("e.{x}.w", "e.w", num=2)
    assert repr(stack("e.{x}.w", "e.w", index="x", dim=1, num=2)) == (
        "stack('e.{x}.w', 'e.w', index='x', dim=1, num=2)"
    )


def test_tensors_of_different_sizes_come_back() -> None:
    """Unstacking gives ragged index sets, which stack refuses unless the steps are told apart."""
    state = {"0.w": torch.arange(2), "1.w": torch.arange(5, 8)}
    p: Pipeline = unstack("{l}.w", "{l}.{e}.w")
    assert list(p(state)) == ["0.0.w", "0.1.w", "1.0.w", "1.1.w", "1.2.w"]
    assert_round_trip(p, state)


@pytest.mark.parametrize("beside", ["m.down.0.w", "m.down.00.w", "m.other.7.w", "m.down.x.w"])
@pytest.mark.parametrize("patterns", [("m.{x|gate|up}.w", "m.{x}.{i}.w"), ("m.{x}.w", "m.{x|gate|up}.{i}.w")])
def test_names_that_the_words_exclude_are_no_business_of_the_inverse(patterns: tuple[str, str], beside: str) -> None:
    state = {"m.gate.w": torch.tensor([[1], [2]]), "m.up.w": torch.tensor([[3], [4]]), beside: torch.tensor(5)}
    assert_round_trip(unstack(*patterns, index="i"), state)


@pytest.mark.parametrize("name", ["e.02", "e.00", "e.\u0663"])
def test_indices_written_in_another_way_are_named(name: str) -> None:
    with pytest.raises(IncompleteGroup, match="write indices without leading zeros"):
        stack("e.{x}", "e")({"e.0": torch.ones(1), name: torch.ones(1)})


def test_indices_out_of_the_range_are_no_business_of_the_stack() -> None:
    made = stack("e.{x:0..1}", "e")({"e.0": torch.tensor(1), "e.1": torch.tensor(2), "e.7": torch.tensor(3)})
    assert list(made) == ["e", "e.7"]
