"""`Flow`: tensors that come one after the other on all ranks, and end on all when one rank closes it, at any point."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from fdsd.data.protocols import World
from fdsd.engine.asking import Step, Watch, leave

__all__ = ["Flow"]


class Flow(Iterator[tuple[str, torch.Tensor]]):
    """An iterator over names and tensors whose steps are collective.

    A generator that is closed before its first step does nothing, and the other ranks would wait for it. This one
    takes the first step then, together with them, and ends. It may be used in a ``with`` statement, which closes it.

    Once the ranks were out of step it has ended: what is left of it is at another point on each.

    Args:
        begin: Plans, and gives the generator; collective.
        world: The ranks; ``None`` for this process alone.

    >>> with Flow(lambda: (pair for pair in [("w", torch.ones(1))])) as flow:
    ...     next(flow)
    ('w', tensor([1.]))
    """

    def __init__(
        self, begin: Callable[[], Iterator[tuple[str, torch.Tensor]]], world: World | None = None, verb: str = "stream"
    ) -> None:
        self._begin = begin
        self._world = world
        self._verb = verb
        self._step = None if world is None else Step.of(world)
        self._items: Any = None
        self._is_over = False
        self._watch = Watch() if world is None else Watch().open()

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._is_over:
            raise StopIteration
        try:
            if self._items is None:
                if self._step is not None:
                    self._step.check(self._verb)
                self._items = self._begin()
            found: tuple[str, torch.Tensor] = next(self._items)
            return found
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self._is_over = True
        self._watch.close()

    def close(self) -> None:
        """End it, on all ranks; once is enough, and after the end there is nothing to do."""
        if self._is_over:
            return
        self._end()
        if self._items is None:
            if self._step is not None and self._step.is_past:
                return
            self._items = self._begin()
            next(self._items, None)
        self._items.close()

    def __enter__(self) -> Flow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(Exception):  # what is on its way says more
            self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if self._world is None:
                self.close()
            elif not self._is_over:
                leave(self._world, self._watch, self.close)
