"""Meshes: what they accept, and what they refuse."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from fdsd.data.errors import BadFile, SpecMismatch
from fdsd.layout import Mesh


@pytest.mark.parametrize(
    "axes",
    [{"dp": 2, "tp": 3}, [("dp", 2), ("tp", 3)], (("dp", 2), ["tp", 3])],
    ids=["mapping", "pairs", "lists"],
)
def test_spellings_of_axes(axes: Any) -> None:
    mesh = Mesh(axes)
    assert mesh == Mesh({"dp": 2, "tp": 3})
    assert (mesh.names, mesh.sizes, mesh.num_axes, mesh.size) == (("dp", "tp"), (2, 3), 2, 6)
    assert mesh.ranks == (0, 1, 2, 3, 4, 5)


def test_the_order_of_axes_counts() -> None:
    assert Mesh({"dp": 2, "tp": 3}) != Mesh({"tp": 3, "dp": 2})


def test_nested_ranks() -> None:
    assert Mesh({"dp": 2, "tp": 2}, [[9, 1], [4, 0]]) == Mesh({"dp": 2, "tp": 2}, (9, 1, 4, 0))
    assert 4 in Mesh({"dp": 2, "tp": 2}, [[9, 1], [4, 0]])
    assert 2 not in Mesh({"dp": 2, "tp": 2}, [[9, 1], [4, 0]])


def test_given_default_ranks_are_the_default() -> None:
    assert Mesh({"dp": 3}, [0, 1, 2]) == Mesh({"dp": 3})
    assert repr(Mesh({"dp": 3}, [0, 1, 2])) == "Mesh({'dp': 3})"


def test_no_axes_are_one_rank() -> None:
    mesh = Mesh({}, [7])
    assert list(mesh.coordinates()) == [()]
    assert (mesh.rank_of(()), mesh.coordinate_of(7), mesh.size) == (7, (), 1)
    assert Mesh.from_json(mesh.to_json()) == mesh


@pytest.mark.parametrize("at", [4, (1, 1), [1, 1], {"tp": 1, "dp": 1}], ids=str)
def test_places(at: Any) -> None:
    assert Mesh({"dp": 2, "tp": 3}).coordinate_at(at) == (1, 1)


def test_meshes_pickle_with_a_fresh_hash() -> None:
    mesh = Mesh({"dp": 2}, [3, 1])
    hash(mesh)
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh
    assert hash(again) == hash(mesh)
    assert again.rank_of((0,)) == 3


@pytest.mark.parametrize(
    "axes, ranks, told",
    [
        ({"dp": 0}, None, r"at least 1; these are not: \('dp', 0\)"),
        ({"dp": True}, None, r"these are not: \('dp', True\)"),
        ({"dp": 1.0}, None, "whole number"),
        ({"": 2}, None, "names that are not empty"),
        ([("dp", 2), ("dp", 3)], None, "named twice: 'dp'"),
        ([3], None, "a name and a size"),
        (2, None, r"a mapping of names to sizes, like \{'dp': 2\}, not 2\."),
        ("dp", None, "a mapping of names to sizes.*not 'dp'"),
        ({"dp": 1}, 0, "a list of whole numbers, one for each coordinate, not 0"),
        ({"dp": 1}, "0", "a list of whole numbers.*not '0'"),
        ({"dp": 2}, [0], "2 coordinates, and there are 1 rank"),
        ({"dp": 2}, [0, 0], "two coordinates: 0"),
        ({"dp": 2}, [0, -1], "whole numbers from 0 on; these are not: -1"),
        ({"dp": 2}, [0, "1"], "these are not: '1'"),
    ],
)
def test_what_is_no_mesh(axes: Any, ranks: Any, told: str) -> None:
    with pytest.raises(SpecMismatch, match=told):
        Mesh(axes, ranks)


@pytest.mark.parametrize(
    "at, told",
    [
        ((0,), "is no coordinate"),
        ("ab", "is no coordinate"),
        ((0, 3), "index 3 is not in the axis 'tp' of size 3"),
        ((-1, 0), "index -1 is not in the axis 'dp'"),
        ((0, 1.0), "index 1.0"),
        ({"dp": 0}, "names the axes 'dp', 'tp'"),
    ],
)
def test_what_is_no_coordinate(at: Any, told: str) -> None:
    with pytest.raises(SpecMismatch, match=told):
        Mesh({"dp": 2, "tp": 3}).rank_of(at)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"axes": 3}', '{"axes": [["dp"]]}', '{"axes": [["dp", 2]], "ranks": 3}',
     '{"axes": [["dp", 0]]}', '{"axes": [3]}', '{"axes": [["dp", 2]], "more": 1}'],
)  # fmt: skip
def test_what_is_no_text_of_a_mesh(text: str) -> None:
    with pytest.raises(BadFile):
        Mesh.from_json(text)
