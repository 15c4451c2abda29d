"""Opening and saving torch files: mapped, by key, old ones too; views, ties and other objects as they were."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fdsd
from fdsd.data.errors import BadFile, DestinationExists, SpecMismatch, UnknownName, UnsafeFile, Unsupported
from fdsd.data.ties import ties
from tests.helpers.tensors import LAYOUTS, NUMERIC, has_layout, lay_out, patterns, plain, same_bytes

from .conftest import MIXED, assert_file_holds, assert_same_state

OBJECTS: dict[str, Any] = {"epoch": 3, "note": "caf\u00e9", "none": None, "nested": {"lr": [0.1, 0.2], "step": (1, 2)}}


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.tuples(st.sampled_from(NUMERIC), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
        max_size=6,
    ),
    st.booleans(),
)
@settings(max_examples=50)
def test_any_state_comes_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, tuple[torch.dtype, tuple[int, ...]]], is_lazy: bool
) -> None:
    path = tmp_path_factory.mktemp("torch") / "x.pt"
    state = {name: patterns(shape, dtype, i) for i, (name, (dtype, shape)) in enumerate(drawn.items())}
    fdsd.save(fdsd.defer(state) if is_lazy else state, path)
    assert_file_holds(path, state)
    loaded = torch.load(path, weights_only=True)
    assert list(loaded) == list(state) and all(same_bytes(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_suffixes(tmp_path: Path, suffix: str) -> None:
    fdsd.save({**MIXED, **OBJECTS}, tmp_path / f"new/x{suffix}")
    assert_file_holds(tmp_path / f"new/x{suffix}", {**MIXED, **OBJECTS})
    with (tmp_path / f"new/x{suffix}").open("rb") as file:
        assert file.read(2) == b"PK"


def test_open_maps_what_torch_saved(tmp_path: Path) -> None:
    torch.save(MIXED, tmp_path / "x.pt")
    assert_file_holds(tmp_path / "x.pt", MIXED)
    torch.save(MIXED, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert_file_holds(tmp_path / "old.pt", MIXED)
    fdsd.save(fdsd.open(tmp_path / "old.pt"), tmp_path / "x.safetensors")
    assert_file_holds(tmp_path / "x.safetensors", MIXED)


@pytest.mark.parametrize("is_zip", [True, False])
def test_shared_storages_are_ties_or_views(tmp_path: Path, is_zip: bool) -> None:
    w = patterns((4, 6), torch.float32)
    state = {"embed": w, "head": w, "t": w.t(), "rows": w[1:3], "column": w[:, 2], "last": patterns((2,), torch.int8)}
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    found = fdsd.open(tmp_path / "x.pt")
    assert found["embed"] is found["head"]
    assert ties(found) == [("embed", "head")]
    assert_same_state(found, state)
    for path in (tmp_path / "y.safetensors", tmp_path / "y.pt"):
        fdsd.save(found, path)
        again = fdsd.open(path)
        assert_same_state(again, state)
        assert ties(again) == [("embed", "head")]


def test_a_view_saves_what_is_asked_only(tmp_path: Path) -> None:
    big = torch.arange(1_000_000)
    fdsd.save({"w": big[10:14], "v": big[20:26:2]}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 10_000
    assert_file_holds(tmp_path / "x.pt", {"w": big[10:14], "v": big[20:26:2].clone()})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path: Path, layout: str) -> None:
    dtypes = [d for d in (torch.complex64, torch.float32, torch.int16) if has_layout(layout, (4, 6), d)]
    state = {str(dtype): lay_out(patterns((4, 6), dtype), layout) for dtype in dtypes}
    torch.save(state, tmp_path / "theirs.pt")
    fdsd.save(state, tmp_path / "ours.pt")
    fdsd.save(fdsd.open(tmp_path / "theirs.pt"), tmp_path / "x.safetensors")
    for name in ("theirs.pt", "ours.pt", "x.safetensors"):
        assert_file_holds(tmp_path / name, {key: plain(leaf) for key, leaf in state.items()})


def test_a_key_chooses_a_state(tmp_path: Path) -> None:
    model, ema = {"w": patterns((2, 3), torch.float32)}, {"w": patterns((2, 3), torch.float32, 1)}
    file = {"model": model, "train": {"ema": ema, "step": 7}, "with.dots": {"w": torch.tensor([5])}, "epoch": 3}
    torch.save(file, tmp_path / "x.pt")
    for key, expected in (("model", model), ("train.ema", ema), ("with.dots", {"w": torch.tensor([5])})):
        assert_same_state(fdsd.open(tmp_path / "x.pt", key=key), expected)
    with pytest.raises(UnknownName, match=r"give key= one of: 'model', 'train\.ema', 'with\.dots'"):
        fdsd.open(tmp_path / "x.pt")
    with pytest.raises(UnknownName, match=r"no dict at key='emma'.*'train\.ema'"):
        fdsd.open(tmp_path / "x.pt", key="emma")


def test_metadata_of_modules_is_kept(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.save(module.state_dict(), tmp_path / "x.pt")
    found = fdsd.open(tmp_path / "x.pt")
    assert found.metadata is not None and found.metadata["1"] == {"version": 2}
    fdsd.save(fdsd.rename_fqns({"1.{x}": "norm.{x}"})(found), tmp_path / "y.pt")
    assert fdsd.open(tmp_path / "y.pt").metadata == {"": {"version": 1}, "0": {"version": 1}, "norm": {"version": 2}}
    loaded = torch.load(tmp_path / "y.pt", weights_only=True)
    assert isinstance(loaded, OrderedDict) and loaded._metadata["norm"] == {"version": 2}  # type: ignore[attr-defined]
    fdsd.save(fdsd.open(tmp_path / "x.pt"), tmp_path / "z.pt")
    module.load_state_dict(torch.load(tmp_path / "z.pt", weights_only=True))


def test_objects_that_are_no_tensors_pass_through_torch_files_only(tmp_path: Path) -> None:
    torch.save({**MIXED, **OBJECTS}, tmp_path / "x.pt")
    found = fdsd.open(tmp_path / "x.pt")
    assert {name: found[name] for name in OBJECTS} == OBJECTS
    fdsd.save(found, tmp_path / "y.pt")
    assert_file_holds(tmp_path / "y.pt", {**MIXED, **OBJECTS})
    with pytest.raises(Unsupported, match=r"'epoch', 'nested', 'none', 'note'.*save as \.pt"):
        fdsd.save(found, tmp_path / "y.safetensors")
    assert not (tmp_path / "y.safetensors").exists()


def test_files_that_would_run_code_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "f": io.BytesIO}, tmp_path / "x.pt")
    with pytest.raises(UnsafeFile, match="BytesIO"):
        fdsd.open(tmp_path / "x.pt")


def test_what_cannot_be_pickled_leaves_nothing(tmp_path: Path) -> None:
    fdsd.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    before = (tmp_path / "x.pt").read_bytes()
    with pytest.raises(Unsupported, match=r"torch\.save cannot hold"):
        fdsd.save({"w": torch.ones(2), "f": lambda: 0}, tmp_path / "x.pt", overwrite=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"x.pt": before}


def test_overwrite_and_in_place(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(MIXED, path)
    with pytest.raises(DestinationExists, match="overwrite=True"):
        fdsd.save(MIXED, path)
    p = fdsd.rename_fqns({"{x...}": "m.{x...}"}) >> fdsd.transpose("m.layers.{_}.w")
    fdsd.save(p(fdsd.open(path)), path, overwrite=True)
    assert_file_holds(path, p(MIXED))


def test_a_state_that_was_opened_knows_when_its_file_changed(tmp_path: Path) -> None:
    torch.save(MIXED, tmp_path / "x.pt")
    found = fdsd.open(tmp_path / "x.pt")
    torch.save({**MIXED, "more": torch.ones(100)}, tmp_path / "x.pt")
    with pytest.raises(BadFile, match="was changed after it was opened"):
        fdsd.materialize(found)


def test_specs_have_no_data(tmp_path: Path) -> None:
    with pytest.raises(SpecMismatch, match="'w'"):
        fdsd.save({"w": fdsd.TensorSpec((2,), torch.int8)}, tmp_path / "x.pt")
    assert [*tmp_path.iterdir()] == []


def test_meta_tensors_have_no_data(tmp_path: Path) -> None:
    with pytest.raises(SpecMismatch, match="'w'"):
        fdsd.save({"w": torch.empty(2, device="meta")}, tmp_path / "x.pt")
    assert [*tmp_path.iterdir()] == []


def test_views_of_one_storage_that_begin_alike_are_not_taken_for_one_tensor(tmp_path: Path) -> None:
    w = torch.arange(6.0)
    torch.save({"whole": w, "part": w[:2], "again": w, "matrix": w.view(2, 3)}, tmp_path / "x.pt")
    state = fdsd.open(tmp_path / "x.pt")
    assert ties(state) == [("whole", "again")]
    assert_same_state(fdsd.materialize(state), {"whole": w, "part": w[:2], "again": w, "matrix": w.view(2, 3)})
