"""What was made before, by what it was made of; the least recently used is forgotten. Threads may share it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

from attrs import define, field, frozen

__all__ = ["CacheInfo", "Recent"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@frozen
class CacheInfo:
    """How often something was found, and how often it had to be made; and how many are remembered."""

    hits: int
    misses: int
    size: int


@define
class Recent(Generic[K, V]):
    """Remembers what was made for the last keys.

    Args:
        most: How many are remembered.
        weight: What one weighs, if not all weigh the same.
        heaviest: How much all may weigh together; what weighs more by itself is not remembered.

    >>> recent = Recent[str, int](most=2)
    >>> [recent.get(key, lambda key=key: len(key)) for key in ("a", "bb", "a", "ccc", "a")]
    [1, 2, 1, 3, 1]
    >>> recent.info()
    CacheInfo(hits=2, misses=3, size=2)
    """

    most: int
    weight: Callable[[V], int] = field(default=lambda _: 0)
    heaviest: int = 0
    _made: OrderedDict[K, V] = field(factory=OrderedDict, init=False)
    _lock: Lock = field(factory=Lock, init=False, repr=False)
    _hits: int = field(default=0, init=False)
    _misses: int = field(default=0, init=False)
    _weight: int = field(default=0, init=False)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Give what was made for a key, or make it; meanwhile other threads go on, and may make it too."""
        with self._lock:
            if key in self._made:
                self._hits += 1
                self._made.move_to_end(key)
                return self._made[key]
            self._misses += 1
        made = make()
        with self._lock:
            if key not in self._made:
                self._made[key] = made
                self._weight += self.weight(made)
            while len(self._made) > self.most or (self._weight > self.heaviest and self._made):
                self._weight -= self.weight(self._made.popitem(last=False)[1])
        return made

    def info(self) -> CacheInfo:
        """Tell how often something was found and made.

        >>> Recent(most=1).info()
        CacheInfo(hits=0, misses=0, size=0)
        """
        return CacheInfo(self._hits, self._misses, len(self._made))

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._made.clear()
            self._weight = 0
