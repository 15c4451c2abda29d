"""A progress bar for long saves: on a terminal, and nowhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TextIO

__all__ = ["Progress", "quiet"]

_IS_QUIET = ContextVar("is_quiet", default=False)

_PATIENCE = 0.5
"""Seconds before a bar appears: what is done sooner needs none."""


@contextmanager
def quiet(enabled: bool = True) -> Generator[None, None, None]:
    """Show no bar within this context, on a terminal either.

    >>> with quiet(), Progress("saving", 100) as progress:
    ...     progress.advance(100)
    """
    token = _IS_QUIET.set(enabled or _IS_QUIET.get())
    try:
        yield
    finally:
        _IS_QUIET.reset(token)


class Progress:
    """Bytes done, speed and remaining time on standard error, if that is a terminal.

    Args:
        title: What is being done.
        total: How many bytes it will be.

    >>> with Progress("saving", 100) as progress:
    ...     progress.advance(100)
    """

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._bar: Any = None
        self._task: Any = None
        stream: TextIO | None = sys.stderr  # none where the caller closed it
        is_open = stream is not None and not stream.closed
        self._shows = is_open and stream is not None and stream.isatty() and not _IS_QUIET.get()

    def __enter__(self) -> Progress:
        self._begin = time.monotonic()
        return self

    def advance(self, count: int) -> None:
        """Count ``count`` more bytes as done."""
        self._done += count
        if not self._shows:
            return
        if self._bar is None:
            if time.monotonic() - self._begin < _PATIENCE:
                return
            self._start()
        self._update()

    def _update(self) -> None:
        self._bar.update(self._task, completed=self._done)

    def _start(self) -> None:
        from rich.console import Console  # a tenth of a second, which only those who see it pay
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._title, total=self._total)
        self._bar.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
