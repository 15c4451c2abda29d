"""Flattening to dotted names and back: exact with the mapping of ``flatten``, and as torch does with any other."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch.distributed._state_dict_utils as peer
from hypothesis import given
from hypothesis import strategies as st

from fdsd.compat._state_dict_utils import (
    _flatten_state_dict,
    _set_element,
    _traverse_state_dict,
    _unflatten_state_dict,
)
from fdsd.errors import FdsdError, NameConflict

TEXTS = st.text("ab[]~/ ", min_size=1, max_size=3)
LEAVES = st.one_of(st.integers(), st.none(), st.text(max_size=2))


def nested(keys: st.SearchStrategy[Any], *containers: type) -> st.SearchStrategy[dict[Any, Any]]:
    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.lists(inner, max_size=3)
        made = [st.dictionaries(keys, inner, max_size=3)]
        made += [lists] if list in containers else []
        made += [lists.map(tuple)] if tuple in containers else []
        return st.one_of(*made)

    return st.dictionaries(keys, st.recursive(LEAVES, grow, max_leaves=12), max_size=4)


def shown(value: Any) -> Any:
    """Give a text that tells types, keys and order apart."""
    return repr(value)


@given(nested(st.one_of(TEXTS, st.integers(0, 3), st.booleans().map(lambda b: ("k", b))), list, tuple))
def test_unflatten_undoes_flatten(state: dict[Any, Any]) -> None:
    """Tuples, keys of any kind, empty containers and their order: all comes back."""
    before = copy.deepcopy(state)
    try:
        flat, mapping = _flatten_state_dict(state)
    except NameConflict:  # 1 and "1" cannot both be there
        return
    assert shown(_unflatten_state_dict(flat, mapping)) == shown(state) == shown(before)
    again = pickle.loads(pickle.dumps(mapping))
    assert shown(_unflatten_state_dict(flat, again)) == shown(state)
    assert shown(_unflatten_state_dict(flat, copy.deepcopy(mapping))) == shown(state)


@given(nested(TEXTS, list, tuple))
def test_flat_names_and_paths_are_those_of_torch(state: dict[str, Any]) -> None:
    assert _flatten_state_dict(state) == peer._flatten_state_dict(state)
    flat, mapping = peer._flatten_state_dict(state)
    assert list(_flatten_state_dict(state)[0]) == list(flat)
    plain = dict(mapping)
    assert shown(_unflatten_state_dict(flat, plain)) == shown(peer._unflatten_state_dict(flat, plain))


def test_what_comes_back_in_order() -> None:
    state = {"state": {}, "a": {"betas": (0.9, 0.99), "none": [], 7: ()}, "b": [[], 1, ({},)], "c": OrderedDict(x=1)}
    flat, mapping = _flatten_state_dict(state)
    assert flat == {"a.betas.0": 0.9, "a.betas.1": 0.99, "b.1": 1, "c.x": 1}
    back = _unflatten_state_dict(flat, mapping)
    assert shown(back) == shown({**state, "c": {"x": 1}})


def test_a_part_comes_back_without_the_rest() -> None:
    flat, mapping = _flatten_state_dict({"a": {"x": 1, "y": 2}, "b": (3, 4), "e": {}})
    assert _unflatten_state_dict({"a.y": 5, "b.1": 6}, mapping) == {"a": {"y": 5}, "b": (None, 6), "e": {}}
    assert flat == {"a.x": 1, "a.y": 2, "b.0": 3, "b.1": 4}


def test_names_that_meet_are_all_named() -> None:
    state = {"a": {"b": 1, "c": 2}, "a.b": 3, "a.c": 4}
    with pytest.raises(ValueError, match=r"duplicated flatten key a\.b.*'a.b', 'a.c'"):
        _flatten_state_dict(state)
    with pytest.raises(NameConflict, match=r"duplicated flatten key s\.1"):
        _flatten_state_dict({"s": {1: "a", "1": "b"}})


def test_a_mapping_that_lacks_names() -> None:
    with pytest.raises(KeyError) as caught:
        _unflatten_state_dict({"a": 1, "b": 2, "c": 3}, {"a": ("a",)})
    assert isinstance(caught.value, FdsdError)
    assert "'b', 'c'" in str(caught.value)


@pytest.mark.parametrize(
    "paths",
    [
        {"x": ("a",), "y": ("a", "b")},
        {"x": ("a", 0), "y": ("a", "b")},
        {"x": ("a", "b"), "y": ("a", 0)},
        {"x": ("a", -1)},
    ],
)
def test_paths_that_do_not_go_together(paths: dict[str, Any]) -> None:
    with pytest.raises(NameConflict, match="does not go together"):
        _unflatten_state_dict(dict.fromkeys(paths, 1), paths)


def test_no_state_dict() -> None:
    with pytest.raises(TypeError, match="list is no state dict"):
        _flatten_state_dict([1])  # type: ignore[arg-type]


def test_visiting_and_setting() -> None:
    seen: list[Any] = []
    _traverse_state_dict({"a": [1, {2: 3}], "b": ()}, lambda path, leaf: seen.append((path, leaf)))
    assert seen == [(("a", 0), 1), (("a", 1, "2"), 3)]
    root: dict[str, Any] = {"a": {"x": 1}}
    for path, value in [(("a", "y"), 2), (("b", 1, "z"), 3), (("b", 0), 4), (("c",), 5)]:
        _set_element(root, path, value)
    theirs: dict[str, Any] = {"a": {"x": 1}}
    for path, value in [(("a", "y"), 2), (("b", 1, "z"), 3), (("b", 0), 4), (("c",), 5)]:
        peer._set_element(theirs, path, value)
    assert root == theirs == {"a": {"x": 1, "y": 2}, "b": [4, {"z": 3}], "c": 5}
