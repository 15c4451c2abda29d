"""Safetensors files as a sink: what is written stands whole under its name, or nothing does."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fdsd.data.errors import BadFile, DestinationExists, SpecMismatch, UnknownName, Unsupported
from fdsd.data.protocols import Sink
from fdsd.data.region import Region, Span
from fdsd.data.spec import TensorSpec
from fdsd.data.strides import row_major
from fdsd.data.ties import ties
from fdsd.storage.safetensors_sink import SafetensorsSink
from fdsd.storage.safetensors_source import SafetensorsSource
from tests.helpers.descriptors import descriptors_below

from .conftest import Failing, Make, assert_holds, of_dtype, raw, read, save, specs_of, tree

MIXED = {
    "z": torch.arange(3, dtype=torch.uint8),
    "m": torch.arange(10, 15, dtype=torch.float32),
    "a": torch.arange(20, 26, dtype=torch.bfloat16).reshape(2, 3),
    "empty": torch.empty(0, 4),
    "one": torch.tensor(7, dtype=torch.int64),
}


def test_one_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x.safetensors"
    save(path, MIXED, metadata={"note": "n"})
    assert_holds(path, MIXED)
    assert SafetensorsSource(path).metadata == {"format": "pt", "note": "n"}
    assert os.listdir(path.parent) == ["x.safetensors"]


def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": of_dtype(dtype, 3, 4), "b": of_dtype(dtype, 0, 2)}
    save(tmp_path / "x.safetensors", tensors)
    assert_holds(tmp_path / "x.safetensors", tensors)


def test_no_tensors(tmp_path: Path) -> None:
    save(tmp_path / "x.safetensors", {})
    save(tmp_path / "folder", {}, max_shard_size=1)
    assert_holds(tmp_path / "x.safetensors", {})
    assert_holds(tmp_path / "folder", {})


def test_views_are_written_by_their_values(tmp_path: Path) -> None:
    base = torch.arange(24.0).to(torch.complex64).reshape(4, 6) * (1 + 2j)
    views = {"t": base.t(), "conj": base.conj(), "slice": base[1::2, 2:], "expanded": base[:1].expand(3, 6)}
    save(tmp_path / "x.safetensors", views)
    assert_holds(tmp_path / "x.safetensors", views)
    with SafetensorsSink.create(tmp_path / "neg", {"n": TensorSpec((4, 6), torch.float32)}) as sink:
        sink.write("n", 0, base.conj().imag)
    assert load_file(tmp_path / "neg")["n"].equal(base.conj().imag.resolve_neg())


@pytest.mark.parametrize("order", [list, lambda names: list(reversed(list(names)))], ids=["forwards", "backwards"])
def test_bytes_may_come_in_any_order_and_parts(tmp_path: Path, order: Callable[[Any], list[str]]) -> None:
    path = tmp_path / "x.safetensors"
    with SafetensorsSink.create(path, specs_of(MIXED)) as sink:
        for name in order(MIXED):
            data = raw(MIXED[name])
            for at in order(range(0, len(data), 5)):  # type: ignore[arg-type]
                sink.write(name, at, data[at : at + 5])
    assert_holds(path, MIXED)


@given(st.data())
@settings(max_examples=40)
def test_regions_are_written_where_they_belong(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("regions") / "x.safetensors"
    value = torch.arange(4 * 6 * 2, dtype=torch.int32).reshape(4, 6, 2)
    cuts = sorted({0, 6, *data.draw(st.lists(st.integers(0, 6), max_size=3))})
    spec = TensorSpec(value.shape, value.dtype)
    with SafetensorsSink.create(path, {"a": spec}, durable=False) as sink:
        assert isinstance(sink, Sink)
        assert list(sink.wanted("a")) == [Region.whole(value.shape)]
        for low, high in data.draw(st.permutations(list(itertools.pairwise(cuts)))):
            for rows in (Span(0, ((2, 2),)), Span(1, ((2, 2),))):
                region = Region((rows, Span(low, ((high - low, 1),)), Span(0, ((2, 1),))))
                strides, offset = region.strides(row_major(value.shape))
                sink.write("a", region, value.as_strided(region.shape, strides, offset))
    assert load_file(path)["a"].equal(value)


def test_extents_are_copied(tmp_path: Path) -> None:
    save_file({"x": MIXED["m"], "y": MIXED["a"]}, tmp_path / "source")
    source = SafetensorsSource(tmp_path / "source")
    with SafetensorsSink.create(tmp_path / "x.safetensors", specs_of({"m": MIXED["m"], "a": MIXED["a"]})) as sink:
        sink.copy("m", 0, source.extent("x"))
        extent = source.extent("y")
        sink.copy("a", 4, extent.part(4, extent.nbytes))
        sink.copy("a", 0, extent.part(0, 4))
    assert_holds(tmp_path / "x.safetensors", {"m": MIXED["m"], "a": MIXED["a"]})


def test_a_rename_keeps_bytes_at_their_place_in_a_page(tmp_path: Path) -> None:
    save_file(MIXED, tmp_path / "source", {"note": "n" * 999})
    source = SafetensorsSource(tmp_path / "source")
    extents = {f"renamed.{name}": source.extent(name) for name in MIXED}
    specs = {f"renamed.{name}": spec for name, spec in source.specs().items()}
    for path, options in ((tmp_path / "x", {}), (tmp_path / "folder", {"max_shard_size": "1MB"})):
        make: Make = SafetensorsSink.create_folder if options else SafetensorsSink.create
        with make(path, specs, origins={name: extent.offset for name, extent in extents.items()}, **options) as sink:
            for name, extent in extents.items():
                sink.copy(name, 0, extent)
        target = SafetensorsSource(path)
        assert all((target.extent(name).offset - extent.offset) % 4096 == 0 for name, extent in extents.items())
        assert all(raw(read(target, f"renamed.{name}")) == raw(value) for name, value in MIXED.items())


def test_only_what_replaces_something_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({}, {"max_shard_size": "8B"}):
        path = tmp_path / f"{len(options)}"
        for overwrite in (False, True):
            failing = Failing(10**6, KeyboardInterrupt(), forever=False)
            with failing.at(monkeypatch, ["fsync"]):
                save(path, MIXED, overwrite=overwrite, **options)
            assert (failing.calls > 0) == overwrite


def test_a_file_can_be_replaced_by_a_rewrite_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": MIXED["m"]}, path)
    source = SafetensorsSource(path)
    with SafetensorsSink.create(path, {"b": source.specs()["a"]}, overwrite=True) as sink:
        sink.copy("b", 0, source.extent("a"))
    assert_holds(path, {"b": MIXED["m"]})


def test_a_source_that_changed_is_not_copied(tmp_path: Path) -> None:
    save_file({"a": MIXED["m"]}, tmp_path / "source")
    extent = SafetensorsSource(tmp_path / "source").extent("a")
    os.utime(tmp_path / "source", ns=(3, 3))
    with (
        pytest.raises(BadFile, match="source was changed"),
        SafetensorsSink.create(tmp_path / "x.safetensors", {"a": TensorSpec((5,), torch.float32)}) as sink,
    ):
        sink.copy("a", 0, extent)
    assert os.listdir(tmp_path) == ["source"]


def test_ties_survive_in_their_places(tmp_path: Path) -> None:
    w = torch.arange(6.0)
    tensors = {"embed": w, "middle": torch.arange(3.0), "head": w, "last": torch.arange(2.0)}
    for path, options in ((tmp_path / "x.safetensors", {}), (tmp_path / "folder", {"max_shard_size": 12})):
        save(path, tensors, aliases={"head": "embed"}, **options)
        source = SafetensorsSource(path)
        assert_holds(path, tensors)
        assert ties(source.specs()) == [("embed", "head")]
        assert sum(Path(file).stat().st_size for file in source.files) < 4 * 11 + 400 * len(source.files)


def test_aliases_need_not_be_among_the_specs(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with SafetensorsSink.create(path, {"a": TensorSpec((2,), torch.int8)}, aliases={"b": "a"}) as sink:
        assert list(sink.specs()) == ["a"]
        sink.write("a", 0, b"\x01\x02")
    assert list(SafetensorsSource(path).specs()) == ["a", "b"]


def test_shards_and_their_index(tmp_path: Path) -> None:
    tensors = {f"layers.{i}": torch.arange(i, i + 4, dtype=torch.int16) for i in (10, 2, 1, 0)}
    save(tmp_path, tensors, max_shard_size="16B", metadata={"note": "n"})
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert sorted(os.listdir(tmp_path)) == [first, second, "model.safetensors.index.json"]
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 32},
        "weight_map": {"layers.10": first, "layers.2": first, "layers.1": second, "layers.0": second},
    }
    assert_holds(tmp_path, tensors)
    assert set(load_file(tmp_path / second)) == {"layers.1", "layers.0"}


def test_one_shard_has_no_index(tmp_path: Path) -> None:
    save(tmp_path, MIXED, max_shard_size="1MB")
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert_holds(tmp_path, MIXED)


def test_many_shards_need_few_descriptors(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.tensor([float(i)]) for i in range(200)}
    with SafetensorsSink.create_folder(tmp_path, specs_of(tensors), max_shard_size=4, durable=False) as sink:
        for name, value in tensors.items():
            sink.write(name, 0, value)
        assert descriptors_below(tmp_path) <= 17  # and one is the lock's
    assert descriptors_below(tmp_path) == 0
    assert_holds(tmp_path, tensors)


def test_threads_write_at_once(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.arange(i, i + 1000) for i in range(40)}
    path = tmp_path / "folder"
    with SafetensorsSink.create_folder(path, specs_of(tensors), max_shard_size=40000) as sink:

        def work(part: int) -> None:
            for name, value in list(tensors.items())[part::4]:
                for at in range(0, 1000, 100):
                    sink.write(name, at * 8, value[at : at + 100])

        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert_holds(path, tensors)


# ------------------------------------------------------------------------------------ what is refused


def test_a_destination_that_exists_needs_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, MIXED)
    before = tree(tmp_path)
    with pytest.raises(DestinationExists, match=r"x\.safetensors exists; give overwrite=True"):
        save(path, {})
    with pytest.raises(FileExistsError, match=r"has 'x\.safetensors'; give overwrite=True"):
        save(tmp_path, {}, max_shard_size=1)
    with pytest.raises(DestinationExists, match="is a folder"):
        save(tmp_path, {}, overwrite=True)
    with pytest.raises(DestinationExists, match="is a file, not a folder"):
        save(path, {}, max_shard_size=1, overwrite=True)
    assert tree(tmp_path) == before
    save(path, {"a": torch.ones(2)}, overwrite=True)
    assert_holds(path, {"a": torch.ones(2)})


def test_a_dangling_link_exists_and_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"precious")
    path = tmp_path / "x.safetensors"
    path.symlink_to("blob")
    with pytest.raises(DestinationExists):
        save(path, MIXED)
    save(path, MIXED, overwrite=True)
    assert not path.is_symlink() and (tmp_path / "blob").read_bytes() == b"precious"
    assert_holds(path, MIXED)


def test_a_destination_that_comes_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    sink = SafetensorsSink.create(path, {})
    path.write_bytes(b"other")
    with pytest.raises(DestinationExists):
        sink.commit()
    assert tree(tmp_path) == {"x.safetensors": b"other"}


def test_the_index_of_another_checkpoint_is_never_left_beside(tmp_path: Path) -> None:
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(DestinationExists, match=r"'other\.safetensors\.index\.json'. Remove it"):
        save(tmp_path, MIXED, max_shard_size=1, overwrite=True)


def test_other_files_in_a_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save(tmp_path, MIXED, max_shard_size="1MB")
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_dtypes_and_names_are_checked_before_anything_is_made(tmp_path: Path) -> None:
    odd = {"a": TensorSpec((2,), torch.complex128), "b": TensorSpec((2,), torch.complex128)}
    for make in (SafetensorsSink.create, SafetensorsSink.create_folder):
        with pytest.raises(Unsupported, match=r"'a \(complex128\)', 'b \(complex128\)'"):
            make(tmp_path / "new" / "x", odd)
        with pytest.raises(SpecMismatch, match="__metadata__"):
            make(tmp_path / "new" / "x", {"a": TensorSpec((), torch.int8)}, aliases={"__metadata__": "a"})
    assert os.listdir(tmp_path) == []


def test_what_does_not_fit_a_tensor_is_refused(tmp_path: Path) -> None:
    sink = SafetensorsSink.create(tmp_path / "x", {"a": TensorSpec((2, 3), torch.float32)})
    with pytest.raises(UnknownName, match=r"'b' is not among the 1 tensor of .*x"):
        sink.write("b", 0, b"")
    with pytest.raises(SpecMismatch, match="'a' has 24 bytes; 8 at 20 lie beyond them"):
        sink.write("a", 20, bytes(8))
    with pytest.raises(SpecMismatch, match="lie beyond"):
        sink.write("a", -4, bytes(4))
    with pytest.raises(SpecMismatch, match="'a' is float32 and cannot be written from int32; cast it first"):
        sink.write("a", 0, torch.ones(2, dtype=torch.int32))
    with pytest.raises(SpecMismatch, match=r"region of shape \(2, 3\) cannot be written from shape \(3, 2\)"):
        sink.write("a", Region.whole((2, 3)), torch.ones(3, 2))
    with pytest.raises(SpecMismatch, match="cannot be written from bytes"):
        sink.write("a", Region.whole((2, 3)), bytes(24))
    with pytest.raises(SpecMismatch, match="does not lie within"):
        sink.write("a", Region.box((1, 0), (2, 3)), torch.ones(2, 3))
    sink.abort()
    assert os.listdir(tmp_path) == []


def test_a_commit_demands_every_byte(tmp_path: Path) -> None:
    specs = {name: TensorSpec((4,), torch.int8) for name in ("a", "b", "c", "d")}
    sink = SafetensorsSink.create(tmp_path / "x", {**specs, "none": TensorSpec((0,), torch.int8)})
    sink.write("a", 0, bytes(4))
    sink.write("b", 0, bytes(3))
    sink.write("c", 0, bytes(2))
    sink.write("c", 0, bytes(2))
    sink.write("d", 2, bytes(2))
    with pytest.raises(BadFile, match=r"3 of 5 tensors were not written wholly: 'b', 'c', 'd'. Nothing was put"):
        sink.commit()
    assert os.listdir(tmp_path) == []
    for again in (sink.commit, lambda: sink.write("a", 0, b"")):
        with pytest.raises(BadFile, match="committed or aborted"):
            again()


def test_many_scattered_writes_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with SafetensorsSink.create(path, {"a": TensorSpec((20000,), torch.uint8)}, durable=False) as sink:
        for start in (1, 0):
            for at in range(start, 20000, 2):
                sink.write("a", at, bytes([at % 251]))
    assert load_file(path)["a"].tolist() == [at % 251 for at in range(20000)]


@given(st.permutations(list(MIXED)), st.sampled_from([1, 7, 1 << 20]))
@settings(max_examples=30)
def test_whole_tensors_are_copied_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, order: list[str], part: int
) -> None:
    folder = tmp_path_factory.mktemp("whole")
    save_file(MIXED, folder / "source")
    source = SafetensorsSource(folder / "source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fdsd.storage.slots._PART", part)
        with SafetensorsSink.create(folder / "x.safetensors", {name: source.specs()[name] for name in order}) as sink:
            counts = list(sink.copy_tensors([(name, source.extent(name)) for name in order]))
    assert sum(counts) == sum(value.nbytes for value in MIXED.values()) and max(counts) <= part
    target = SafetensorsSource(folder / "x.safetensors")
    assert all(raw(read(target, name)) == raw(value) for name, value in MIXED.items())


def test_a_copy_of_another_size_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.arange(4.0), "y": torch.arange(3.0)}, tmp_path / "source")
    source = SafetensorsSource(tmp_path / "source")
    path = tmp_path / "x.safetensors"
    specs = {"a": TensorSpec((4,), torch.float32), "b": TensorSpec((4,), torch.float32)}
    with (
        pytest.raises(SpecMismatch, match="'b' has 16 bytes, and cannot be a copy of 12"),
        SafetensorsSink.create(path, specs) as sink,
    ):
        list(sink.copy_tensors([("a", source.extent("x")), ("b", source.extent("y"))]))
    with (
        pytest.raises(BadFile, match="1 of 2 tensors were not written wholly: 'b'"),
        SafetensorsSink.create(path, specs) as sink,
    ):
        list(sink.copy_tensors([("a", source.extent("x"))]))
    assert os.listdir(tmp_path) == ["source"]
