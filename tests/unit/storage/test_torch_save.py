"""Writing torch files: each tensor with its own elements, put in place whole."""

from __future__ import annotations

import errno
import os
import stat
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd.data.errors import BadFile, DestinationExists, DiskError, Unsupported
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict
from fdsd.data.ties import ties
from fdsd.storage.torch_file import TorchFileSource
from fdsd.storage.torch_save import compact, save_torch

from .conftest import raw, tree


def stored_bytes(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        return sum(info.file_size for info in archive.infolist() if "/data/" in info.filename)


@given(st.data())
def test_compacting_keeps_values_ties_and_views_and_never_grows(data: st.DataObject) -> None:
    bases = [torch.arange(24.0) + 100 * i for i in range(2)]
    state: dict[str, torch.Tensor] = {}
    for i in range(data.draw(st.integers(1, 6))):
        base = data.draw(st.sampled_from(bases))
        start, length = data.draw(st.tuples(st.integers(0, 12), st.integers(0, 12)))
        state[f"t{i}"] = base[start : start + length] if data.draw(st.booleans()) else base.view(4, 6).t()
    before = {name: raw(value) for name, value in state.items()}
    made = compact(state)
    assert {name: raw(value) for name, value in made.items()} == before
    assert ties(made) == ties(state)
    assert all(type(value) is torch.Tensor and value.data_ptr for value in made.values())
    kept = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in made.values()}
    distinct = {
        (value.untyped_storage()._cdata, value.storage_offset(), value.shape): value.nbytes for value in state.values()
    }
    assert sum(kept.values()) <= sum(distinct.values())


def test_a_view_saves_only_its_own_elements(tmp_path: Path) -> None:
    big = torch.arange(100_000.0)
    save_torch(tmp_path / "x.pt", {"a": big[5:9], "b": big[5:9], "c": big[::1000]})
    assert stored_bytes(tmp_path / "x.pt") == 4 * 4 + 100 * 4
    source = TorchFileSource(tmp_path / "x.pt")
    assert source.state["a"].tolist() == [5, 6, 7, 8] and source.state["c"].tolist() == big[::1000].tolist()
    assert source.aliases == {"b": "a"}


def test_views_that_fill_their_storage_stay_views(tmp_path: Path) -> None:
    qkv = torch.arange(12.0).reshape(6, 2)
    save_torch(tmp_path / "x.pt", dict(zip("qkv", qkv.split(2), strict=True)))
    loaded = torch.load(tmp_path / "x.pt")
    assert len({value.untyped_storage()._cdata for value in loaded.values()}) == 1
    assert torch.equal(torch.cat([loaded[name] for name in "qkv"]), qkv)
    assert stored_bytes(tmp_path / "x.pt") == 48


def test_plain_dicts_are_written_whatever_came(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    for state in (module.state_dict(), StateDict(module.state_dict())):
        save_torch(tmp_path / "x.pt", {"model": state, "epoch": 3, "none": {}}, overwrite=True)
        loaded = torch.load(tmp_path / "x.pt")
        assert type(loaded["model"]) is OrderedDict and loaded["model"]._metadata == module.state_dict()._metadata
        assert loaded["epoch"] == 3 and loaded["none"] == {}
        module.load_state_dict(loaded["model"])
    save_torch(tmp_path / "x.pt", StateDict({"p": module.weight, "i": torch.tensor(1), "o": "s"}), overwrite=True)
    loaded = torch.load(tmp_path / "x.pt")
    assert type(loaded) is dict and type(loaded["p"]) is torch.Tensor and loaded["o"] == "s"


def test_optimizer_state_keeps_its_integers(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save_torch(tmp_path / "x.pt", {"optimizer": optimizer.state_dict()})
    assert list(torch.load(tmp_path / "x.pt")["optimizer"]["state"]) == [0, 1]
    optimizer.load_state_dict(torch.load(tmp_path / "x.pt")["optimizer"])


def test_the_archive_is_named_like_the_file_and_nothing_else_is_left(tmp_path: Path) -> None:
    save_torch(tmp_path / "new" / "x.pt", {"a": torch.ones(1)})
    assert os.listdir(tmp_path / "new") == ["x.pt"]
    with zipfile.ZipFile(tmp_path / "new" / "x.pt") as archive:
        assert "x/data.pkl" in archive.namelist()


def test_a_destination_that_exists_needs_overwrite(tmp_path: Path) -> None:
    save_torch(tmp_path / "x.pt", {"a": torch.ones(1)})
    (tmp_path / "x.pt").chmod(0o640)
    with pytest.raises(DestinationExists, match=r"x\.pt exists; give overwrite=True"):
        save_torch(tmp_path / "x.pt", {})
    with pytest.raises(DestinationExists, match="name a file"):
        save_torch(tmp_path, {}, overwrite=True)
    save_torch(tmp_path / "x.pt", {"a": torch.zeros(1)}, overwrite=True)
    assert torch.load(tmp_path / "x.pt")["a"].item() == 0
    assert stat.S_IMODE((tmp_path / "x.pt").stat().st_mode) == 0o640


def test_a_file_can_be_replaced_by_a_rewrite_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    save_torch(path, {"a": torch.arange(1000.0)})
    source = TorchFileSource(path)
    save_torch(path, {"b": source.state["a"]}, overwrite=True)
    assert torch.load(path)["b"].tolist() == list(range(1000))


@pytest.mark.parametrize(
    "leaf, words",
    [
        (TensorSpec((), torch.int8), r"no data here: 'x'. Call materialize\(\)"),
        (lambda: 0, "torch.save cannot hold this"),
    ],
    ids=["spec", "function"],
)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, leaf: Any, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        save_torch(tmp_path / "x.pt", {"a": torch.ones(1), "x": leaf})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_a_failure_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    save_torch(tmp_path / "x.pt", {"a": torch.ones(1)})
    before = tree(tmp_path)

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises((DiskError, KeyboardInterrupt)):
        save_torch(tmp_path / "x.pt", {"a": torch.zeros(1)}, overwrite=True)
    assert tree(tmp_path) == before


def test_a_full_disk(tmp_path: Path, fresh_python: Callable[..., str]) -> None:
    path = tmp_path / "x.pt"
    save_torch(path, {"a": torch.ones(1)})
    before = tree(tmp_path)
    code = """
import resource, sys, torch
from fdsd.data.errors import DiskError
from fdsd.storage.torch_save import save_torch
for limit in (100, 1000, 300_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save_torch(sys.argv[1], {"a": torch.arange(100_000.0)}, overwrite=True)
    except DiskError as error:
        print(error)
"""
    assert fresh_python(code, str(path)).count("x.pt: it could not be written, the disk may be full") == 3
    assert tree(tmp_path) == before


def test_a_zero_byte_is_no_path() -> None:
    with pytest.raises(BadFile, match="is no path"):
        save_torch("a\0b", {})
