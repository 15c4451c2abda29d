"""Aliases in the metadata of safetensors files."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd.data.errors import BadFile, NameConflict, SpecMismatch, UnknownName
from fdsd.data.spec import TensorSpec
from fdsd.storage.safetensors_ties import Ties, join_ties, read_ties, split_ties, write_ties

SPEC = TensorSpec((2,), torch.int8)


@given(st.lists(st.text(max_size=3), unique=True, min_size=1, max_size=9), st.data())
def test_ties_come_back_in_their_places(names: list[str], data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    aliases = {name: data.draw(st.sampled_from(owners)) for name in names if name not in owners}
    stored, ties = split_ties(dict.fromkeys(names, SPEC), aliases)
    found, rest = read_ties({"x": "y z", **write_ties(ties, stored)}, stored, "file")
    assert found.owners == aliases
    assert found.weave(stored) == names
    assert rest == {"x": "y z"}


def test_each_file_tells_of_its_own_tensors() -> None:
    ties = Ties({"c": "a", "d": "b"}, {"c": 2, "d": 3})
    parts = [(name, read_ties(write_ties(ties, [name]), {name: 0}, name)[0]) for name in ("a", "b")]
    assert join_ties(parts, {"a": 0, "b": 0}) == ties
    assert write_ties(ties, ["x"]) == {}


def test_plain_entries_from_a_missing_name_to_a_tensor_are_aliases() -> None:
    metadata = {"format": "pt", "head": "embed", "note": "nothing", "embed": "embed", "fdsd.source": "embed"}
    ties, rest = read_ties(metadata, {"embed": 0, "pt": 0}, "file")
    assert ties.owners == {"head": "embed"}
    assert set(rest) == {"format", "note", "embed", "fdsd.source"}


def test_a_plain_entry_for_a_tensor_of_another_file_is_no_alias() -> None:
    ties, _ = read_ties({"head": "embed"}, {"embed": 0}, "file")
    assert join_ties([("file", ties)], {"embed": 0, "head": 0}).owners == {}


@pytest.mark.parametrize(
    "entry, words",
    [
        ("{", "no JSON"),
        ("[]", "not an object"),
        ('{"x":"gone"}', "'x -> gone'"),
        ('{"embed":"embed"}', "'embed -> embed'"),
        ('{"x":["embed"]}', "does not fit its tensors"),
        ('{"x":"embed","x":"embed"}', "twice in one object: 'x'"),
    ],
)
def test_entries_of_ours_that_are_wrong_are_refused(entry: str, words: str) -> None:
    with pytest.raises(BadFile, match=f"fdsd.aliases.*file.*{words}"):
        read_ties({"fdsd.aliases": entry}, {"embed": 0}, "file")


def test_an_alias_in_two_files_is_refused() -> None:
    ties = Ties({"x": "a"})
    with pytest.raises(BadFile, match="'x in two'"):
        join_ties([("one", ties), ("two", ties)], {"a": 0})
    with pytest.raises(BadFile, match="'x in one'"):
        join_ties([("one", ties)], {"a": 0, "x": 0})


def test_aliases_must_fit_the_specs() -> None:
    with pytest.raises(UnknownName, match="'b -> gone'"):
        split_ties({"a": SPEC}, {"b": "gone"})
    with pytest.raises(NameConflict, match="'c -> b'"):
        split_ties({"a": SPEC, "b": SPEC}, {"b": "a", "c": "b"})
    with pytest.raises(SpecMismatch, match="'b'"):
        split_ties({"a": SPEC, "b": TensorSpec((3,), torch.int8)}, {"b": "a"})
