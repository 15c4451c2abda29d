"""What the ranks of a group know together: tables that may differ by rank, joined; and errors, told to all.

Collective. Tensors do not travel here.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fdsd.data.errors import RankDisagreement, Unsupported, listing
from fdsd.data.protocols import World
from fdsd.engine.failures import failure_of, raise_if_failed

__all__ = ["agree_on", "together", "union_of"]

V = TypeVar("V")


def agree_on(world: World, error: BaseException | None, what: str) -> None:
    """Raise the same error on all ranks if something went wrong on one of them.

    Args:
        world: The ranks.
        error: What went wrong here.
        what: What was tried.
    """
    told = world.agree(None if error is None else failure_of(error, what))
    raise_if_failed(told, world.ranks, error)


def together(world: World, what: str, action: Callable[[], V]) -> V:
    """Do something on each rank that may fail on some, and raise on all then.

    Args:
        world: The ranks.
        what: What is tried.
        action: What each rank does.

    >>> from fdsd.comms.alone import Alone
    >>> together(Alone(), "counting", lambda: 3)
    3
    """
    made: list[V] = []
    error: Exception | None = None
    try:
        made.append(action())
    except Exception as found:
        error = found
    agree_on(world, error, what)
    return made[0]


def union_of(world: World, table: Mapping[str, V], what: str) -> dict[str, V]:
    """Join the tables of all ranks, which must not contradict each other; equal ones do not travel.

    Args:
        world: The ranks.
        table: This rank's names and what it knows of them: plain values that can be pickled and compared.
        what: What the values are, for errors.

    Returns:
        The names of the first rank in its order, then those that only later ones have.

    Raises:
        RankDisagreement: Ranks know different things of one name; on all ranks.
        Unsupported: A value cannot be sent.

    >>> from fdsd.comms.alone import Alone
    >>> union_of(Alone(), {"a": 1}, "numbers")
    {'a': 1}
    """
    packed, error = b"", None
    try:
        packed = pickle.dumps(dict(table))
    except Exception as found:  # whatever a user's class raises
        error = Unsupported(f"{what}: some values cannot be sent to other ranks: {found}.")
    agree_on(world, error, what)
    digest = hashlib.sha256(packed).digest()
    if len(set(world.agree(digest))) == 1:
        return dict(table)
    made: dict[str, V] = {}
    origin: dict[str, int] = {}
    clashes: list[str] = []
    for rank, given in zip(world.ranks, world.agree(dict(table)), strict=True):
        for name, value in given.items():
            if name not in made:
                made[name], origin[name] = value, rank
            elif made[name] != value:
                clashes.append(f"{name!r} is {made[name]} on rank {origin[name]} and {value} on rank {rank}")
    if clashes:
        raise RankDisagreement(f"The ranks disagree on {what}: {listing(clashes)}.")
    return made
