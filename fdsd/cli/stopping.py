"""Being told to stop: what schedulers send ends a command as an interrupt does, so that nothing half-written stays."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Stopped", "stoppable"]


class Stopped(KeyboardInterrupt):
    """The process was told to stop by a signal other than an interrupt."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _stop(number: int, _frame: FrameType | None) -> None:
    raise Stopped(number)


@contextmanager
def stoppable() -> Generator[None]:
    """Raise ``Stopped`` where the process would end without a word; outside the main thread, change nothing.

    >>> with stoppable():
    ...     pass
    """
    before: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal.Signals, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _stop)
                before.append(number)
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_DFL)
