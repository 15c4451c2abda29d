"""Which format a path has."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fdsd.data.errors import BadFile, FdsdError, MissingFile, Unsupported
from fdsd.data.protocols import Source
from fdsd.storage.formats import FORMATS, detect, of_target, open_source

STATE = {"a": torch.arange(3.0)}


def write_torch(path: Path, **options: Any) -> None:
    torch.save(STATE, path, **options)


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x", "x.bin", "blob0af"])
@pytest.mark.parametrize("format", FORMATS)
def test_content_decides_not_the_name(tmp_path: Path, format: str, name: str) -> None:
    path = tmp_path / name
    if format == "torch":
        write_torch(path)
    else:
        save_file(STATE, path)
    assert detect(path) == format
    source = open_source(path)
    assert isinstance(source, Source)
    assert list(source.specs()) == ["a"]


def test_old_torch_files_and_pickles(tmp_path: Path) -> None:
    write_torch(tmp_path / "legacy", _use_new_zipfile_serialization=False)
    assert detect(tmp_path / "legacy") == "torch"
    (tmp_path / "pickle").write_bytes(pickle.dumps({}))
    assert detect(tmp_path / "pickle") == "torch"


@pytest.mark.parametrize("target", ["x.safetensors", "model.safetensors.index.json"])
def test_folders_by_what_they_hold(tmp_path: Path, target: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / target).write_bytes(b"")
    assert detect(tmp_path) == "safetensors"


def test_a_folder_with_a_torch_file(tmp_path: Path) -> None:
    write_torch(tmp_path / "pytorch_model.bin")
    assert detect(tmp_path) == "torch"
    assert list(open_source(tmp_path).specs()) == ["a"]
    write_torch(tmp_path / "model.pt")
    with pytest.raises(BadFile, match=r"several torch files: 'model.pt', 'pytorch_model.bin'"):
        open_source(tmp_path)
    save_file(STATE, tmp_path / "model.safetensors")
    assert detect(tmp_path) == "safetensors"


@pytest.mark.parametrize(
    "name, format",
    [
        ("x.safetensors", "safetensors"),
        ("x.pt", "torch"),
        ("x.PTH", "torch"),
        ("x.bin", "torch"),
        ("x.ckpt", "torch"),
        ("folder", "safetensors"),
    ],
)
def test_what_is_not_there_yet_goes_by_its_name(tmp_path: Path, name: str, format: str) -> None:
    assert detect(tmp_path / name) == format


@pytest.mark.parametrize("make", [lambda p: p.write_bytes(b"GGUF" + bytes(60)), lambda p: None], ids=["there", "new"])
def test_what_is_not_known_is_told_what_is(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "x.gguf"
    make(path)
    with pytest.raises(Unsupported, match=r"x\.gguf has no format .*'safetensors' \(.*'torch' \(\.pt, .*format="):
        detect(path)
    with pytest.raises(Unsupported, match=r"format='gguf' is not known.*'safetensors'"):
        detect(path, "gguf")


def test_an_unclear_file_goes_by_its_name_and_is_then_refused(tmp_path: Path) -> None:
    for name in ("x.safetensors", "x.pt"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(BadFile, match=name):
            open_source(tmp_path / name)


def test_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="gone is not there"):
        open_source(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingFile, match="no file"):
        open_source(tmp_path / "empty")
    with pytest.raises(MissingFile, match="none of the torch files"):
        open_source(tmp_path / "empty", format="torch")
    (tmp_path / "dangling.pt").symlink_to("nowhere")
    with pytest.raises(FdsdError, match="dangling"):
        open_source(tmp_path / "dangling.pt")


def test_a_key_is_for_files_that_hold_several(tmp_path: Path) -> None:
    torch.save({"model": STATE, "epoch": 1}, tmp_path / "x.pt")
    assert list(open_source(tmp_path / "x.pt", key="model").specs()) == ["a"]
    save_file(STATE, tmp_path / "x.safetensors")
    with pytest.raises(Unsupported, match="holds one state dict"):
        open_source(tmp_path / "x.safetensors", key="model")


@pytest.mark.parametrize(
    "name, format, expected",
    [
        ("x.safetensors", None, ("safetensors", True)),
        ("x.SafeTensors", None, ("safetensors", True)),
        ("x.PT", None, ("torch", True)),
        ("x.ckpt", None, ("torch", True)),
        ("folder", None, ("safetensors", False)),
        ("llama-3.1", None, ("safetensors", False)),
        ("folder", "torch", ("torch", True)),
        ("folder", "safetensors", ("safetensors", False)),
        ("x.pt", "safetensors", ("safetensors", True)),
        ("x.safetensors", "torch", ("torch", True)),
        ("x.npz", "torch", ("torch", True)),
    ],
)
def test_what_is_meant_by_a_path_to_write(name: str, format: str | None, expected: tuple[str, bool]) -> None:
    assert of_target(name, format) == of_target(Path(name), format) == expected


@pytest.mark.parametrize(
    "name, format",
    [("x.gguf", None), ("x.H5", None), ("model.safetensors.index.json", None), ("x.safetensors.index.json", "torch")],
)
def test_what_is_not_written(name: str, format: str | None) -> None:
    with pytest.raises(Unsupported, match="a format that is not written here"):
        of_target(name, format)


def test_formats_that_are_none() -> None:
    for format in ("gguf", "", 3, ["torch"]):
        with pytest.raises(Unsupported, match="is not known"):
            of_target("x", format)  # type: ignore[arg-type]
