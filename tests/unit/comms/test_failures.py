"""Looking out for ranks by way of a store, with threads for ranks; and the words for what was found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch.distributed as dist

from fdsd.comms import failures
from fdsd.comms.failures import Inquiry, ask_around, count_failures, ranks_lost
from fdsd.data.errors import RanksLost

MakeStore = Callable[[], Any]


@pytest.fixture(params=["hash", "file"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Give a client of one store for each rank: of one that can append, and of one that cannot."""
    if request.param == "file":
        return lambda: dist.PrefixStore("p", dist.FileStore(str(tmp_path / "store"), -1))
    shared = dist.HashStore()
    return lambda: dist.PrefixStore("p", shared)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "WAIT", 1.0)
    monkeypatch.setattr(failures, "_BEAT", 0.05)
    monkeypatch.setattr(failures, "_LINGER", 0.2)


def ask(make_store: MakeStore, callers: Sequence[int], ranks: Sequence[int], late: float = 0) -> list[Inquiry]:
    """Let some ranks look out for all, each ``late`` seconds after the one before."""

    def one(place: int) -> Inquiry:
        time.sleep(place * late)
        return ask_around(make_store(), "group", callers[place], ranks)

    with ThreadPoolExecutor(len(callers)) as pool:
        return list(pool.map(one, range(len(callers))))


def test_all_are_there_and_nobody_waits(make_store: MakeStore) -> None:
    start = time.monotonic()
    for found in ask(make_store, [3, 1, 7], [3, 1, 7]):
        assert found == Inquiry({1, 3, 7}, "")
    assert time.monotonic() - start < 0.9


def test_some_are_missing(make_store: MakeStore) -> None:
    start = time.monotonic()
    for found in ask(make_store, [0, 2], [0, 1, 2, 3]):
        assert found == Inquiry({0, 2}, "")
    assert 1 <= time.monotonic() - start < 5


def test_those_who_come_late_see_those_who_wait(make_store: MakeStore) -> None:
    for found in ask(make_store, [1, 2, 3], [1, 2, 3, 4], late=0.3):
        assert found == Inquiry({1, 2, 3}, "")


def test_those_who_come_last_see_those_who_leave_as_soon_as_all_are_seen(make_store: MakeStore) -> None:
    for found in ask(make_store, [1, 2, 3], [1, 2, 3], late=0.3):
        assert found == Inquiry({1, 2, 3}, "")


def test_signs_of_earlier_failures_do_not_count(make_store: MakeStore) -> None:
    assert {*ask(make_store, [0, 1], [0, 1])[0].alive} == {0, 1}
    assert ask(make_store, [0], [0, 1]) == [Inquiry({0}, "")]
    assert ask(make_store, [1], [0, 1]) == [Inquiry({1}, "")]


def test_failures_are_counted(make_store: MakeStore) -> None:
    store = make_store()
    assert count_failures(store, "group") == 0
    ask(make_store, [0, 1], [0, 1])
    assert count_failures(store, "group") == 2
    assert count_failures(store, "other group") == 0


def test_strangers_are_no_members(make_store: MakeStore) -> None:
    """A mark of a rank that is not asked for, as of a group of the same name, is no member's."""
    found = ask(make_store, [5, 0], [0, 1])[1]
    assert found.alive == {0}


class Broken:
    """A store whose server is gone: at once, or without ever saying so."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.released = Event()

    def add(self, *_: Any) -> int:
        if self.error is None:
            self.released.wait(60)
            raise dist.DistNetworkError("failed to recv, got 0 bytes")
        raise self.error

    append: Any = add
    get: Any = add
    has_extended_api: Any = add


def test_a_store_that_is_gone() -> None:
    store = Broken(dist.DistNetworkError("[/a/b.cpp:7] failed to recv, got 0 bytes. Some hint"))
    found = ask_around(store, "group", 1, [0, 1])
    assert found.alive == {1}
    assert found.problem == "the store of the process group cannot be reached (failed to recv, got 0 bytes)"


def test_a_store_that_does_not_answer() -> None:
    store = Broken(None)
    before = set(threading.enumerate())
    start = time.monotonic()
    found = ask_around(store, "group", 1, [0, 1])
    assert found == Inquiry({1}, "the store of the process group does not answer")
    assert time.monotonic() - start < 3
    (waiting,) = set(threading.enumerate()) - before
    store.released.set()
    waiting.join(10)
    assert not waiting.is_alive()


def test_no_store() -> None:
    assert ask_around(None, "group", 1, [0, 1]).problem == "the process group has no store"
    assert failures.default_store() is None


UNDEFINED = (
    ". Tensors and files that were being written are undefined now, and the process group cannot be used any more: "
    "start all ranks again, and repeat the call."
)


@pytest.mark.parametrize(
    "inquiry, verdict",
    [
        (Inquiry({0, 1, 3}), "rank 2 gave no sign of life"),
        (Inquiry({1}), "ranks 0, 2, 3 gave no sign of life"),
        (Inquiry({0, 1, 2, 3}), "all ranks are still there, so the connection between them failed"),
        (Inquiry({1}, "it is gone"), "it is gone, so nobody can tell who is missing"),
        (
            Inquiry({0, 1, 3}, "it is gone"),
            "it is gone, so nobody can tell who is missing, but that ranks 0, 3 are there",
        ),
    ],
    ids=str,
)
def test_words(inquiry: Inquiry, verdict: str) -> None:
    error = ranks_lost("send to rank 2 (8 bytes)", 1, range(4), inquiry, RuntimeError("[/a/b.cc:1] Gone. Sorry!"))
    assert str(error) == f"send to rank 2 (8 bytes) failed on rank 1 (Gone): {verdict}{UNDEFINED}"
    assert type(error) is RanksLost and isinstance(error, RuntimeError)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "RuntimeError"),
        ("Broken pipe", "Broken pipe"),
        ("[/x/gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12208. This is\nmore", None),
        ("first line\nsecond line", "first line"),
    ],
)
def test_reasons(text: str, reason: str | None) -> None:
    error = ranks_lost("agreement", 1, range(2), Inquiry({1}), RuntimeError(text))
    expected = "Connection closed by peer [127.0.0.1]:12208" if reason is None else reason
    assert f"failed on rank 1 ({expected}): rank 0 gave" in str(error)
