"""What was written of the tensors of a sink, and what is missing. Nothing here writes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["Ledger"]


class Ledger:
    """Which bytes of each tensor were written, as intervals.

    >>> ledger = Ledger()
    >>> ledger.add("a", 0, 4)
    >>> ledger.lacks("a", 8), ledger.lacks("a", 4)
    (True, False)
    """

    def __init__(self) -> None:
        self.whole: set[str] = set()
        self._intervals: dict[str, list[tuple[int, int]]] = {}
        self._rooms: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, fqn: str, begin: int, end: int) -> None:
        """Note that the bytes of a tensor from ``begin`` to ``end`` were written."""
        with self._lock:
            known = self._intervals.setdefault(fqn, [])
            if known and known[-1][0] <= begin <= known[-1][1]:
                known[-1] = (known[-1][0], max(known[-1][1], end))
            else:
                known.append((begin, end))
            if len(known) > self._rooms.get(fqn, 4096):
                known[:] = _joined(known)
                self._rooms[fqn] = max(4096, 2 * len(known))  # so that joining stays cheap on the whole

    def lacks(self, fqn: str, nbytes: int) -> bool:
        """Tell whether some of a tensor's bytes were not written."""
        return nbytes > 0 and fqn not in self.whole and (0, nbytes) not in _joined(self._intervals.get(fqn, []))


def _joined(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((begin, end))
    return made
