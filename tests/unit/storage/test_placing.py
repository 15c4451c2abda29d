"""A save stands whole or not at all: full disks, interrupts and crashes at every call of the system."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fdsd.data.errors import BadFile, DiskError
from fdsd.storage import drafts
from fdsd.storage.safetensors_sink import SafetensorsSink
from fdsd.storage.safetensors_source import SafetensorsSource

from .conftest import Failing, Make, assert_holds, raw, save, specs_of, tree

OLD = {"a": torch.arange(6.0), "b": torch.arange(3.0), "c": torch.arange(4.0), "old": torch.arange(2.0)}
NEW = {"a": torch.arange(6.0) + 50, "b": torch.arange(3.0) + 60, "c": torch.arange(4.0) + 70, "new": torch.ones(2)}
FULL = OSError(errno.ENOSPC, "No space left on device")
FAULT = OSError(errno.EIO, "Input/output error")
KINDS = {
    "file to file": (None, None),
    "one to one": ("1MB", "1MB"),
    "one to shards": ("1MB", "16B"),
    "shards to one": ("16B", "1MB"),
    "same shards": ("16B", "16B"),
    "fewer shards": ("16B", "24B"),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def options_of(size: str | None) -> dict[str, Any]:
    return {} if size is None else {"max_shard_size": size}


class Case:
    """An old checkpoint, saved, and how the new one is saved over it."""

    def __init__(self, kind: str, base: Path) -> None:
        before, after = KINDS[kind]
        self.path = base / ("x.safetensors" if before is None else "folder")
        self.options = options_of(after)
        save(self.path, OLD, **options_of(before))

    def save(self) -> None:
        save(self.path, NEW, overwrite=True, **self.options)

    def copy_and_save(self, source: SafetensorsSource) -> None:
        """Let two tensors be copied, by the kernel, and two be written."""
        make: Make = SafetensorsSink.create_folder if self.options else SafetensorsSink.create
        extents = {name: source.extent(name) for name in ("a", "b")}
        with make(
            self.path,
            specs_of(NEW),
            overwrite=True,
            origins={name: extent.offset for name, extent in extents.items()},
            **self.options,
        ) as sink:
            for name, value in NEW.items():
                if name in extents:
                    sink.copy(name, 0, extents[name])
                else:
                    sink.write(name, 0, value)


def test_a_new_checkpoint_replaces_the_old_one_wholly(tmp_path: Path, kind: str) -> None:
    case = Case(kind, tmp_path / "over")
    case.save()
    save(tmp_path / "fresh" / case.path.name, NEW, **case.options)
    assert tree(tmp_path / "over") == tree(tmp_path / "fresh")
    assert_holds(case.path, NEW)


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full disk", "interrupt"])
@pytest.mark.parametrize("call", ["open", "pwrite", "copy_file_range", "ftruncate", "fchmod"])
def test_a_failure_while_writing_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: BaseException, call: str
) -> None:
    monkeypatch.setattr(drafts, "_fallocate", None)
    if call == "fchmod" and error is FULL:
        return  # a file system without permissions is no fault
    save_file(NEW, tmp_path / "source")
    source = SafetensorsSource(tmp_path / "source")
    case = Case(kind, tmp_path)
    before = tree(tmp_path)
    good = 0
    while True:
        failing = Failing(good, error, forever=True)
        with failing.at(monkeypatch, [call]), contextlib.suppress(DiskError, KeyboardInterrupt):
            case.copy_and_save(source)
        if not failing.has_failed or tree(tmp_path) != before:
            break
        good += 1
    assert_holds(case.path, NEW)
    assert not [name for name in tree(tmp_path) if ".fdsd-" in name]
    # only the courtesy sync of the folder, which opens it, may fail without harm
    assert good > 0 or call == "fchmod"
    assert call == "open" or not failing.has_failed


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full disk", "interrupt"])
def test_a_disk_that_loses_bytes_when_it_is_asked_to_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: BaseException
) -> None:
    case = Case(kind, tmp_path)
    before = tree(tmp_path)
    with Failing(0, error, forever=True).at(monkeypatch, ["fsync"]), pytest.raises((DiskError, KeyboardInterrupt)):
        case.save()
    assert tree(tmp_path) == before


@pytest.mark.parametrize("error", [FAULT, KeyboardInterrupt()], ids=["fault", "interrupt"])
@pytest.mark.parametrize("call", ["rename", "replace"])
def test_a_failure_while_renaming_undoes_the_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: BaseException, call: str
) -> None:
    case = Case(kind, tmp_path)
    before = tree(tmp_path)
    good = 0
    while True:
        failing = Failing(good, error, forever=False)
        with failing.at(monkeypatch, [call]), contextlib.suppress(DiskError, KeyboardInterrupt):
            case.save()
        if not failing.has_failed:
            break
        assert tree(tmp_path) == before
        good += 1
    assert (good > 0) == (call == "replace" or kind == "same shards")
    assert_holds(case.path, NEW)


def whole_or_asks(path: Path) -> str:
    """Say what a reader finds; a mixture of old and new is a failure."""
    try:
        names = list(SafetensorsSource(path).specs())
    except BadFile as error:
        text = str(error)
    else:
        assert_holds(path, NEW if names == list(NEW) else OLD)
        return "new" if names == list(NEW) else "old"
    assert "cut off" in text or "which are two checkpoints" in text
    everything = tree(path).values()
    assert all(any(raw(value) in data for data in everything) for value in [*OLD.values(), *NEW.values()])
    return "asks"


def test_a_crash_at_any_rename_or_removal_never_leaves_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """After a crash nothing runs any more, so all later renames and removals fail."""
    good, seen = 0, set()
    while True:
        case = Case(kind, tmp_path / str(good))
        failing = Failing(good, FAULT, forever=True)
        with failing.at(monkeypatch, ["rename", "replace", "unlink"]), contextlib.suppress(OSError):
            case.save()
        found = whole_or_asks(case.path)
        seen.add(found)
        if found == "asks":
            case.save()
            assert_holds(case.path, NEW)
            assert not [name for name in os.listdir(case.path) if name.startswith(".fdsd-old-")]
        if not failing.has_failed:
            break
        good += 1
    assert {"old", "new"} <= seen
    assert ("asks" in seen) == (kind in ("same shards", "one to shards", "shards to one"))


def test_an_interrupt_just_after_the_last_rename_leaves_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, OLD, max_shard_size="16B")
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        real(source, target)
        if str(target).endswith("index.json"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, NEW, max_shard_size="16B", overwrite=True)
    assert_holds(tmp_path, NEW)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".fdsd")]


def test_old_files_that_cannot_be_removed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, OLD, max_shard_size="16B")
    real = os.unlink

    def unlink(path: Any) -> None:
        if str(path).endswith("model-00002-of-00004.safetensors"):
            raise PermissionError(errno.EACCES, "Permission denied")
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        with pytest.raises(DiskError, match=r"stands, but .* removed: 'model-00002-of-00004"):
            save(tmp_path, NEW, max_shard_size="1MB", overwrite=True)
    assert_holds(tmp_path, NEW)


def test_only_files_of_the_old_checkpoint_are_removed(tmp_path: Path) -> None:
    index = (
        '{"weight_map": {"a": "config.json", "b": "../precious.safetensors", "c": "model-00001-of-00001.safetensors"}}'
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(index)
    kept = [folder / "config.json", folder / "other.safetensors", tmp_path / "precious.safetensors"]
    for path in [*kept, folder / "model-00001-of-00001.safetensors"]:
        path.write_bytes(b"x")
    save(folder, NEW, max_shard_size="1MB", overwrite=True)
    assert all(path.exists() for path in kept)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "other.safetensors"]


def test_a_broken_old_index_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    save(tmp_path, NEW, max_shard_size="1MB", overwrite=True)
    assert_holds(tmp_path, NEW)
