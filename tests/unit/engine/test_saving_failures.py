"""Failures in the middle of a save: a clear error that names the tensor, the old files whole, nothing left over."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fdsd
from fdsd.data.errors import BadFile, DiskError, FdsdError, MissingFile, SpecMismatch
from fdsd.storage.safetensors_source import SafetensorsSource
from tests.helpers.tensors import patterns

from .conftest import assert_file_holds, tree

STATE = {name: patterns((50, 40), torch.float32, seed) for seed, name in enumerate("abcd")}
OLD = {"old": patterns((30,), torch.int64)}
PATHS = ["out.safetensors", "out", "out.pt"]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a source, and old checkpoints under each name that will be saved to."""
    fdsd.save(STATE, tmp_path / "in.safetensors")
    for path in PATHS:
        fdsd.save(OLD, tmp_path / path)
    return tmp_path


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


class Failing:
    """Makes a function fail when it is called for the ``count``-th time."""

    def __init__(self, call: Callable[..., Any], error: BaseException, count: int) -> None:
        self.call = call
        self.error = error
        self.left = count

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.call(*args, **options)

    def method(self) -> Callable[..., Any]:
        """The same as a function, which a class binds to its instances."""

        def call(*args: Any) -> Any:
            return self(*args)

        return call


def then(action: Callable[[], Any]) -> fdsd.Pipeline:
    """A function of ``b`` that does something while the state is being saved."""

    def act(t: torch.Tensor) -> torch.Tensor:
        action()
        return t + 1

    return fdsd.map_tensors(act, "b", spec=fdsd.TensorSpec((50, 40), torch.float32))


def saved_before(folder: Path) -> dict[str, bytes | None]:
    return {name: data for name, data in tree(folder).items() if not name.startswith("in.")}


# -- the source ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("p", [fdsd.identity, fdsd.cast(torch.float64, "{_}")], ids=["copied", "cast"])
@pytest.mark.parametrize("change", ["truncated", "changed", "replaced", "gone"])
def test_a_source_that_changes_meanwhile(folder: Path, path: str, p: fdsd.Pipeline, change: str) -> None:
    source = folder / "in.safetensors"

    def act() -> None:
        if change == "truncated":
            os.truncate(source, 5000)
        elif change == "changed":
            with source.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"x")
            os.utime(source, ns=(1, 1))
        elif change == "replaced":
            fdsd.save(OLD, source, overwrite=True)
        else:
            source.unlink()

    before = saved_before(folder)
    state = (then(act) >> p)(fdsd.open(source))
    with pytest.raises(BadFile, match=r"in\.safetensors") as caught:
        fdsd.save(state, folder / path, overwrite=True)
    assert isinstance(caught.value, MissingFile) == (change == "gone")
    assert saved_before(folder) == before
    if path != "out.pt":
        assert "while saving '" in notes(caught.value)  # copies of neighbours are done together, so it may be either


def test_errors_of_a_torch_file_name_the_tensor(folder: Path) -> None:
    state = then((folder / "in.safetensors").unlink)(fdsd.open(folder / "in.safetensors"))
    with pytest.raises(BadFile) as caught:
        fdsd.save(state, folder / "out.pt", overwrite=True)
    assert "'c'" in str(caught.value) + notes(caught.value)


def test_a_mapped_torch_file_that_is_cut_does_not_kill_the_process(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "in.pt")
    state = then(lambda: os.truncate(tmp_path / "in.pt", 4096))(fdsd.open(tmp_path / "in.pt"))
    with pytest.raises(BadFile, match=r"in\.pt was changed after it was opened"):
        fdsd.save(state, tmp_path / "out.safetensors")
    assert tree(tmp_path).keys() == {"in.pt"}


@pytest.mark.parametrize("path", PATHS)
def test_a_source_that_is_gone_before(folder: Path, path: str) -> None:
    state = fdsd.open(folder / "in.safetensors")
    (folder / "in.safetensors").unlink()
    before = saved_before(folder)
    with pytest.raises(FdsdError, match=r"in\.safetensors"):
        fdsd.save(state, folder / path, overwrite=True)
    assert saved_before(folder) == before


# -- functions of users ----------------------------------------------------------------------------------------------


class Own(Exception):
    """An error of the user's."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("error", [Own("mine"), KeyboardInterrupt(), SystemExit(3), MemoryError("m")], ids=repr)
def test_a_function_that_raises(folder: Path, path: str, error: BaseException) -> None:
    def fail() -> None:
        raise error

    before = tree(folder)
    with pytest.raises(type(error)) as caught:
        fdsd.save(then(fail)(fdsd.open(folder / "in.safetensors")), folder / path, overwrite=True)
    assert caught.value is error
    assert tree(folder) == before


def test_the_error_of_a_function_names_the_tensor(folder: Path) -> None:
    def fail() -> None:
        raise Own("mine")

    with pytest.raises(Own) as caught:
        fdsd.save(then(fail)(fdsd.open(folder / "in.safetensors")), folder / "x.safetensors")
    assert "while saving 'b', " in notes(caught.value)


def test_a_function_that_gives_something_else(folder: Path) -> None:
    spec = fdsd.TensorSpec((50, 40), torch.float32)
    wrong = [(lambda t: t[:1], r"float32\[1, 40\]"), (lambda t: None, "NoneType")]
    for fn, text in wrong:
        before = tree(folder)
        with pytest.raises(SpecMismatch, match=text) as caught:
            fdsd.save(fdsd.map_tensors(fn, "b", spec=spec)(fdsd.open(folder / "in.safetensors")), folder / "x")
        assert "while saving 'b', " in notes(caught.value)
        assert tree(folder) == before


# -- the system ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["out.safetensors", "out"])
@pytest.mark.parametrize("call, count", [("copy", 1), ("pwrite", 1), ("pwrite", 3), ("preadv", 3)])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_system_call_that_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, call: str, count: int, code: int
) -> None:
    """A full disk, a full quota, a fault of the device: in the middle of a save."""
    p = fdsd.identity if call == "copy" else fdsd.cast(torch.float64, "{_}")
    state = p(fdsd.open(folder / "in.safetensors"))
    before = tree(folder)
    for each in ["copy_file_range", "preadv"] if call == "copy" else [call]:  # the kernel copies whole pages only
        if hasattr(os, each):
            monkeypatch.setattr(os, each, Failing(getattr(os, each), OSError(code, os.strerror(code)), count))
    with pytest.raises(DiskError, match=os.strerror(code)) as caught:
        fdsd.save(state, folder / path, overwrite=True, max_shard_size=10_000)
    monkeypatch.undo()
    assert caught.value.errno == code
    assert ("make room" in str(caught.value)) == (code != errno.EIO)
    assert tree(folder) == before
    if call == "preadv":
        assert f"while saving {'abcd'[count - 1]!r}, " in notes(caught.value)


CALLS = ["copy_file_range", "pwrite", "open", "replace", "rename", "unlink", "fchmod", "stat"]
MOMENTS = [(path, call, count) for path in ("out.safetensors", "out") for call in CALLS for count in (1, 2, 4, 7)]


@pytest.mark.parametrize("path, call, count", MOMENTS)
def test_an_interrupt_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, call: str, count: int) -> None:
    """Whenever an interrupt comes, the old checkpoint stands, or the new one: whole, and nothing beside it."""
    if not hasattr(os, call):
        pytest.skip(f"this system has no {call}")
    state = fdsd.open(folder / "in.safetensors")
    before = tree(folder)
    failing = Failing(getattr(os, call), KeyboardInterrupt(), count)
    monkeypatch.setattr(os, call, failing)
    interrupted = False
    try:
        fdsd.save(state, folder / path, overwrite=True, max_shard_size=10_000)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        monkeypatch.undo()
    assert interrupted == (failing.left <= 0)
    if tree(folder) != before:
        assert_file_holds(folder / path, STATE)
        assert not [name for name in tree(folder) if "fdsd-" in name]


FULL = """
import resource, sys
import torch
import fdsd
from fdsd.data.errors import DiskError
source, *targets = sys.argv[1:]
state = fdsd.cast(torch.float64, "{_}")(fdsd.open(source))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for target in targets:
    try:
        fdsd.save(state, target, overwrite=True)
    except DiskError as error:
        print(error)
"""


def test_files_may_not_grow(folder: Path) -> None:
    before = tree(folder)
    args = [sys.executable, "-W", "error", "-c", FULL, str(folder / "in.safetensors")]
    args += [str(folder / path) for path in PATHS]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == len(PATHS)
    for path, line in zip(PATHS, lines, strict=True):
        assert path in line and "unchanged" in line
    assert tree(folder) == before


INTERRUPT = """
import os, signal, sys, threading, time
import torch
import fdsd

def slow(t):
    print("now", flush=True)
    time.sleep(30)
    return t

state = fdsd.map_tensors(slow, "b", spec=lambda spec: spec)(fdsd.open(sys.argv[1]))
try:
    fdsd.save(state, sys.argv[2], overwrite=True)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_real_interrupt(folder: Path) -> None:
    before = tree(folder)
    args = [sys.executable, "-W", "error", "-c", INTERRUPT, str(folder / "in.safetensors"), str(folder / "out")]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "now\n"
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, rest) == (0, "interrupted\n")
    assert tree(folder) == before


def test_a_read_that_fails_names_the_tensor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = BadFile("bad sector")
    failing = Failing(SafetensorsSource.read, error, 2)
    monkeypatch.setattr(SafetensorsSource, "read", failing.method())
    state = fdsd.cast(torch.float64, "{_}")(fdsd.open(folder / "in.safetensors"))
    with pytest.raises(BadFile, match="bad sector") as caught:
        fdsd.save(state, folder / "out", overwrite=True)
    assert notes(caught.value) == "while saving 'b', float64[50, 40]"
