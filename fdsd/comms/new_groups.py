"""Process groups of some ranks, made by these alone.

torch names such a group by how many groups its ranks know, and ranks that know different numbers of them would wait for
each other under different names. So they settle on a number first, through the store, and what torch counts for the
groups of its users stays as it was: it names these by their count, too.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from fdsd.comms.failures import ask_around, default_store, ranks_lost

__all__ = ["group_of_ranks"]

_FAR = 1 << 40  # no group of a user gets such a number


def group_of_ranks(ranks: Sequence[int]) -> Any:
    """Make a process group; collective over its ranks, and no others have to be there.

    Args:
        ranks: Their numbers in the default group, in ascending order.

    Raises:
        RanksLost: Some of them did not come, or cannot be connected.
    """
    label = f"fdsd/groups/{'-'.join(map(str, ranks))}"
    torch_dist: Any = dist  # the types of new_group are not all declared
    try:
        with _counting(_settled(label, len(ranks))):
            return torch_dist.new_group(list(ranks), use_local_synchronization=True)
    except RuntimeError as error:  # those of the store too
        rank = dist.get_rank()
        found = ask_around(default_store(), label, rank, ranks)
        raise ranks_lost(f"Making a process group of the ranks {list(ranks)}", rank, ranks, found, error) from error


def _settled(label: str, num_ranks: int) -> int | None:
    """Settle on a number that none of the ranks has reached: the sum of what they count; ``None`` without a store."""
    store: Any = default_store()
    if store is None:
        return None
    turn = (store.add(f"{label}/came", 1) - 1) // num_ranks  # a store may outlive the default group
    total = f"{label}/{turn}/total"
    store.add(total, len(_torch_world().pg_names) + 1)
    if store.add(f"{label}/{turn}/told", 1) == num_ranks:
        store.set(f"{label}/{turn}/settled", "yes")
    store.wait([f"{label}/{turn}/settled"])
    settled: int = store.add(total, 0)
    return settled


@contextmanager
def _counting(number: int | None) -> Generator[None, None, None]:
    """Let torch count so many groups, as far as their names depend on it: versions take one count or the other."""
    if number is None:
        yield
        return
    world = _torch_world()
    names, count = world.pg_names, world.group_count
    fillers = [object() for _ in range(number - len(names))]
    names.update(dict.fromkeys(fillers, ""))
    world.group_count = _FAR + number
    try:
        yield
    finally:
        world.group_count = count
        for filler in fillers:
            del names[filler]


def _torch_world() -> Any:
    c10d: Any = dist.distributed_c10d
    return c10d._world  # torch has no public name for what it counts
