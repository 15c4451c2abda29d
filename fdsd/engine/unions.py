"""What the ranks of a group know together: statements, tables that may differ by rank, and errors, told to all.

Collective. Tensors do not travel here.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fdsd.data.errors import RankDisagreement, Unsupported
from fdsd.data.protocols import World
from fdsd.engine.asking import ask, told_ranks
from fdsd.engine.failures import failure_of, raise_if_failed, text_of

__all__ = ["agree_alike", "agree_on", "agreed_order", "everyone", "share_objects", "together", "union_of"]

V = TypeVar("V")


def agree_on(world: World, error: BaseException | None, what: str) -> None:
    """Raise the same error on all ranks if something went wrong on one of them; alone, raise the error itself.

    Args:
        world: The ranks.
        error: What went wrong here.
        what: What was tried.
    """
    if len(world.ranks) > 1:
        about = "" if error is None or text_of(error).startswith(f"{what}:") else what
        told = ask(world, what, None if error is None else failure_of(error, about), error)
        raise_if_failed(told, world.ranks, error)
    elif error is not None:
        raise error


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
    error: BaseException | None = None
    try:
        made.append(action())
    except BaseException as found:  # one that is interrupted tells the others too
        error = found
    agree_on(world, error, what)
    return made[0]


def everyone(world: World, statement: V, what: str) -> list[V]:
    """Give what each rank states, in the order of ranks; equal statements do not travel.

    Args:
        world: The ranks.
        statement: Plain values that can be pickled.
        what: What they are, for errors.

    Raises:
        Unsupported: A statement cannot be sent; on all ranks.

    >>> from fdsd.comms.alone import Alone
    >>> everyone(Alone(), "so be it", "wishes")
    ['so be it']
    """
    if len(world.ranks) == 1:
        return [statement]
    digest, error = b"", None
    try:
        digest = hashlib.sha256(pickle.dumps(statement)).digest()
    except Exception as found:  # whatever a user's class raises
        error = Unsupported(f"{what}: some values cannot be sent to other ranks: {found}.")
    told = ask(world, what, (digest, None if error is None else failure_of(error)), error)
    raise_if_failed([failure for _, failure in told], world.ranks, error)
    if len({one for one, _ in told}) == 1:
        return [statement] * len(world.ranks)
    return ask(world, what, statement)


def agree_alike(world: World, verb: str, asked: Mapping[str, object]) -> None:
    """Raise on all ranks if they ask the same function for different things.

    Args:
        world: The ranks.
        verb: How errors call the asker.
        asked: What has to be equal: plain values by the names of the arguments.

    Raises:
        RankDisagreement: They differ; all that differ are named, with what each rank asks for.

    >>> from fdsd.comms.alone import Alone
    >>> agree_alike(Alone(), "save", {"path": "m.pt"})
    """
    told = everyone(world, dict(asked), f"{verb}: what is asked")
    problems: list[str] = []
    for name in asked:
        by_value: dict[str, list[int]] = {}
        for rank, one in zip(world.ranks, told, strict=True):
            by_value.setdefault(repr(one[name]), []).append(rank)
        if len(by_value) > 1:
            shown = ", ".join([f"{_short(value)} on {told_ranks(some)}" for value, some in list(by_value.items())[:10]])
            problems.append(f"{name} is {shown}")
    if problems:
        raise RankDisagreement(f"{verb}: the ranks ask for different things: {'; '.join(problems)}. Give all the same.")


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def union_of(
    world: World, table: Mapping[str, V], what: str, show: Callable[[V], object] = lambda value: value
) -> dict[str, V]:
    """Join the tables of all ranks, which must not contradict each other; equal ones do not travel.

    Args:
        world: The ranks.
        table: This rank's names and what it knows of them: plain values that can be pickled and compared.
        what: What the values are, for errors.
        show: What errors say of a value.

    Returns:
        The names of the first rank in its order, then those that only later ones have.

    Raises:
        RankDisagreement: Ranks know different things of one name; on all ranks.
        Unsupported: A value cannot be sent.

    >>> from fdsd.comms.alone import Alone
    >>> union_of(Alone(), {"a": 1}, "numbers")
    {'a': 1}
    """
    made: dict[str, V] = {}
    origin: dict[str, int] = {}
    clashes: list[str] = []
    for rank, given in zip(world.ranks, everyone(world, dict(table), what), strict=True):
        for name, value in given.items():
            if name not in made:
                made[name], origin[name] = value, rank
            elif made[name] != value:
                known = show(made[name])
                clashes.append(f"{name!r} is {known} on rank {origin[name]} and {show(value)} on rank {rank}")
    if clashes:
        shown = "; ".join(sorted(clashes)[:10])
        rest = f"; and {len(clashes) - 10} more" if len(clashes) > 10 else ""
        raise RankDisagreement(f"The ranks disagree on {what}: {shown}{rest}.")
    return made


def share_objects(world: World, mine: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Give the objects of all ranks: each rank keeps its own, and gets those that only others have.

    Args:
        world: The ranks.
        mine: This rank's objects by name, of any class that can be pickled.
        what: What they are, for errors.

    Raises:
        Unsupported: An object that others lack cannot be sent; on all ranks.

    >>> from fdsd.comms.alone import Alone
    >>> share_objects(Alone(), {"rng": {1, 2}}, "objects")
    {'rng': {1, 2}}
    """
    told = everyone(world, list(mine), what)
    senders: dict[str, int] = {}
    for rank, names in zip(world.ranks, told, strict=True):
        for name in names:
            senders.setdefault(name, rank)
    everywhere = set(senders).intersection(*told)
    lacking = [name for name in senders if name not in everywhere]
    if not lacking:
        return dict(mine)
    sent: dict[str, Any] = {}
    for given in ask(world, what, {name: mine[name] for name in lacking if senders[name] == world.rank}):
        sent.update(given)
    return {name: mine[name] if name in mine else sent[name] for name in senders}


def agreed_order(told: list[list[str]]) -> list[str]:
    """Give the names of all ranks: those of the first in its order, then those that only later ones have.

    >>> agreed_order([["b", "a"], ["a", "c"]])
    ['b', 'a', 'c']
    """
    return list(dict.fromkeys([name for names in told for name in names]))
