"""Files of torch.save as a source: mapped, nothing executed, one state dict picked out."""

from __future__ import annotations

import collections
import os
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fdsd.data.errors import BadFile, FdsdError, MissingFile, UnknownName, UnsafeFile, Unsupported
from fdsd.data.protocols import Source
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.ties import tie_key, ties
from fdsd.storage.torch_file import TorchFileSource, load_torch
from tests.helpers.ranks import run_ranks

from .conftest import raw


@pytest.fixture(params=[True, False], ids=["zip", "legacy"])
def zipped(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def saved(tmp_path: Path, value: Any, zipped: bool = True) -> Path:
    path = tmp_path / "x.pt"
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path


W = torch.arange(12.0).reshape(3, 4)


def test_a_state_dict(tmp_path: Path, zipped: bool) -> None:
    state = {"w": W, "t": W.t(), "n": torch.tensor(3), "e": torch.empty(0, 2), "_extra_state": {"scale": W}, "k": 5}
    source = TorchFileSource(saved(tmp_path, state, zipped))
    assert isinstance(source, Source)
    assert dict(source.specs()) == {
        "w": TensorSpec((3, 4), torch.float32),
        "t": TensorSpec((4, 3), torch.float32),
        "n": TensorSpec((), torch.int64),
        "e": TensorSpec((0, 2), torch.float32),
    }
    assert list(source.state) == list(state)
    assert set(source.objects) == {"_extra_state", "k"} and source.objects["k"] == 5
    for name, spec in source.specs().items():
        out = torch.empty(spec.shape, dtype=spec.dtype)
        source.read(name, Region.whole(spec.shape), out)
        assert raw(out) == raw(state[name])  # type: ignore[arg-type]
    assert source.pieces("w")[0].owner == str(tmp_path / "x.pt")


def test_a_part_is_read_and_cast(tmp_path: Path) -> None:
    source = TorchFileSource(saved(tmp_path, {"t": W.t()}))
    out = torch.empty(2, 2, dtype=torch.int64)
    source.read("t", Region.box((1, 1), (2, 2)), out.t())
    assert torch.equal(out.t(), W.t()[1:3, 1:3].long())


def test_newer_files_are_mapped(tmp_path: Path) -> None:
    source = TorchFileSource(saved(tmp_path, {"w": W}))
    assert str(tmp_path / "x.pt") in Path("/proc/self/maps").read_text()
    assert torch.equal(source.state["w"], W)


def test_ties_and_versions_are_kept(tmp_path: Path, zipped: bool) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[1].weight = module[0].weight
    source = TorchFileSource(saved(tmp_path, module.state_dict(), zipped))
    assert source.aliases == {"1.weight": "0.weight"}
    assert ties(source.specs()) == [("0.weight", "1.weight")]
    assert tie_key(source.state["0.weight"]) == tie_key(source.state["1.weight"])
    assert source.metadata is not None and source.metadata["0"] == {"version": 1}


def test_parameters_are_leaves(tmp_path: Path) -> None:
    source = TorchFileSource(saved(tmp_path, {"p": torch.nn.Parameter(W)}))
    out = torch.empty(3, 4)
    source.read("p", Region.whole((3, 4)), out)
    assert torch.equal(out, W)


SEVERAL = {
    "model": {"w": W},
    "ema": {"state.dict": {"e": W}, "shadow": {"deep": {"d": W}}},
    "optimizer": {"state": {0: {"exp_avg": W}}, "param_groups": [{"lr": 0.1}]},
    "epoch": 3,
}


@pytest.mark.parametrize(
    "key, name", [("model", "w"), ("ema.state.dict", "e"), ("ema.shadow.deep", "d")], ids=["plain", "dots", "deep"]
)
def test_a_key_picks_a_state_dict(tmp_path: Path, key: str, name: str) -> None:
    assert list(TorchFileSource(saved(tmp_path, SEVERAL), key=key).specs()) == [name]


@pytest.mark.parametrize("key", [None, "gone", "ema", "optimizer", "optimizer.state", "epoch", "model.w", ""])
def test_otherwise_the_keys_are_listed(tmp_path: Path, key: str | None) -> None:
    with pytest.raises(UnknownName, match=r"x\.pt .*'model', 'ema\.state\.dict', 'ema\.shadow\.deep'"):
        TorchFileSource(saved(tmp_path, SEVERAL), key=key)


def test_a_file_without_names_and_tensors(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="holds a Tensor, not names and tensors"):
        TorchFileSource(saved(tmp_path, W))
    with pytest.raises(UnknownName, match="none that hold names and tensors"):
        TorchFileSource(saved(tmp_path, {0: W}))
    assert list(TorchFileSource(saved(tmp_path, {})).state) == []
    assert dict(TorchFileSource(saved(tmp_path, {"epoch": 3, "config": {"lr": 0.1}})).objects)["epoch"] == 3


def test_a_dict_within_itself(tmp_path: Path) -> None:
    loop: dict[str, Any] = {"w": W}
    loop["self"] = {"loop": loop}
    with pytest.raises(UnknownName, match="give key="):
        TorchFileSource(saved(tmp_path, loop))


class Custom:
    """A class that no state dict needs."""


class Runs:
    """A class whose pickle calls a function."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def test_code_is_never_run_and_its_names_are_told(tmp_path: Path, zipped: bool) -> None:
    mark = tmp_path / "ran"
    path = saved(tmp_path, {"w": W, "bad": Runs(str(mark))}, zipped)
    with pytest.raises(UnsafeFile, match=r"x\.pt asks for .*posix\.mkdir"):
        TorchFileSource(path)
    assert not mark.exists()


def test_all_refused_classes_of_a_file_are_named(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": W, "a": Custom(), "b": collections.deque([1])})
    with pytest.raises(UnsafeFile, match=r"'collections\.deque', '.*test_torch_file\.Custom'"):
        TorchFileSource(path)


def test_a_plain_pickle_is_no_torch_file(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    with pytest.raises(BadFile, match=r"x\.pt"):
        TorchFileSource(tmp_path / "x.pt")


def test_sharded_tensors_of_process_groups_are_refused_for_now(tmp_path: Path, fresh_python: Any) -> None:
    path = tmp_path / "rank.pt"

    def save(_: int) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = init_device_mesh("cpu", (1,))
            torch.save({"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}, path)

    run_ranks(save, 1)
    script = """
import sys
from fdsd.storage.torch_file import TorchFileSource
from fdsd.data.errors import Unsupported
for classes in ("without", "with"):
    if classes == "with":
        import torch.distributed.tensor
    try:
        TorchFileSource(sys.argv[1])
    except Unsupported as error:
        print(classes, error)
"""
    told = fresh_python(script, str(path)).splitlines()
    assert [line.split()[0] for line in told] == ["without", "with"]
    assert all("rank.pt holds sharded tensors of process groups" in line for line in told)


def test_tensors_that_are_not_dense_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"'s \(torch\.sparse_coo\)'"):
        TorchFileSource(saved(tmp_path, {"w": W, "s": W.to_sparse()}))


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_file(tmp_path: Path, zipped: bool, part: float) -> None:
    path = saved(tmp_path, {"w": torch.arange(100.0)}, zipped)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(BadFile, match=r"x\.pt"):
        TorchFileSource(path)


def test_changed_bytes_give_tensors_or_an_error_of_ours(tmp_path: Path, zipped: bool) -> None:
    path = saved(tmp_path, {"w": W, "b": torch.arange(3)}, zipped)
    whole = path.read_bytes()
    choose = random.Random(7)
    refused = 0
    for _ in range(250):
        changed = bytearray(whole)
        for _ in range(choose.randint(1, 3)):
            changed[choose.randrange(len(changed))] ^= 1 << choose.randrange(8)
        path.write_bytes(changed)
        try:
            TorchFileSource(path)
        except FdsdError:
            refused += 1
    assert refused > 20


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="gone"):
        load_torch(tmp_path / "gone")
    with pytest.raises(BadFile, match="no regular file"):
        load_torch(tmp_path)


def test_a_file_that_was_cut_after_it_was_opened_is_not_touched(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.arange(100_000.0)})
    source = TorchFileSource(path)
    os.truncate(path, 100)
    with pytest.raises(BadFile, match="was changed after it was opened"):
        source.read("w", Region.whole((100_000,)), torch.empty(100_000))


def test_unknown_names(tmp_path: Path) -> None:
    source = TorchFileSource(saved(tmp_path, {"weight": W}))
    with pytest.raises(UnknownName, match="nearest name is 'weight'"):
        source.read("wieght", Region.whole((3, 4)), torch.empty(3, 4))
