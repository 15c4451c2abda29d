"""Which ranks take part, and which get the result. Tensors are not touched here.

A sharded tensor is gathered by the ranks over which it lies, and by no others, as with torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from fdsd.comms.alone import Alone, this_rank
from fdsd.compat._group import default_world, world_of_ranks
from fdsd.data.errors import Unsupported
from fdsd.data.protocols import World

__all__ = ["is_among", "numbers_of", "world_in", "world_over"]

_MADE: dict[tuple[int, ...], tuple[Any, Any]] = {}  # by ranks: the default group of that time, and the group made


def world_over(ranks: frozenset[int]) -> World | None:
    """Give the world of some ranks, of which this is one: of a process group that has them, else of a new one.

    Collective over these ranks, the first time. A group that is made stays for later calls.

    Args:
        ranks: Their numbers in the default group.

    Returns:
        The world; ``None`` for this process alone.

    >>> world_over(frozenset([0])) is None
    True
    """
    if ranks <= {this_rank()}:
        return None
    try:
        return world_of_ranks(ranks)
    except Unsupported:  # a mesh of several dims has a group for each of them, but none for all of its ranks
        return _world_of_new(tuple(sorted(ranks)))


def _world_of_new(ranks: tuple[int, ...]) -> World | None:
    torch_dist: Any = dist
    default = dist.group.WORLD
    if ranks not in _MADE or _MADE[ranks][0] is not default:
        _MADE[ranks] = default, torch_dist.new_group(list(ranks), use_local_synchronization=True)
    return world_of_ranks(frozenset(ranks))


def world_in(group: Any) -> World:
    """Give the world of a group; of all ranks if left out, and of this process alone where there are no others.

    >>> world_in(None)
    Alone(rank=0)
    """
    if group is None:
        return default_world() or Alone()
    from fdsd.comms.world import world_of  # the group's own kinds are loaded when there is one

    return world_of(group)


def numbers_of(ranks: Iterable[int], group: Any) -> frozenset[int] | None:
    """Give the numbers in the default group of ranks of a group; ``None`` for all, which no ranks stand for.

    >>> numbers_of((), None), numbers_of((0, 2), None)
    (None, frozenset({0, 2}))
    """
    given = frozenset(ranks)
    if not given or group is None:
        return given or None
    return frozenset([number for i, number in enumerate(dist.get_process_group_ranks(group)) if i in given])


def is_among(ranks: Iterable[int], group: Any) -> bool:
    """Tell whether this process is one of some ranks of a group; no ranks stand for all.

    >>> is_among((), None), is_among((1,), None)
    (True, False)
    """
    numbers = numbers_of(ranks, group)
    return numbers is None or this_rank() in numbers
