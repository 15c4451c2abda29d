"""Safetensors files as a source: one file, an index, a folder, the Hugging Face cache."""

from __future__ import annotations

import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file, save_model

from fdsd.data.errors import BadFile, MissingFile, UnknownName, UnsafeFile, Unsupported
from fdsd.data.protocols import Piece, Source
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.ties import ties
from fdsd.storage.safetensors_source import SafetensorsSource
from tests.golden.hostile.cases import INDEXES, UNSAFE, build, tensor, unsafe_index
from tests.helpers.descriptors import descriptors_below

from .conftest import of_dtype, raw


def read(source: Any, fqn: str) -> torch.Tensor:
    spec = source.specs()[fqn]
    out = torch.empty(spec.shape, dtype=spec.dtype)
    source.read(fqn, Region.whole(spec.shape), out)
    return out


def assert_holds(source: Any, tensors: dict[str, torch.Tensor]) -> None:
    assert set(source.specs()) == set(tensors)
    for name, value in tensors.items():
        assert source.specs()[name] == TensorSpec(value.shape, value.dtype)
        assert raw(read(source, name)) == raw(value), name


MANY = {f"layers.{i}.w": torch.arange(i * 100, i * 100 + 12, dtype=torch.float32).reshape(3, 4) for i in range(6)}


def write_index(folder: Path, weight_map: dict[str, str], name: str = "model.safetensors.index.json") -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    names = list(MANY)
    files = {name: f"model-0000{1 + i // 2}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: MANY[name] for name in names if files[name] == file}, tmp_path / file, {"format": "pt"})
    write_index(tmp_path, files)
    return tmp_path


def test_one_file(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": of_dtype(dtype, 3, 4), "b": of_dtype(dtype, 0, 2), "c": of_dtype(dtype, 5)}
    if dtype.itemsize != 1 or "float4" not in str(dtype):
        tensors["d"] = of_dtype(dtype)
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, {"format": "pt", "note": "n"})
    source = SafetensorsSource(path)
    assert isinstance(source, Source)
    assert_holds(source, tensors)
    assert source.files == (str(path),)
    assert source.metadata == {"format": "pt", "note": "n"}
    assert source.aliases == {}
    assert list(source.pieces("a")) == [Piece(Region.whole((3, 4)), str(path))]


@given(st.data())
@settings(max_examples=60)
def test_any_box_is_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("box") / "x.safetensors"
    value = torch.arange(6 * 7 * 5, dtype=torch.int32).reshape(6, 7, 5)
    save_file({"before": torch.ones(3, dtype=torch.uint8), "a": value}, path)
    starts = [data.draw(st.integers(0, size)) for size in value.shape]
    sizes = [data.draw(st.integers(0, size - start)) for size, start in zip(value.shape, starts, strict=True)]
    out = torch.empty(sizes, dtype=torch.float64)
    SafetensorsSource(path).read("a", Region.box(starts, sizes), out)
    slices = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    assert torch.equal(out, value[slices].double())


def test_the_extent_is_where_the_bytes_are(sharded: Path) -> None:
    source = SafetensorsSource(sharded)
    for name, value in MANY.items():
        extent = source.extent(name)
        assert Path(extent.path).read_bytes()[extent.offset : extent.offset + extent.nbytes] == raw(value)


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"], ids=["folder", "index"])
def test_a_sharded_checkpoint(sharded: Path, name: str) -> None:
    source = SafetensorsSource(sharded / name)
    assert_holds(source, MANY)
    assert list(source.specs()) == list(MANY)
    assert [Path(file).name for file in source.files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert source.pieces("layers.2.w")[0].owner == str(sharded / "model-00002-of-00003.safetensors")


def test_the_order_of_an_index_is_kept(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    write_index(tmp_path, {"b": "x.safetensors", "a": "x.safetensors"})
    assert list(SafetensorsSource(tmp_path).specs()) == ["b", "a"]


def test_the_hugging_face_cache_is_links(sharded: Path, tmp_path: Path) -> None:
    repo = tmp_path / "models--x--y"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for i, path in enumerate(sorted(sharded.glob("model[-.]*"))):
        os.replace(path, repo / "blobs" / f"{i}0af")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{i}0af"))
    assert_holds(SafetensorsSource(snapshot), MANY)
    assert_holds(SafetensorsSource(snapshot / "model.safetensors.index.json"), MANY)


def test_one_linked_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    assert_holds(SafetensorsSource(tmp_path), {"a": torch.ones(2)})
    assert_holds(SafetensorsSource(tmp_path / "blob"), {"a": torch.ones(2)})


def test_loose_files_are_joined_if_their_names_differ(tmp_path: Path) -> None:
    for i, (name, value) in enumerate(MANY.items()):
        save_file({name: value}, tmp_path / f"{i}.safetensors", {"file": str(i)})
    (tmp_path / ".hidden.safetensors").write_bytes(b"no")
    source = SafetensorsSource(tmp_path)
    assert_holds(source, MANY)
    assert source.metadata == {"file": "0"}
    save_file({"layers.3.w": torch.ones(1)}, tmp_path / "9.safetensors")
    with pytest.raises(BadFile, match=r"'layers.3.w in 3.safetensors and 9.safetensors'.*Open the file that you mean"):
        SafetensorsSource(tmp_path)


def test_a_numbered_set_without_an_index_must_be_whole(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert_holds(SafetensorsSource(sharded), MANY)
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadFile, match=r"lacks files of a numbered set: 'model-00002-of-00003.safetensors'"):
        SafetensorsSource(sharded)


def test_a_folder_that_does_not_say_which(sharded: Path) -> None:
    write_index(sharded, {}, "other.safetensors.index.json")
    with pytest.raises(BadFile, match=r"several indexes: 'model\..*', 'other\..*by its path"):
        SafetensorsSource(sharded)
    (sharded / "other.safetensors.index.json").unlink()
    save_file({"z": torch.ones(1)}, sharded / "model.safetensors")
    with pytest.raises(BadFile, match=r"both 'model.safetensors' and 'model.safetensors.index.json'"):
        SafetensorsSource(sharded)
    assert_holds(SafetensorsSource(sharded / "model.safetensors"), {"z": torch.ones(1)})
    assert_holds(SafetensorsSource(sharded / "model.safetensors.index.json"), MANY)


def test_an_index_of_the_one_file_beside_it(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"a": "model.safetensors"})
    assert_holds(SafetensorsSource(tmp_path), {"a": torch.ones(1)})


def test_model_safetensors_comes_before_other_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    assert_holds(SafetensorsSource(tmp_path), {"a": torch.ones(1)})


def test_nothing_there(tmp_path: Path) -> None:
    for name in ("", "x.safetensors", "x.safetensors.index.json", "no/such/folder"):
        with pytest.raises(MissingFile, match=str(tmp_path / name)):
            SafetensorsSource(tmp_path / name)


@pytest.mark.parametrize("case", INDEXES)
def test_indexes_that_break_a_rule(tmp_path: Path, case: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(build(f'{{"a":{tensor()},"z":{tensor(offsets="[8,16]")}}}', 16))
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.safetensors.index.json").write_text(INDEXES[case])
    with pytest.raises(BadFile, match=r"index\.json"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("file", UNSAFE)
def test_an_index_stays_in_its_folder(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path, folder, folder / "sub"):
        (path / "x.safetensors").write_bytes(build(f'{{"a":{tensor()}}}', 8))
    (folder / "model.safetensors.index.json").write_text(unsafe_index(file))
    with pytest.raises(UnsafeFile, match=r"index\.json names files that are not plain names"):
        SafetensorsSource(folder)


def test_an_index_and_its_files_must_agree_and_all_offenders_are_named(tmp_path: Path) -> None:
    save_file({name: torch.ones(1) for name in ("a", "b", "x1")}, tmp_path / "one.safetensors")
    save_file({name: torch.ones(1) for name in ("b", "c", "x2")}, tmp_path / "two.safetensors")
    one, two = "one.safetensors", "two.safetensors"
    write_index(tmp_path, {"a": one, "b": one, "c": two, "m1": one, "m2": two})
    with pytest.raises(
        BadFile,
        match=r"the files lack: 'm1 in one.safetensors', 'm2 in two.safetensors'; "
        r"the index does not name: 'x1 in one.safetensors', 'x2 in two.safetensors'; "
        r"in another file than the index says: 'b in two.safetensors'",
    ):
        SafetensorsSource(tmp_path)


def test_all_missing_files_are_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    broken = sharded / "model-00003-of-00003.safetensors"
    broken.unlink()
    broken.symlink_to("nowhere")
    with pytest.raises(BadFile, match=r"names 2 files that are missing or broken links: 'model-00002.*', 'model-00003"):
        SafetensorsSource(sharded)


def test_dtypes_that_torch_lacks_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(build(f'{{"a":{tensor("F6_E2M3", "[4]", "[0,3]")}}}', 3))
    with pytest.raises(Unsupported, match=r"'a \(F6_E2M3\)'"):
        SafetensorsSource(path)


@pytest.mark.parametrize("how", ["longer", "touched", "replaced", "gone"])
def test_a_file_that_changed_is_not_read(tmp_path: Path, how: str) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2)}, path)
    source = SafetensorsSource(path)
    read(source, "a")
    if how == "longer":
        with path.open("ab") as file:
            file.write(b"x")
    elif how == "touched":
        os.utime(path, ns=(5, 5))
    elif how == "replaced":
        save_file({"a": torch.zeros(2)}, tmp_path / "new")
        os.replace(tmp_path / "new", path)
    else:
        path.unlink()
    with pytest.raises(BadFile, match=r"x\.safetensors"):
        read(source, "a")


def test_unknown_names_are_told_the_nearest(sharded: Path) -> None:
    source = SafetensorsSource(sharded)
    for ask in (source.extent, source.pieces, lambda fqn: source.read(fqn, Region(()), torch.empty(()))):
        with pytest.raises(UnknownName, match=r"layers\.0\.v.*nearest name is 'layers\.0\.w'"):
            ask("layers.0.v")


def test_names_dropped_by_save_model_come_back_as_tied(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    save_model(model, str(tmp_path / "x.safetensors"), {"format": "pt"})
    source = SafetensorsSource(tmp_path / "x.safetensors")
    assert_holds(source, {"embed.weight": model.embed.weight.detach(), "head.weight": model.embed.weight.detach()})
    assert ties(source.specs()) == [("embed.weight", "head.weight")]
    assert source.aliases == {"head.weight": "embed.weight"}
    assert source.extent("head.weight") == source.extent("embed.weight")
    assert source.metadata == {"format": "pt"}


def test_descriptors_are_few_and_close(tmp_path: Path) -> None:
    for i in range(100):
        save_file({f"t{i}": torch.tensor([float(i)])}, tmp_path / f"{i}.safetensors")
    with SafetensorsSource(tmp_path) as source:
        assert descriptors_below(tmp_path) == 0
        for i in range(100):
            assert read(source, f"t{i}").item() == i
        assert 0 < descriptors_below(tmp_path) <= 8
    assert descriptors_below(tmp_path) == 0
    assert read(source, "t5").item() == 5


def test_threads_read_at_once(sharded: Path) -> None:
    source = SafetensorsSource(sharded)
    wrong: list[object] = []

    def work() -> None:
        for _ in range(50):
            for name, value in MANY.items():
                if raw(read(source, name)) != raw(value):
                    wrong.append(name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_source_pickles(sharded: Path) -> None:
    source = SafetensorsSource(sharded)
    read(source, "layers.0.w")
    assert_holds(pickle.loads(pickle.dumps(source)), MANY)
