"""One save at a time to one destination, and what a killed one left behind goes with the next."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

import fdsd
from fdsd.data.spec import TensorSpec
from fdsd.errors import DestinationExists
from fdsd.storage import locks, torch_save
from fdsd.storage.locks import DestinationLock
from fdsd.storage.safetensors_sink import SafetensorsSink
from tests.helpers.ranks import RankDied, run_ranks

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4)}
TARGETS = ["x.safetensors", "out", "x.pt"]


def hidden(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(".fdsd-*"))


def lock_of(path: Path) -> DestinationLock:
    if path.suffix:
        return DestinationLock(path.parent, path.name)
    path.mkdir(exist_ok=True)
    return DestinationLock(path)


@pytest.mark.parametrize("name", TARGETS)
def test_a_second_save_is_refused_and_harms_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    fdsd.save(STATE, path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    lock = lock_of(path)
    with pytest.raises(DestinationExists, match=r"is being written by another save right now\. Wait until it is done"):
        fdsd.save({"c": torch.ones(1)}, path, overwrite=True)
    lock.release()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    fdsd.save({"c": torch.ones(1)}, path, overwrite=True)
    assert list(fdsd.open(path)) == ["c"]
    assert hidden(tmp_path) == []


def test_other_destinations_in_the_folder_are_free(tmp_path: Path) -> None:
    taken = [DestinationLock(tmp_path), DestinationLock(tmp_path, "x.pt"), DestinationLock(tmp_path, "y.pt")]
    fdsd.save(STATE, tmp_path / "z.safetensors")
    for lock in taken:
        lock.release()
        lock.release()
    assert hidden(tmp_path) == []


def test_a_forgotten_sink_lets_go(tmp_path: Path) -> None:
    sink: Any = SafetensorsSink.create(tmp_path / "x.safetensors", {"a": TensorSpec((2,), torch.int8)})
    del sink
    fdsd.save(STATE, tmp_path / "x.safetensors")
    assert hidden(tmp_path) == []


def killed(_: int, path: Path) -> None:
    """Save over a file, and die on the way."""

    def die(_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_and_die(_: Any, file: Any) -> None:
        Path(file).open("wb").close()
        die(file)

    state: Any = {"w": torch.ones(3)}
    if path.suffix == ".pt":
        module: Any = torch_save
        module.torch.save = write_and_die
    else:
        state = fdsd.map_tensors(die, "w", spec=lambda spec: spec)(fdsd.defer(state))
    fdsd.save(state, path, overwrite=True)


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_killed_save_left_goes_with_the_next(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    fdsd.save(STATE, path)
    (died,) = run_ranks(killed, 1, path, init=False, expect_errors=True)
    assert isinstance(died, RankDied) and died.code == -signal.SIGKILL
    left = hidden(tmp_path)
    assert any(name.endswith(".tmp") for name in left) and any(name.endswith(".lock") for name in left)
    assert list(fdsd.open(path)) == ["a", "b"]
    fdsd.save({"c": torch.ones(1)}, path, overwrite=True)
    assert hidden(tmp_path) == []
    assert list(fdsd.open(path)) == ["c"]


def test_drafts_of_other_destinations_stay(tmp_path: Path) -> None:
    with SafetensorsSink.create(tmp_path / "x.safetensors", {"a": TensorSpec((2,), torch.int8)}) as sink:
        others = hidden(tmp_path)
        fdsd.save(STATE, tmp_path / "y.safetensors")
        fdsd.save(STATE, tmp_path / "z.pt")
        assert hidden(tmp_path) == others
        sink.write("a", 0, torch.tensor([1, 2], dtype=torch.int8))


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_nothing_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    stale = tmp_path / ".fdsd-folder-0123.tmp"
    stale.write_bytes(b"x")

    def refuse(fd: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    fdsd.save(STATE, tmp_path)
    assert hidden(tmp_path) == [stale.name]
    assert list(fdsd.open(tmp_path)) == ["a", "b"]


def test_only_one_holds_it_however_many_try(tmp_path: Path) -> None:
    """Threads that take and release as fast as they can: never two at once, and nothing is left."""
    inside: list[int] = []
    most: list[int] = []
    start = Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(200):
            try:
                lock = DestinationLock(tmp_path, "x")
            except DestinationExists:
                continue
            inside.append(1)
            most.append(len(inside))
            inside.pop()
            lock.release()

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most and max(most) == 1
    assert hidden(tmp_path) == []


def saving(number: int, path: Path) -> list[str]:
    """Save again and again; tell how each went."""
    told: list[str] = []
    state = {f"{number}.{i}": torch.full((100,), float(number)) for i in range(number + 2)}
    torch.distributed.barrier()
    for _ in range(30):
        try:
            fdsd.save(state, path, overwrite=True, max_shard_size=500 * (number + 1))
            told.append("saved")
        except DestinationExists as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("name", ["out", "x.safetensors"])
def test_processes_that_save_to_one_destination_leave_one_checkpoint(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    fdsd.save(STATE, path)
    lines = [line for told in run_ranks(saving, 2, path) for line in told]
    assert len(lines) == 60 and "saved" in lines
    assert all(line == "saved" or "is being written by another save" in line for line in lines)
    state = fdsd.materialize(fdsd.open(path))
    (number,) = {int(name.split(".")[0]) for name in state}
    assert len(state) == number + 2
    assert all(leaf.tolist() == [float(number)] * 100 for leaf in state.values())
    assert hidden(tmp_path) == []
