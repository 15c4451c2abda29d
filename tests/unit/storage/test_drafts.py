"""Files written aside: room reserved at once, other systems, early writing out, permissions."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fdsd.data.errors import BadFile, DiskError, FdsdError
from fdsd.data.spec import TensorSpec
from fdsd.storage import drafts
from fdsd.storage.safetensors_sink import SafetensorsSink
from fdsd.storage.safetensors_source import SafetensorsSource

from .conftest import Make, assert_holds, save, specs_of, tree

STATE = {"a": torch.arange(6.0), "b": torch.arange(3, dtype=torch.int8), "none": torch.empty(0, 2)}
OTHER = {"c": torch.arange(9.0)}


def test_a_full_disk_is_an_error_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fallocate(*_: Any) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(drafts, "_fallocate", fallocate)
    with pytest.raises(DiskError, match=r"x: \d+ bytes could not be reserved: No space left on device") as caught:
        SafetensorsSink.create(tmp_path / "new" / "x", specs_of(STATE))
    assert caught.value.errno == errno.ENOSPC and isinstance(caught.value, FdsdError)
    assert "make room or choose another place" in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR], ids=errno.errorcode.get)
def test_file_systems_that_cannot_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    codes = [code]

    def fallocate(*_: Any) -> int:
        ctypes.set_errno(codes.pop() if codes else errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(drafts, "_fallocate", fallocate)
    save(tmp_path / "x", STATE)
    assert_holds(tmp_path / "x", STATE)


def test_a_system_without_these_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_fallocate", None)
    monkeypatch.setattr(drafts, "_sync_file_range", None)
    monkeypatch.setattr(drafts, "_WRITEBACK", 1)
    monkeypatch.delattr(os, "copy_file_range")
    save(tmp_path / "x", STATE)
    assert_holds(tmp_path / "x", STATE)


@pytest.mark.parametrize("limit", [100, 200_000])
def test_a_real_limit_on_file_sizes(tmp_path: Path, fresh_python: Callable[..., str], limit: int) -> None:
    path = tmp_path / "x.safetensors"
    save(path, STATE)
    before = tree(tmp_path)
    code = """
import resource, sys, torch
from fdsd.data.errors import DiskError
from fdsd.data.spec import TensorSpec
from fdsd.storage.safetensors_sink import SafetensorsSink
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    with SafetensorsSink.create(sys.argv[1], {"a": TensorSpec((100_000,), torch.float32)}, overwrite=True) as sink:
        sink.write("a", 0, torch.arange(100_000.0))
except DiskError as error:
    print(error)
"""
    assert "x.safetensors" in fresh_python(code, str(path), str(limit))
    assert tree(tmp_path) == before


def test_writing_out_begins_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(drafts, "_sync_file_range", lambda *args: calls.append(args) or 0)
    monkeypatch.setattr(drafts, "_WRITEBACK", 64)
    save_file({"a": torch.arange(200.0)}, tmp_path / "source")
    extent = SafetensorsSource(tmp_path / "source").extent("a")
    for durable in (True, False):
        with SafetensorsSink.create(
            tmp_path / f"x{durable}", {"a": TensorSpec((200,), torch.float32)}, durable=durable
        ) as sink:
            sink.copy("a", 0, extent)
        assert len(calls) >= 800 // 64
    assert len(calls) <= 800 // 64 + 3


def test_new_files_have_the_modes_that_open_gives(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        save(tmp_path / "folder", STATE, max_shard_size="16B")
        (tmp_path / "plain").open("w").close()
    finally:
        os.umask(old)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in [*(tmp_path / "folder").iterdir(), tmp_path / "plain"]}
    assert modes == {0o640}


@pytest.mark.parametrize("mode", [0o600, 0o444, 0o664])
def test_a_replaced_file_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "x"
    save(path, STATE)
    path.chmod(mode)
    save(path, OTHER, overwrite=True)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert_holds(path, OTHER)


def test_a_name_that_is_too_long_is_an_error_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="File name too long"):
        SafetensorsSink.create(tmp_path / ("x" * 300), {})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("make", [SafetensorsSink.create, SafetensorsSink.create_folder])
def test_a_folder_that_cannot_be_made(tmp_path: Path, make: Make) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DiskError, match=r"file: the folder could not be made|x: the folder could not be made"):
        make(tmp_path / "file" / "x", {})
    with pytest.raises(BadFile, match="is no path"):
        make("a\0b", {})
