"""Real ranks for tests: gloo processes on the CPU, each a fork of the test process, killed at a hard timeout.

A fork sees everything that the test sees: functions defined in a test, closures, rewritten assertions, warnings that
are errors. It is what torch's own DataLoader does to the process it runs in; one thread a rank keeps it safe.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from attrs import define, field

__all__ = ["RankDied", "RankError", "RankFailure", "RankHung", "run_ranks", "store_of_rank"]

_GRACE = 5.0  # how long the others may take to notice that a rank has failed
_CLOSING = 2.0  # how long ranks that are done may take to close their process groups
_PRELOADED = (
    "torch._dynamo",  # the first operation on a DTensor loads it
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed._shard.sharded_tensor",
)
_FREED = "Deallocating Tensor that still has live PyObject references"
_store: dist.Store | None = None


class RankFailure(AssertionError):
    """Ranks raised, died or hung; the message has the traceback or the stacks of each."""


class RankError(Exception):
    """Stands for an exception of a rank that cannot be pickled."""


class RankDied(Exception):
    """A rank ended before it had a result.

    Attributes:
        code: Its exit code, as ``subprocess`` gives it: negative for a signal.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        return f"ended with exit code {self.code} and without a result"


class RankHung(Exception):
    """A rank was killed at the timeout; the message has its stacks."""


def store_of_rank() -> dist.Store:
    """Give the store that the ranks of this run share, for functions that make their own process group."""
    assert _store is not None, "This process is no rank."
    return _store


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 60,
    init: bool = True,
    expect_errors: bool = False,
    group_timeout: float | None = None,
    store: Literal["tcp", "file"] = "tcp",
) -> list[Any]:
    """Call ``fn(rank, *args)`` on ``n`` ranks of a gloo process group.

    Args:
        fn: Any function, a local one or a closure too; what it returns is pickled.
        n: The number of ranks.
        *args: What else the function gets.
        timeout: After so many seconds all ranks are killed.
        init: Whether the default process group is there; if not, see ``store_of_rank``.
        expect_errors: Give what a rank raised as its result, ``RankDied`` for one that ended, and ``RankHung`` for
            one that had to be killed. Ranks that are done then stay alive (with a store of theirs) until all are.
        group_timeout: The timeout of the process group in seconds; that of the run if left out.
        store: ``tcp``: rank 0 is the server, and the store dies with it. ``file``: the store survives all ranks.

    Returns:
        For each rank its result.

    Raises:
        RankFailure: Some rank raised, ended or hung, and ``expect_errors`` is not set.
    """
    __tracebackhide__ = True
    _preload()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        run = _Run(Path(folder), os.pipe(), n, init, expect_errors, group_timeout or timeout, store)
        ranks: list[_Rank] = []
        try:
            for rank in range(n):
                ranks.append(_start(run, rank, ranks, fn, args))
            run.close()
            _collect(ranks, time.monotonic() + timeout, expect_errors)
            _dump_hung(ranks, run)
        finally:
            run.close()
            for rank in ranks:
                rank.pipe.close()  # which is what those that are done wait for
            deadline = time.monotonic() + _CLOSING
            for rank in ranks:
                rank.end(deadline)
    outcomes = [rank.result() for rank in ranks]
    failed = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, _Raised)}
    if failed and not expect_errors:
        raise RankFailure(_told(failed, ranks, timeout))
    return [outcome.error if isinstance(outcome, _Raised) else outcome for outcome in outcomes]


# -- the test's side -------------------------------------------------------------------------------------------------


@define
class _Run:
    folder: Path
    port: tuple[int, ...]  # a pipe, where rank 0 says at which port its store is
    n: int
    init: bool
    expect_errors: bool
    group_timeout: float
    store: str

    def close(self) -> None:
        for end in self.port:
            os.close(end)
        self.port = ()

    def stacks(self, rank: int) -> Path:
        return self.folder / f"stacks-{rank}"

    def read_stacks(self, rank: int) -> str:
        """Give the stacks that a rank has written, without what the test process had called before the fork."""
        text = self.stacks(rank).read_text() if self.stacks(rank).exists() else ""
        return re.sub(r"( in _live\n)(?:  .*\n)+", r"\1", text)


@define
class _Raised:
    error: BaseException
    text: str


@define
class _Rank:
    """A rank as the test sees it; ``report`` is the pickled outcome, ``None`` as long as there is none."""

    pid: int
    pipe: Connection
    report: bytes | None = None
    is_open: bool = True
    code: int | None = None
    stacks: str = ""
    reported_at: float = field(default=float("inf"))

    def poll(self) -> None:
        try:
            self.report = self.pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.is_open = False
        self.reported_at = time.monotonic()

    def end(self, deadline: float) -> None:
        """Wait until the process has ended, or kill it (old versions of gloo hang now and then while they close)."""
        if self.code is None:
            if self.is_open or not _ends(self.pid, deadline):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            self.code = 0

    def result(self) -> Any:
        if self.report is not None:
            return pickle.loads(self.report)
        error = RankHung(self.stacks) if self.is_open else RankDied(self.code or 0)
        return _Raised(error, str(error))


def _ends(pid: int, deadline: float) -> bool:
    pause = 0.001
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(0.05, pause * 2)
    return True


@cache
def _preload() -> None:
    """Import once what ranks need, so that no rank has to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _PRELOADED:
            importlib.import_module(name)
        torch.compile(torch.nn.Identity(), backend="eager")  # which looks for all backends


def _start(run: _Run, rank: int, others: Sequence[_Rank], fn: Callable[..., Any], args: tuple[Any, ...]) -> _Rank:
    ours, theirs = Pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads; pytest-xdist has one that only reads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        theirs.close()
        return _Rank(pid, ours)
    try:
        for other in others:
            other.pipe.close()  # a rank that has the test's end of a pipe would not see it close
        ours.close()
        _live(run, rank, parent, theirs, fn, args)
    finally:
        os._exit(70)  # never reached, unless the helper itself is broken; a rank must not go on as a test process


def _collect(ranks: Sequence[_Rank], deadline: float, expect_errors: bool) -> None:
    """Take reports until all are there, the deadline has come, or the others have had their time after a failure."""
    while waiting := {rank.pipe: rank for rank in ranks if rank.is_open}:
        failed = [rank.reported_at for rank in ranks if not rank.is_open and _has_failed(rank)]
        until = deadline if expect_errors or not failed else min(deadline, min(failed) + _GRACE)
        ready = wait(list(waiting), max(0.0, until - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            waiting[pipe].poll()


def _has_failed(rank: _Rank) -> bool:
    return rank.report is None or isinstance(rank.result(), _Raised)


def _dump_hung(ranks: Sequence[_Rank], run: _Run) -> None:
    """Have the stacks of the hanging ranks written, while all of them still hang."""
    hung = [(i, rank) for i, rank in enumerate(ranks) if rank.is_open]
    for _, rank in hung:
        os.kill(rank.pid, signal.SIGUSR1)
    until = time.monotonic() + 2
    for i, rank in hung:
        while not rank.stacks.endswith("\n") and time.monotonic() < until:
            time.sleep(0.05)
            rank.stacks = run.read_stacks(i)


def _told(failed: dict[int, _Raised], ranks: Sequence[_Rank], timeout: float) -> str:
    all_hang = all(isinstance(outcome.error, RankHung) for outcome in failed.values())
    lines = [f"{len(failed)} of {len(ranks)} ranks failed."]
    for i, outcome in sorted(failed.items(), key=lambda item: ranks[item[0]].reported_at):  # the first cause first
        if isinstance(outcome.error, RankHung):
            why = f"after {timeout} s" if all_hang else f"{_GRACE} s after another rank had failed"
            lines.append(f"rank {i} hung and was killed {why}. Its stacks:\n{outcome.text}")
        else:
            lines.append(f"rank {i}: {outcome.text}")
    return "\n\n".join(lines)


# -- a rank's side ---------------------------------------------------------------------------------------------------


def _live(
    run: _Run, rank: int, parent: int, pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...]
) -> NoReturn:
    """Be a rank: run, report, wait for the test, end."""
    with run.stacks(rank).open("w") as stacks:
        _settle(rank, run, parent, stacks)
        try:
            _join(run, rank)
            outcome = fn(rank, *args)
            report = pickle.dumps(outcome)
        except BaseException as error:
            _send(pipe, _pickled(error))
            if run.expect_errors:
                wait([pipe])
            os._exit(1)  # without a word to its process group, which could wait for messages that never come
        _send(pipe, report)
        wait([pipe])
        if dist.is_initialized():
            dist.destroy_process_group()
        os._exit(0)  # without what the test process would do at its end


def _settle(rank: int, run: _Run, parent: int, stacks: Any) -> None:
    gc.freeze()  # what the test process holds is no garbage of ours; looking at it would copy it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(70)
    torch.set_num_threads(1)
    # Of garbage, and of torch 2.9's own: its tp_clear empties a tensor's __dict__ while the collector holds the tensor.
    # What FSDP1 keeps there leads to views, which own the tensor in C++: the last one that goes frees it, and it warns.
    # That would be an error of whatever function of torch the collector happens to run in.
    if (2, 9) <= torch.__version__ < (2, 10):
        warnings.filterwarnings("ignore", message=_FREED)
    if torch.__version__ < (2, 7):  # distribute_tensor() on the CPU says so, though it draws no numbers
        warnings.filterwarnings("ignore", message="DTensor random operators")
    names = {"RANK": rank, "WORLD_SIZE": run.n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": run.n}
    os.environ.update({name: str(value) for name, value in names.items()})
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _join(run: _Run, rank: int) -> None:
    global _store
    timeout = timedelta(seconds=run.group_timeout)
    reader, writer = run.port
    if run.store == "file":
        _store = dist.FileStore(str(run.folder / "store"), run.n)
    elif rank == 0:
        _store = server = dist.TCPStore("127.0.0.1", 0, run.n, True, timeout, False)
        os.write(writer, server.port.to_bytes(4, "little") * (run.n - 1))
    else:
        os.close(writer)  # else nobody would see that rank 0 has ended
        port = os.read(reader, 4)
        assert port, "Rank 0 ended before it had a store."
        _store = dist.TCPStore("127.0.0.1", int.from_bytes(port, "little"), run.n, False, timeout, False)
    if run.init:
        dist.init_process_group("gloo", store=_store, rank=rank, world_size=run.n, timeout=timeout)


def _pickled(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        report = pickle.dumps(_Raised(error, text))
        pickle.loads(report)
    except Exception:
        report = pickle.dumps(_Raised(RankError(f"{type(error).__name__}: {error}"), text))
    return report


def _send(pipe: Connection, report: bytes) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(report)
