"""What tests of storage share: tensors of every dtype of the format, their bytes, saving, and systems that fail."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.storage.safetensors_header import DTYPES
from fdsd.storage.safetensors_sink import SafetensorsSink
from fdsd.storage.safetensors_source import SafetensorsSource

Make = Callable[..., SafetensorsSink]


@pytest.fixture(params=sorted(DTYPES), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


def raw(tensor: torch.Tensor) -> bytes:
    """The row-major bytes of a tensor of any dtype."""
    if tensor.itemsize == 1:
        return bytes(tensor.view(torch.uint8).contiguous().reshape(-1).tolist())
    cells = tensor.resolve_conj().contiguous().reshape(-1)
    return bytes(cells.view(torch.uint8).tolist()) if cells.numel() else b""


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor whose elements differ, as far as the dtype has values."""
    numel = TensorSpec(shape, dtype).numel
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


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(value.shape, value.dtype) for name, value in tensors.items()}


def save(path: Path, tensors: Mapping[str, torch.Tensor], **options: Any) -> None:
    """Save as one file or, with ``max_shard_size``, as a folder."""
    make: Make = SafetensorsSink.create_folder if "max_shard_size" in options else SafetensorsSink.create
    with make(path, specs_of(tensors), **options) as sink:
        for name, value in tensors.items():
            if name not in sink.aliases:
                sink.write(name, 0, value)


def read(source: Any, fqn: str) -> torch.Tensor:
    spec = source.specs()[fqn]
    out = torch.empty(spec.shape, dtype=spec.dtype)
    source.read(fqn, Region.whole(spec.shape), out)
    return out


def assert_holds(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The names in this order, and the bytes."""
    source = SafetensorsSource(path)
    assert list(source.specs()) == list(tensors)
    for name, value in tensors.items():
        assert source.specs()[name] == TensorSpec(value.shape, value.dtype)
        assert raw(read(source, name)) == raw(value), name


class Failing:
    """Calls of the system that fail: the one after ``good`` ones, or all after them."""

    def __init__(self, good: int, error: BaseException, *, forever: bool) -> None:
        self.good = good
        self.error = error
        self.forever = forever
        self.calls = 0

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls > self.good and (self.forever or self.calls == self.good + 1):
                raise self.error
            return real(*args, **options)

        return call

    @property
    def has_failed(self) -> bool:
        return self.calls > self.good

    @contextlib.contextmanager
    def at(self, monkeypatch: pytest.MonkeyPatch, names: Sequence[str]) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(os, name, self.wrap(getattr(os, name)))
            yield
