"""Worlds of given ranks: of all, of a group's, or of those over which a tensor lies. Tensors are not touched here.

What lies over some ranks is brought together by these, and no others have to be there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from fdsd.comms.alone import Alone, this_rank
from fdsd.comms.new_groups import group_of_ranks
from fdsd.data.protocols import World

__all__ = [
    "Meeting",
    "default_world",
    "every_rank",
    "has_group",
    "is_among",
    "members_of",
    "numbers_of",
    "world_in",
    "world_over",
]

Meeting = tuple[int, ...]
"""Ranks that meet, by their numbers in the default group, ascending."""

_MADE: dict[Meeting, tuple[Any, Any]] = {}  # by ranks: the default group of that time, and the group made


def has_group() -> bool:
    """Tell whether there is a default process group.

    >>> has_group()
    False
    """
    return dist.is_available() and dist.is_initialized()


def every_rank() -> Meeting:
    """Give all ranks of the default process group.

    >>> every_rank()
    (0,)
    """
    return tuple(range(dist.get_world_size())) if has_group() else (0,)


def default_world() -> World | None:
    """Give the world of the default process group; ``None`` without one."""
    return _world_of(dist.group.WORLD) if has_group() else None


def world_over(ranks: Iterable[int]) -> World | None:
    """Give the world of some ranks, of which this is one: of a process group that has them, else of a new one.

    Collective over these ranks, the first time. A group that is made stays for later calls.

    Args:
        ranks: Their numbers in the default group.

    Returns:
        The world; ``None`` for this process alone.

    Raises:
        RanksLost: A group has to be made, and some of these ranks did not come.

    >>> world_over([0]) is None
    True
    """
    meeting = tuple(sorted(set(ranks)))
    if not has_group() or meeting in ((), (this_rank(),)):
        return None
    return _world_of(_group_of(meeting) or _new_group(meeting))


def _group_of(meeting: Meeting) -> Any:
    """Find a process group of exactly these ranks."""
    if len(meeting) == dist.get_world_size():
        return dist.group.WORLD
    groups: Any = dist.distributed_c10d._world.pg_group_ranks  # pyright: ignore[reportPrivateUsage]  # no public list
    wanted = set(meeting)
    return next((group for group, members in groups.items() if members.keys() == wanted), None)


def _new_group(meeting: Meeting) -> Any:
    """Make a group: a mesh of several dims has one for each of them, but none for all of its ranks."""
    default = dist.group.WORLD
    if meeting not in _MADE or _MADE[meeting][0] is not default:
        _MADE[meeting] = default, group_of_ranks(meeting)
    return _MADE[meeting][1]


def world_in(group: Any) -> World:
    """Give the world of a group; of all ranks if left out, and of this process alone where there are no others.

    >>> world_in(None)
    Alone(rank=0)
    """
    return default_world() or Alone() if group is None else _world_of(group)


def _world_of(group: Any) -> World:
    from fdsd.comms.world import world_of  # the group's own kinds are loaded when there is one

    return world_of(group)


def members_of(group: Any) -> Meeting:
    """Give the members of a group."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


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
