"""What Git LFS leaves in the place of files that were not fetched is named as such, whatever it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

import fdsd
from fdsd.errors import BadFile

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 4976698672\n" % (b"4d7a" * 16)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "x.pt", "pytorch_model.bin", "model.safetensors.index.json", "weights", "x.gguf"],
)
@pytest.mark.parametrize("by_folder", [False, True])
def test_a_pointer_is_named(tmp_path: Path, name: str, by_folder: bool) -> None:
    (tmp_path / name).write_bytes(POINTER)
    if by_folder and name in ("x.pt", "weights", "x.gguf"):
        return  # a folder of these is no checkpoint
    with pytest.raises(BadFile, match=r"is a Git LFS pointer: the file itself, 4976698672 bytes.*git lfs pull") as told:
        fdsd.open(tmp_path if by_folder else tmp_path / name)
    assert name in str(told.value)


def test_a_pointer_without_a_size(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(POINTER[:60])
    with pytest.raises(BadFile, match=r"the file itself was not fetched"):
        fdsd.open(path)


def test_other_text_is_no_pointer(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"version 1 of my notes, which are long enough\n")
    with pytest.raises(BadFile, match="no safetensors file"):
        fdsd.open(path)
