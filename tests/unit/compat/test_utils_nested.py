"""Nested state dicts: their leaves by path, names of paths, rebuilding, and two side by side."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd.compat._nested import leaves_of, mapped, named, pairs_of, type_fault
from fdsd.data.statedict import StateDict

KEYS = st.one_of(st.text("ab~/[]01.", max_size=4), st.integers(-2, 11), st.tuples(st.integers(0, 1)))
PATHS = st.lists(KEYS, max_size=4).map(tuple)
TREES = st.recursive(
    st.one_of(st.integers(), st.none(), st.text(max_size=2), st.binary(max_size=2), st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=3), st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


@given(PATHS, PATHS)
def test_different_paths_have_different_names(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    if (a, b) != ((), ("",)) and (b, a) != ((), ("",)):  # the root, and an empty key there: never both are leaves
        assert (named(a) == named(b)) == (a == b)


def test_flat_names_are_as_they_were() -> None:
    assert named(("layers.0.weight",)) == "layers.0.weight"
    assert named(("param_groups", 0, "betas", 1)) == "param_groups/[0]/betas/[1]"


@given(TREES)
def test_rebuilding_changes_nothing(tree: Any) -> None:
    before = copy.deepcopy(tree)
    assert repr(mapped(tree, lambda path, leaf: leaf)) == repr(tree) == repr(before)


@given(TREES)
def test_leaves_are_what_is_changed(tree: Any) -> None:
    seen: dict[Any, Any] = {}
    mapped(tree, seen.__setitem__)
    assert list(seen.items()) == list(leaves_of(tree).items())
    assert pairs_of(tree, copy.deepcopy(tree)).leaves == {path: (leaf, leaf) for path, leaf in seen.items()}
    assert not pairs_of(tree, tree).problems


def test_containers_become_plain() -> None:
    pair = namedtuple("pair", "x y")
    state = {"o": OrderedDict(b=1, a=2), "s": StateDict({"w": 3}), "p": pair(4, [5])}
    made = mapped(state, lambda path, leaf: leaf)
    assert repr(made) == "{'o': {'b': 1, 'a': 2}, 's': {'w': 3}, 'p': (4, [5])}"


def test_unknown_objects_are_copied_and_shared_ones_stay_shared() -> None:
    unknown = {1, 2}
    made = mapped({"a": unknown, "b": [unknown], "c": {3}}, lambda path, leaf: pytest.fail("is no leaf of ours"))
    assert made == {"a": {1, 2}, "b": [{1, 2}], "c": {3}}
    assert made["a"] is made["b"][0] is not unknown


def test_types_that_are_refused_are_all_named() -> None:
    good = {
        "t": torch.ones(1),
        "p": torch.nn.Parameter(torch.ones(1)),
        "n": [1, 2.0, "s", b"b", io.BytesIO(), None, True],
    }
    assert type_fault(leaves_of(good)) is None
    bad = {**good, "x": {1}, "y": [{"z": {2}}], "c": 1j}
    fault = type_fault(leaves_of(bad))
    assert isinstance(fault, ValueError)
    assert str(fault).startswith("Unexpected value type <class 'set'> at 'x', 'y/[0]/z'; <class 'complex'> at 'c'.")
    many = type_fault({(f"k{i}",): set() for i in range(13)})
    assert "'k9' and 3 more" in str(many)


def test_what_holds_itself() -> None:
    ring: list[Any] = []
    ring.append(ring)
    for walk in (leaves_of, lambda tree: mapped(tree, lambda path, leaf: leaf), lambda tree: pairs_of(tree, tree)):
        with pytest.raises(ValueError, match="holds itself"):
            walk({"a": ring})


@pytest.mark.parametrize(
    "a, b, told",
    [
        ({"x": 1}, {"y": 1}, "the top has the keys 'x' against 'y'"),
        ({"x": {}}, {"x": {"y": 1}}, "'x' has the keys none against 'y'"),
        ({"x": [1]}, {"x": (1, 2)}, "'x' has 1 entries against 2"),
        ({"x": [1]}, {"x": {0: 1}}, "'x' is a list against a dict"),
        ({"x": ({"y": 1},)}, {"x": [3]}, "'x/[0]' is a dict against a int"),
        ({"x": 1}, {"x": {}}, "'x' is a int against a dict"),
        ({1: 1}, {"1": 1}, "the top has the keys 1 against '1'"),
        ([1], 2, "the top is a list against a int"),
    ],
)
def test_different_structures_are_told(a: Any, b: Any, told: str) -> None:
    assert pairs_of(a, b).problems == [told]


def test_all_differences_are_told() -> None:
    found = pairs_of({"a": [1], "b": 2, "c": 3, "d": {"e": 4}}, {"a": 1, "b": [2], "c": 5, "d": {"f": 4}})
    assert len(found.problems) == 3
    assert found.leaves == {("c",): (3, 5)}
