"""Ranks that are lost: how those that are left learn of it, find out who is missing, and say so.

A transport knows at most which of its own connections broke. Who is still there is told by the store of the default
process group, where each rank that has met a failure gives signs of life for a few seconds.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Iterable
from datetime import timedelta
from importlib import import_module
from threading import Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist
from attrs import define, field

from fdsd.data.errors import RanksLost, listing

__all__ = ["Inquiry", "ask_around", "close_connections", "count_failures", "default_store", "ranks_lost"]

WAIT = 8.0
"""For how many seconds ranks that have met a failure look out for the others."""

_BEAT = 0.25  # a rank gives signs of life so often, and more seldom the more ranks there are
_LINGER = 0.75  # rank 0 is usually the server of the store: it stays longer, so that the others get their answer
_ALONE = 0x5D5E  # a tag that no message has


class Store(Protocol):
    """What is used of torch's stores."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, which is 0 if it is not there, and give it."""
        ...

    def append(self, key: str, value: str, /) -> None:
        """Append to a text; some stores cannot."""
        ...

    def get(self, key: str, /) -> bytes:
        """Give a text."""
        ...

    def has_extended_api(self) -> bool:
        """Tell whether the store can append."""
        ...


@define
class Inquiry:
    """What is known of the other ranks: which gave a sign of life, and why that may not be all."""

    alive: set[int]
    problem: str = ""


def default_store() -> Store | None:
    """Give the store of the default process group, if torch still has one."""
    try:
        c10d: Any = import_module("torch.distributed.distributed_c10d")
        store: Store = c10d._get_default_store()  # torch has no public name for it
    except (AttributeError, ImportError, RuntimeError, ValueError):
        return None
    return store


def close_connections(group: dist.ProcessGroup) -> None:
    """Break what connections gloo has left in a group, so that ranks that wait for this one notice at once.

    Else they would wait until their own timeout, and be missed by those that look out for them now. A receive that
    times out makes gloo close all pairs of its context; torch has no call that does it. Other backends stay as they
    are: some would wait for such a message for ever.
    """
    if "cpu:gloo" not in dist.get_backend_config(group).split(","):
        return
    with contextlib.suppress(RuntimeError, ValueError):
        never = dist.irecv(torch.empty(1, dtype=torch.uint8), None, group, _ALONE)
        if never is not None:
            never.wait(timedelta(milliseconds=1))


def count_failures(store: Store, name: str, *, add: int = 0) -> int:
    """Count the failures that ranks of a group have met so far, and perhaps one more."""
    return store.add(f"fdsd/failures/{name}", add)


def ask_around(store: Store | None, name: str, rank: int, ranks: Iterable[int]) -> Inquiry:
    """Give signs of life, and see which other ranks do, for ``WAIT`` seconds or until all did.

    Args:
        store: A store that all ranks share. It may be dead, too.
        name: What the ranks have in common: the name of their process group.
        rank: The own rank.
        ranks: All ranks.
    """
    found = Inquiry({rank})
    if store is None:
        found.problem = "the process group has no store"
        return found
    wait = WAIT + (_LINGER if rank == 0 else 0)
    # in a thread, since a store on a machine that is gone can block for minutes
    thread = Thread(target=_look_out, args=(store, name, rank, set(ranks), wait, found), daemon=True)
    thread.start()
    thread.join(wait + 2 * _BEAT + 0.5)
    if thread.is_alive():
        found.problem = "the store of the process group does not answer"
    return found


def _look_out(store: Store, name: str, rank: int, ranks: set[int], wait: float, found: Inquiry) -> None:
    until = time.monotonic() + wait
    try:
        count_failures(store, name, add=1)
        board = (_Log if store.has_extended_api() else _Counters)(store, f"fdsd/signs/{name}", rank, ranks)
        pause = max(_BEAT, len(ranks) / 256)
        while True:
            board.beat()
            found.alive |= board.seen() & ranks
            if found.alive == ranks or time.monotonic() > until:
                break
            time.sleep(pause if len(found.alive) > 1 else 0.02)
        # Those that began to look out only now count what is new, and this rank is done.
        board.beat()
    except (RuntimeError, ValueError) as error:  # the store's own errors are RuntimeErrors
        found.problem = f"the store of the process group cannot be reached ({_reason(error)})"


@define
class _Log:
    """Where ranks give signs of life: one text that all append to, so that one request reads the signs of all.

    Only signs count that are newer than the own first one, since a store may outlive a process group.
    """

    store: Store
    key: str
    rank: int
    ranks: set[int]
    first: str = field(factory=lambda: uuid.uuid4().hex)

    def beat(self) -> None:
        self.store.append(self.key, f" {self.rank}:{self.first}")

    def seen(self) -> set[int]:
        text = self.store.get(self.key).decode()
        signs = text[text.index(self.first) :].split()[1:]
        return {int(sign.partition(":")[0]) for sign in signs}


@define
class _Counters:
    """The same for stores that cannot append: one number a rank."""

    store: Store
    key: str
    rank: int
    ranks: set[int]
    before: dict[int, int] = field(init=False)
    found: set[int] = field(factory=set)

    def __attrs_post_init__(self) -> None:
        self.before = {rank: self._count(rank, 0) for rank in self.ranks}

    def _count(self, rank: int, add: int) -> int:
        return self.store.add(f"{self.key}/{rank}", add)

    def beat(self) -> None:
        self._count(self.rank, 1)

    def seen(self) -> set[int]:
        self.found |= {rank for rank in self.ranks - self.found if self._count(rank, 0) != self.before[rank]}
        return self.found


def ranks_lost(what: str, rank: int, ranks: Iterable[int], inquiry: Inquiry, error: BaseException) -> RanksLost:
    """Word what happened.

    >>> print(ranks_lost("A send to rank 2", 0, range(3), Inquiry({0, 1}), RuntimeError("Broken pipe")))
    A send to rank 2 failed on rank 0 (Broken pipe): rank 2 gave no sign of life. Tensors and files that were being \
written are undefined now, and the process group cannot be used any more: start all ranks again, and repeat the call.
    """
    missing = sorted(set(ranks) - inquiry.alive)
    lost = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {listing(missing)}"
    if inquiry.problem:
        others = sorted(inquiry.alive - {rank})
        known = f", but that ranks {listing(others)} are there" if others else ""
        verdict = f"{inquiry.problem}, so nobody can tell who is missing{known}"
    elif missing:
        verdict = f"{lost} gave no sign of life"
    else:
        verdict = "all ranks are still there, so the connection between them failed"
    return RanksLost(
        f"{what} failed on rank {rank} ({_reason(error)}): {verdict}. Tensors and files that were being written are "
        "undefined now, and the process group cannot be used any more: start all ranks again, and repeat the call."
    )


def _reason(error: BaseException) -> str:
    """Give the first sentence of an error of the transport, without the place in its source code."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    first = re.sub(r"^\[[^\]]*:\d+\]\s*", "", lines[0])
    return re.split(r"\.\s", first, maxsplit=1)[0].rstrip(".: ")
