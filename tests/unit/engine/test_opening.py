"""Opening and saving safetensors: whatever a state is, it comes back with the same names, order and bytes."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file, save_model

import fdsd
from fdsd.data.errors import BadFile, MissingFile, UnknownName, Unsupported
from fdsd.data.ties import ties
from fdsd.storage.safetensors_header import DTYPES
from tests.helpers.tensors import LAYOUTS, any_layout, has_layout, lay_out, numbers, patterns, plain, same_bytes

from .conftest import MIXED, assert_file_holds, assert_same_state

HALVED = getattr(torch, "float4_e2m1fn_x2", None)  # has no 0-dim tensors in this format
STORABLE = sorted(DTYPES.values(), key=str)
ODD_NAMES = ["", " ", ".", "a..b", "{i}", "../up", "/root", "a/b\\c", "x\n\t", '"', "\\u0000", "\u00e9\u4e2d\U0001f600"]

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors of every dtype and memory layout; some of them tied, some of them views of one storage."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    state: dict[str, torch.Tensor] = {}
    for seed, name in enumerate(draw(st.lists(names, max_size=7, unique=True))):
        known = list(state.values())
        if known and draw(st.integers(0, 4)) == 0:
            state[name] = rng.choice(known)
        elif known and draw(st.integers(0, 4)) == 0:
            chosen = rng.choice(known)
            state[name] = chosen[..., :1] if chosen.ndim and chosen.dtype != HALVED else chosen
        else:
            dtype = draw(st.sampled_from(STORABLE))
            shape = draw(shapes) or (() if dtype != HALVED else (2,))
            state[name] = any_layout(rng, patterns(shape, dtype, seed))
    return state


@given(states(), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=120)
def test_any_state_comes_back(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, torch.Tensor], is_folder: bool, rng: random.Random
) -> None:
    path = tmp_path_factory.mktemp("any") / ("folder" if is_folder else "x.safetensors")
    some = {name: fdsd.defer({name: leaf})[name] if rng.random() < 0.5 else leaf for name, leaf in state.items()}
    fdsd.save(some, path, max_shard_size=rng.choice([1, 64, "5GB"]), budget=rng.choice([0, 1000, "256MB"]))
    found = fdsd.open(path)
    assert_same_state(found, {name: plain(leaf) for name, leaf in state.items()})
    assert fdsd.diff(found, state).same
    assert {*ties(found)} == {*ties(some)}


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580, 0x10280])
def test_no_length_of_the_header_is_taken_for_another_format(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    fdsd.save({"w": torch.ones(2)}, path)
    size = 1 + length - int.from_bytes(path.read_bytes()[:8], "little")
    fdsd.save({"w" * size: torch.ones(2)}, path, overwrite=True)
    assert int.from_bytes(path.read_bytes()[:8], "little") == length
    assert_file_holds(path, {"w" * size: torch.ones(2)})


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"m": patterns((3, 4), dtype), "none": patterns((0, 2), dtype), "a.longer.line": patterns((301,), dtype, 5)}
    if dtype != HALVED:
        state["zero"] = patterns((), dtype, 6)
    for layout in LAYOUTS:
        if has_layout(layout, (4, 6), dtype):
            state[layout] = lay_out(patterns((4, 6), dtype, 7), layout)
    fdsd.save(state, tmp_path / "x.safetensors")
    fdsd.save(fdsd.open(tmp_path / "x.safetensors"), tmp_path / "folder", max_shard_size=20)
    for path in (tmp_path / "x.safetensors", tmp_path / "folder"):
        assert_file_holds(path, {name: plain(leaf) for name, leaf in state.items()})


@pytest.mark.parametrize("is_folder", [False, True])
def test_odd_names(tmp_path: Path, is_folder: bool) -> None:
    state = {name: torch.tensor([float(i)]) for i, name in enumerate(ODD_NAMES)}
    path = tmp_path / ("folder" if is_folder else "x.safetensors")
    fdsd.save(state, path, max_shard_size=8)
    assert_file_holds(path, state)
    assert {*os.listdir(tmp_path)} == {path.name}


def test_no_tensors(tmp_path: Path) -> None:
    for path in (tmp_path / "x.safetensors", tmp_path / "folder"):
        fdsd.save({}, path)
        assert fdsd.open(path) == {}
        fdsd.save(fdsd.open(path), path, overwrite=True)
        assert_file_holds(path, {})


def test_opening_reads_nothing_and_leaves_are_lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fdsd.save(MIXED, tmp_path / "x.safetensors")

    def refuse(*args: object) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr("fdsd.storage.safetensors_source.SafetensorsSource.read", refuse)
    found = fdsd.open(str(tmp_path / "x.safetensors"))
    assert all(isinstance(leaf, fdsd.Lazy) for leaf in found.values())
    assert fdsd.specs(found) == fdsd.specs(MIXED)


def test_shards_and_their_index(tmp_path: Path) -> None:
    fdsd.save(MIXED, tmp_path / "folder", max_shard_size=100)
    index = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == list(MIXED)
    assert index["metadata"]["total_size"] == sum(leaf.numel() * leaf.itemsize for leaf in MIXED.values())
    for path in (tmp_path / "folder", tmp_path / "folder" / "model.safetensors.index.json"):
        assert_file_holds(path, MIXED)
    for name in {*index["weight_map"].values()}:
        part = fdsd.open(tmp_path / "folder" / name)
        assert [*part] == [key for key, file in index["weight_map"].items() if file == name]


@pytest.mark.parametrize("max_shard_size", [1, 100, "5GB"])
def test_a_folder_of_the_hub_cache_is_links(tmp_path: Path, max_shard_size: int | str) -> None:
    fdsd.save(MIXED, tmp_path / "made", max_shard_size=max_shard_size)
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(os.listdir(tmp_path / "made"))):
        os.rename(tmp_path / "made" / file, blobs / f"{number:064x}")
        (snapshot / file).symlink_to(Path("../../blobs") / f"{number:064x}")
    assert_file_holds(snapshot, MIXED)
    (tmp_path / "link").symlink_to(snapshot)
    assert_file_holds(tmp_path / "link", MIXED)
    fdsd.save(fdsd.open(tmp_path / "link"), tmp_path / "copy")
    assert_file_holds(tmp_path / "copy", MIXED)


def test_saving_over_links_leaves_what_they_point_to(tmp_path: Path) -> None:
    fdsd.save(MIXED, tmp_path / "blob.safetensors")
    before = (tmp_path / "blob.safetensors").read_bytes()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blob.safetensors")
    changed = fdsd.rename_fqns({"z.weight": "y.weight"})(fdsd.open(tmp_path / "snapshot"))
    fdsd.save(changed, tmp_path / "snapshot", overwrite=True)
    assert (tmp_path / "blob.safetensors").read_bytes() == before
    assert not (tmp_path / "snapshot" / "model.safetensors").is_symlink()
    assert_file_holds(tmp_path / "snapshot", {("y.weight" if n == "z.weight" else n): v for n, v in MIXED.items()})


# -- ties ------------------------------------------------------------------------------------------------------------

W, U = patterns((4, 3), torch.float32, 8), patterns((3, 4), torch.float32, 9)
TIED = {"head.w": W, "u": U, "norm": patterns((3,), torch.float16, 10), "embed.w": W, "u.again": U, "w.third": W}


@pytest.mark.parametrize("size", ["5GB", 40])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_ties_survive(tmp_path: Path, size: int | str, is_lazy: bool) -> None:
    given = fdsd.defer(TIED) if is_lazy else TIED
    fdsd.save(given, tmp_path / "a", max_shard_size=size)
    first = fdsd.open(tmp_path / "a")
    assert first["head.w"] is first["embed.w"] is first["w.third"] and first["u"] is first["u.again"]
    fdsd.save(first, tmp_path / "b.safetensors")
    read = fdsd.materialize(fdsd.open(tmp_path / "b.safetensors"))
    assert_same_state(read, TIED)
    assert ties(read) == [("head.w", "embed.w", "w.third"), ("u", "u.again")]
    stored = sum(p.stat().st_size for p in (tmp_path / "a").iterdir() if p.suffix == ".safetensors")
    assert stored < 48 + 48 + 6 + 3 * 1024  # each tensor once, and headers


def test_ties_survive_renames_and_casts_on_the_way(tmp_path: Path) -> None:
    fdsd.save(TIED, tmp_path / "a.safetensors")
    p = fdsd.rename_fqns({"{x}.w": "{x}.weight"}) >> fdsd.cast(torch.float64)
    fdsd.save(p(fdsd.open(tmp_path / "a.safetensors")), tmp_path / "b.safetensors")
    read = fdsd.materialize(fdsd.open(tmp_path / "b.safetensors"))
    assert ties(read) == [("head.weight", "embed.weight", "w.third"), ("u", "u.again")]
    assert_same_state(read, p(TIED))


def test_views_of_one_storage_that_are_not_the_same_tensor_are_not_tied(tmp_path: Path) -> None:
    base = patterns((6, 6), torch.float32)
    state = {"base": base, "t": base.t(), "rows": base[1:3], "flat": base.reshape(-1)}
    fdsd.save(state, tmp_path / "x.safetensors")
    assert_file_holds(tmp_path / "x.safetensors", state)
    assert ties(fdsd.open(tmp_path / "x.safetensors")) == []


def test_ties_written_by_the_reference_library(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight
    save_model(model, str(tmp_path / "x.safetensors"))
    found = fdsd.open(tmp_path / "x.safetensors")
    assert {*found} == {*model.state_dict()} and found["0.weight"] is found["2.weight"]
    model.load_state_dict(fdsd.materialize(found).to_dict())


# -- what leaves may be ----------------------------------------------------------------------------------------------


def test_parameters_and_gradients_and_views(tmp_path: Path) -> None:
    weight = numbers((4, 5), torch.float32)
    state = {
        "parameter": torch.nn.Parameter(weight),
        "frozen": torch.nn.Parameter(weight + 1, requires_grad=False),
        "computed": (torch.nn.Parameter(weight + 2) * 3),
        "expanded": weight[:1].expand(1000, 5),
        "conj": torch.complex(weight, -weight).conj(),
        "neg": torch.complex(weight, weight + 7).conj().imag,
        "lazy": fdsd.defer({"x": weight + 4})["x"],
        "lazy slice": fdsd.split("x", ["l", "r"], dim=1, sizes=[2, 3])(fdsd.defer({"x": weight + 5}))["r"],
    }
    fdsd.save(state, tmp_path / "x.safetensors")
    eager = {**state, "lazy": weight + 4, "lazy slice": (weight + 5)[:, 2:]}
    expected: dict[str, Any] = {name: plain(leaf) for name, leaf in eager.items()}
    assert_file_holds(tmp_path / "x.safetensors", expected)
    assert not any(leaf.requires_grad for leaf in fdsd.materialize(fdsd.open(tmp_path / "x.safetensors")).values())


def test_inputs_are_not_changed(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(numbers((4, 5), torch.float32))
    before, version = parameter.detach().clone(), parameter._version
    state = {"w": parameter, "t": parameter.t()}
    fdsd.save(state, tmp_path / "x.safetensors")
    assert same_bytes(parameter, before) and parameter._version == version and parameter.requires_grad
    assert [*state] == ["w", "t"]


def test_ten_thousand_small_tensors(tmp_path: Path) -> None:
    state = {f"layers.{i}.w": torch.tensor([i, -i, 2 * i]) for i in range(10_000)}
    start = time.process_time()
    fdsd.save(state, tmp_path / "a.safetensors")
    p = fdsd.rename_fqns({"layers.{i}.w": "blocks.{i}.w"})
    fdsd.save(p(fdsd.open(tmp_path / "a.safetensors")), tmp_path / "b.safetensors")
    read = fdsd.materialize(fdsd.open(tmp_path / "b.safetensors"))
    assert time.process_time() - start < 20  # 2 seconds on an idle machine; it must not grow with the square
    assert [*read] == [f"blocks.{i}.w" for i in range(10_000)]
    assert all(read[f"blocks.{i}.w"].tolist() == [i, -i, 2 * i] for i in range(10_000))


# -- what cannot be opened -------------------------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path / "x.safetensors", tmp_path / "no" / "folder", tmp_path / "x.pt"):
        with pytest.raises(MissingFile, match=path.name):
            fdsd.open(path)
    with pytest.raises(MissingFile, match="has no file"):
        fdsd.open(tmp_path)


def test_no_format_fits(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello, this is no checkpoint at all")
    with pytest.raises(Unsupported, match="has no format that is known"):
        fdsd.open(tmp_path / "notes.txt")
    with pytest.raises(Unsupported, match="format='onnx' is not known"):
        fdsd.open(tmp_path / "notes.txt", format="onnx")
    with pytest.raises(BadFile):
        fdsd.open(tmp_path / "notes.txt", format="safetensors")


def test_a_key_is_for_files_that_hold_several(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(Unsupported, match="holds one state dict"):
        fdsd.open(tmp_path / "x.safetensors", key="model")
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "x.pt")
    with pytest.raises(UnknownName, match="'model'"):
        fdsd.open(tmp_path / "x.pt", key="mode")


def test_the_content_tells_the_format_not_the_name(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, 2.0])}, tmp_path / "x.bin")
    torch.save({"w": torch.tensor([3.0, 4.0])}, tmp_path / "y.data")
    assert_file_holds(tmp_path / "x.bin", {"w": torch.tensor([1.0, 2.0])})
    assert_file_holds(tmp_path / "y.data", {"w": torch.tensor([3.0, 4.0])})


def test_a_broken_header_names_the_file(tmp_path: Path) -> None:
    save_file({"w": torch.ones(20)}, tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(whole[:-1])
    with pytest.raises(BadFile, match=r"x\.safetensors"):
        fdsd.open(tmp_path / "x.safetensors")
