"""What tests of storage share: tensors of every dtype that the format has, bytes, and folders as dicts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fdsd.storage.safetensors_header import DTYPES


def raw(tensor: torch.Tensor) -> bytes:
    """The row-major bytes of a tensor of any dtype."""
    if tensor.itemsize == 1:
        return bytes(tensor.view(torch.uint8).contiguous().reshape(-1).tolist())
    cells = tensor.resolve_conj().contiguous().reshape(-1)
    return bytes(cells.view(torch.uint8).tolist()) if cells.numel() else b""


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor whose elements differ, as far as the dtype has values."""
    numel = 1
    for size in shape:
        numel *= size
    if dtype is torch.bool:
        return (torch.arange(numel) % 3 == 1).reshape(shape)
    cells = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return (torch.arange(numel) * 7 + 1).to(cells).reshape(shape).view(dtype)


def tree(folder: Path) -> dict[str, bytes]:
    """All that is in a folder, hidden files too."""
    found: dict[str, bytes] = {}
    for base, _, names in os.walk(folder):
        for name in names:
            path = Path(base) / name
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


@pytest.fixture(params=sorted(DTYPES), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]
