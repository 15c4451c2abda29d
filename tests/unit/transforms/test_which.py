"""How verbs are told which tensors are meant: one pattern, several, functions; and none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fdsd import (
    Pipeline,
    StateDict,
    Template,
    add_scalar,
    cast,
    crop,
    drop,
    filter_frozen,
    index_select,
    map_tensors,
    pad,
    permute,
    permute_rope,
    reshape,
    select,
    transpose,
    untie,
)
from fdsd.data.spec import TensorSpec
from fdsd.errors import FdsdError, UnknownName
from fdsd.testing import assert_laws, assert_same
from tests.helpers.refusing import assert_refused

STATE = StateDict(
    {
        "layers.0.q": torch.arange(4.0).reshape(2, 2),
        "layers.1.q": torch.arange(4.0, 8.0).reshape(2, 2),
        "layers.0.b": torch.tensor([8, 9]),
        "head": torch.tensor([[10.0, 11.0], [12.0, 13.0]], dtype=torch.float64),
        "_extra_state": {"version": 3},
    }
)


def is_square(name: str, spec: TensorSpec) -> bool:
    return spec.ndim == 2 and spec.shape[0] == spec.shape[1]


def is_query(name: str, spec: TensorSpec) -> bool:
    return name.endswith(".q")


@pytest.mark.parametrize(
    ("which", "chosen"),
    [
        (["head"], ["head"]),
        (["layers.{_}.q"], ["layers.0.q", "layers.1.q"]),
        (["layers.{i}.q"], ["layers.0.q", "layers.1.q"]),
        (["layers.{_...}"], ["layers.0.q", "layers.1.q", "layers.0.b"]),
        (["{_...}"], list(STATE)),
        (["head", "layers.{_}.b"], ["layers.0.b", "head"]),
        ([["head", "layers.{_}.b"]], ["layers.0.b", "head"]),
        ([("head",), {"layers.0.b"}], ["layers.0.b", "head"]),
        ([Template("head")], ["head"]),
        ([Template.selector("{_}")], ["head", "_extra_state"]),
        ([is_square], ["layers.0.q", "layers.1.q", "head"]),
        ([is_query, "head"], ["layers.0.q", "layers.1.q", "head"]),
        (["head", "none.{_}?"], ["head"]),
        (["head", "head"], ["head"]),
        ([[]], []),
        (["_extra_state"], ["_extra_state"]),
        ([lambda name, spec: False], []),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),
)
def test_select_and_drop(which: list[Any], chosen: list[str]) -> None:
    assert list(select(*which)(STATE)) == chosen
    assert list(drop(*which)(STATE)) == [name for name in STATE if name not in chosen]
    assert all(select(*which)(STATE)[name] is STATE[name] for name in chosen)


@pytest.mark.parametrize("verb", [select, drop, untie])
def test_a_pattern_that_chooses_nothing_is_an_error(verb: Any) -> None:
    assert_refused(verb("head", "layer.0.q"), STATE, UnknownName, "'layer.0.q'", "'layers.0.q'", "'?'")
    assert_refused(verb("x", "y"), STATE, UnknownName, "'x'", "'y'")


@pytest.mark.parametrize(
    "make",
    [
        transpose,
        lambda which: permute(which, (1, 0)),
        lambda which: reshape(which, (-1,)),
        lambda which: index_select(which, [1, 0]),
        lambda which: pad(which, 3),
        lambda which: crop(which, 1),
        lambda which: permute_rope(which, heads=1, to="pairs"),
        lambda which: cast(torch.float64, which),
        lambda which: add_scalar(which, 1.0),
        lambda which: map_tensors(torch.neg, which),
    ],
)
class TestEveryVerbOnEachTensor:
    def test_patterns_collections_and_functions_mean_the_same(self, make: Any) -> None:
        wanted = make("layers.{_}.q")(STATE)
        for which in (["layers.0.q", "layers.1.q"], is_query, ("layers.{i}.q", "none?"), Template("layers.{i}.q")):
            assert_same(make(which)(STATE), wanted, order=True)
        assert [n for n in STATE if wanted[n] is not STATE[n]] == ["layers.0.q", "layers.1.q"]

    @pytest.mark.parametrize("nothing", [[], (), set(), "none?", lambda name, spec: False])
    def test_choosing_nothing_changes_nothing(self, make: Any, nothing: Any) -> None:
        made = make(nothing)(STATE)
        assert list(made) == list(STATE)
        assert all(made[name] is STATE[name] for name in STATE)

    def test_a_pattern_without_match_is_an_error(self, make: Any) -> None:
        assert_refused(make("layers.{_}.w"), STATE, UnknownName, "'layers.{_}.w'")

    def test_an_object_is_refused_by_name_and_functions_pass_it_over(self, make: Any) -> None:
        with pytest.raises(FdsdError, match="_extra_state"):
            make("_extra_state")(STATE)
        assert make(lambda name, spec: "extra" in name)(STATE)["_extra_state"] is STATE["_extra_state"]

    def test_laws(self, make: Any) -> None:
        assert_laws(make(["layers.{_}.q"]), STATE)
        assert_laws(make([]), STATE)
        assert_laws(make(is_query), STATE)


@pytest.mark.parametrize("bad", [3, None, 1.5])
def test_what_is_no_choice_is_refused_when_it_is_given(bad: Any) -> None:
    for make in (lambda: select(bad), lambda: transpose(bad), lambda: cast(torch.float32, bad)):
        with pytest.raises(FdsdError, match=type(bad).__name__):
            make()


def test_functions_get_names_and_specs_and_no_tensor() -> None:
    seen: list[Any] = []

    def look(name: str, spec: TensorSpec) -> bool:
        seen.append((name, spec))
        return True

    select(look)(STATE)
    assert [name for name, _ in seen] == [name for name in STATE if name != "_extra_state"]
    assert all(type(spec) is TensorSpec for _, spec in seen)


def test_filter_frozen_reads_patterns_and_functions_too() -> None:
    assert list(filter_frozen(["layers.{_...}"])(STATE)) == ["head", "_extra_state"]
    assert list(filter_frozen([])(STATE)) == list(STATE)


def test_equal_choices_are_equal_pipelines() -> None:
    assert select("a", "b") == select(["a", "b"]) == select(("a",), "b")
    assert select("a") != select("b")
    assert transpose("a") == transpose(["a"]) == transpose(Template("a"))
    assert hash(select("a", "b")) == hash(select(["a", "b"]))
    ps: list[Pipeline] = [transpose("a"), transpose([]), cast(torch.float32), cast(torch.float32, [])]
    assert len({repr(p) for p in ps}) == len(set(ps)) == 4
