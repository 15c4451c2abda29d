"""What tests of the engine share: states of all kinds, equality by bytes, and folders as dicts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fdsd
from tests.helpers.tensors import patterns, same_bytes

MIXED: dict[str, torch.Tensor] = {
    "z.weight": patterns((5, 7), torch.bfloat16, 1),
    "layers.10.w": patterns((4, 6), torch.float32, 2),
    "layers.2.w": patterns((6, 4), torch.float32, 3),
    "mask": torch.tensor([True, False, True]),
    "step": torch.tensor(12345, dtype=torch.int64),
    "none": torch.empty(0, 3, dtype=torch.float16),
    "a.bias": patterns((9,), torch.uint8, 4),
}


def assert_same_state(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The same names in the same order, with the same bytes."""
    assert list(found) == list(expected)
    read = fdsd.materialize(found)
    for name, leaf in expected.items():
        if isinstance(leaf, torch.Tensor):
            assert same_bytes(read[name], leaf), name
        else:
            assert read[name] == leaf, name


def assert_file_holds(path: Path, expected: Mapping[str, Any]) -> None:
    assert_same_state(fdsd.open(path), expected)


def tree(folder: Path) -> dict[str, bytes | None]:
    """All that is in a folder, hidden files and folders (``None``) too."""
    found: dict[str, bytes | None] = {}
    for base, folders, names in os.walk(folder):
        found.update({str((Path(base) / name).relative_to(folder)): None for name in folders})
        for name in names:
            path = Path(base) / name
            is_broken = path.is_symlink() and not path.exists()
            found[str(path.relative_to(folder))] = os.readlink(path).encode() if is_broken else path.read_bytes()
    return found


@contextmanager
def unprivileged() -> Generator[None, None, None]:
    """Be a user whom permissions stop; the superuser is not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Generator[Path, None, None]:
    """A folder that other users can enter and, unless told, not write to."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
