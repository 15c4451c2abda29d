"""Measuring what the demo states: times of several jobs in turn, and the peak of anonymous memory.

Nothing here knows what the jobs do.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

__all__ = ["PeakMemory", "anonymous_memory", "medians"]

_STATUS = "/proc/self/status"


def anonymous_memory() -> int | None:
    """Give the bytes of anonymous memory of this process (``RssAnon``); ``None`` where the system does not tell.

    Pages of files, which the kernel may drop at any time, do not count.
    """
    try:
        with open(_STATUS, encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("RssAnon:")]
        return int(lines[0][1]) * 1024
    except (OSError, IndexError, ValueError):
        return None


class PeakMemory:
    """Watches the anonymous memory of this process, a thousand times a second, while a block runs.

    Attributes:
        before: Bytes at the beginning, ``None`` where the system does not tell.
        peak: The most bytes seen.

    >>> with PeakMemory() as memory:
    ...     block = bytearray(1000)
    >>> memory.before is None or memory.peak >= memory.before
    True
    """

    def __init__(self) -> None:
        self.before = self.peak = anonymous_memory()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = anonymous_memory()
        if self.before is not None:
            self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self._look()

    def _look(self) -> None:
        now = anonymous_memory()
        if now is not None and self.peak is not None:
            self.peak = max(self.peak, now)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._watcher.ident is not None:
            self._watcher.join()
        self._look()


def medians(
    jobs: Mapping[str, Callable[[], None]], *, runs: int, before_each: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Time jobs in turn, each once a round, and give the median seconds of each.

    Args:
        jobs: What is timed.
        runs: How many rounds.
        before_each: Runs before each job, untimed.

    >>> list(medians({"nothing": lambda: None}, runs=3))
    ['nothing']
    """
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(runs):
        for name, job in jobs.items():
            before_each()
            begin = time.perf_counter()
            job()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) for name, found in seconds.items()}
