"""Pausing Python's garbage collector while very many small objects are made, none of which is garbage."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Generator[None, None, None]:
    """Let the collector rest: it would walk all that is made again and again, which takes as long as making it.

    Only for stretches that run no code of users. If it rests already, it goes on resting afterwards.

    >>> with collector_paused():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
