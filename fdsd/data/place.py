"""``Place``: where a tensor lies in memory, real or imagined. What is tied to what is decided by ``ties``."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

__all__ = ["Place", "row_major_or"]


class Place(NamedTuple):
    """Where a tensor lies: in which memory, from which element on, and how.

    Attributes:
        root: What tells the memory from any other, while both live.
        offset: The first element.
        strides: The step of each dim, 0 where it has one index or none; ``None`` for row-major.
    """

    root: Hashable
    offset: int = 0
    strides: tuple[int, ...] | None = None

    def steps(self, shape: Sequence[int]) -> list[int]:
        """Give the step of each dim of a tensor of this shape.

        >>> Place("x").steps((2, 3)), Place("x", 0, (1, 2)).steps((2, 3))
        ([3, 1], [1, 2])
        """
        if self.strides is not None:
            return list(self.strides)
        steps, step = [1] * len(shape), 1
        for dim in reversed(range(len(shape))):
            steps[dim] = step
            step *= max(shape[dim], 1)
        return steps

    def moved(self, shape: Sequence[int], steps: Sequence[int], offset: int = 0) -> Place:
        """Give the place of a view of this memory.

        Args:
            shape: The shape of the view.
            steps: Its steps.
            offset: How many elements behind this place it begins.

        >>> Place("x").moved((2, 3), (3, 1)), Place("x", 4).moved((3, 1), (1, 3), 2)
        (Place(root='x', offset=0, strides=None), Place(root='x', offset=6, strides=None))
        """
        return Place(self.root, self.offset + offset, row_major_or(shape, steps))


def row_major_or(shape: Sequence[int], steps: Sequence[int]) -> tuple[int, ...] | None:
    """Write strides in the one way in which equal views have equal ones; ``None`` if they are row-major."""
    step, is_row_major = 1, True
    for size, given in zip(reversed(shape), reversed(steps), strict=True):
        is_row_major = is_row_major and (size <= 1 or given == step)
        step *= size
    if is_row_major or not step:
        return None
    return tuple([0 if size == 1 else given for size, given in zip(shape, steps, strict=True)])
