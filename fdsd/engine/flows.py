"""`Flow`: tensors that come one after the other on all ranks, and end on all when one rank closes it, at any point."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

__all__ = ["Flow"]


class Flow(Iterator[tuple[str, torch.Tensor]]):
    """An iterator over names and tensors whose steps are collective.

    A generator that is closed before its first step does nothing, and the other ranks would wait for it. This one
    takes the first step then, together with them, and ends. It may be used in a ``with`` statement, which closes it.

    Args:
        begin: Plans, and gives the generator; collective.

    >>> with Flow(lambda: (pair for pair in [("w", torch.ones(1))])) as flow:
    ...     next(flow)
    ('w', tensor([1.]))
    """

    def __init__(self, begin: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        self._begin = begin
        self._items: Any = None
        self._is_over = False

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._is_over:
            raise StopIteration
        try:
            if self._items is None:
                self._items = self._begin()
            found: tuple[str, torch.Tensor] = next(self._items)
            return found
        except BaseException:
            self._is_over = True
            raise

    def close(self) -> None:
        """End it, on all ranks; once is enough, and after the end there is nothing to do."""
        if self._is_over:
            return
        self._is_over = True
        if self._items is None:
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
            self.close()
