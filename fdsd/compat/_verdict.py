"""One verdict on all ranks: what each found is put together, and all raise the same error, or none does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import define, field

from fdsd.compat._errors import LoadError
from fdsd.data.protocols import World

__all__ = ["Findings", "agreed"]


@define
class Findings:
    """What stops a load on one rank.

    Attributes:
        missing: Names that are missing.
        unexpected: Names that are not expected.
        errors: What else is wrong, whatever the options.
        fault: An error that was raised.
        is_collective: Whether this rank has to talk to others for the load itself.
        is_empty: Whether it was given nothing at all.
        has_machines: Whether it has modules that load by code of their own.
    """

    missing: list[str] = field(factory=list)
    unexpected: list[str] = field(factory=list)
    errors: list[str] = field(factory=list)
    fault: BaseException | None = None
    is_collective: bool = False
    is_empty: bool = False
    has_machines: bool = False


def agreed(mine: Findings, world: World | None, *, everywhere: bool = False) -> Findings:
    """Put the findings of all ranks together. Collective, if there is a world.

    Args:
        mine: What this rank found.
        world: Who works together.
        everywhere: Whether a name is unexpected only if it is so on every rank, since all got the same state dict.

    Raises:
        BaseException: The fault of this rank.
        LoadError: Another rank had a fault.
    """
    if world is None:
        if mine.fault is not None:
            raise mine.fault
        return mine
    heard: list[Findings] = [Findings(*said) for said in world.agree(_statement(mine))]
    if mine.fault is not None:
        raise mine.fault
    for rank, one in zip(world.ranks, heard, strict=True):
        if one.fault is not None:
            raise LoadError(f"Rank {rank} could not take part: {one.fault}. Nothing has been written on any rank.")
    common = set(mine.unexpected).intersection(*[one.unexpected for one in heard])
    unexpected = _once(one.unexpected for one in heard)
    return Findings(
        _once(one.missing for one in heard),
        [name for name in unexpected if name in common or not everywhere],
        _once(one.errors for one in heard),
        None,
        any(one.is_collective for one in heard),
        all(one.is_empty for one in heard),
        any(one.has_machines for one in heard),
    )


def _statement(mine: Findings) -> tuple[Any, ...]:
    fault = None if mine.fault is None else f"{type(mine.fault).__name__}: {mine.fault}"
    return mine.missing, mine.unexpected, mine.errors, fault, mine.is_collective, mine.is_empty, mine.has_machines


def _once(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys([item for some in lists for item in some]))
