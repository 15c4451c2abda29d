"""One verdict on all ranks: what each found is put together, and all raise the same error, or none does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import astuple, define, field

from fdsd.comms.alone import this_rank
from fdsd.compat._errors import LoadError
from fdsd.compat._meetings import Meeting
from fdsd.compat._worlds import world_over
from fdsd.data.errors import listing

__all__ = ["Findings", "agreed"]


@define
class Findings:
    """What stops a load on one rank, or on several.

    Attributes:
        missing: Names that are missing.
        unexpected: Names that are not expected.
        common: Those of them that are expected on no rank.
        errors: What else is wrong, whatever the options.
        faults: Errors that were raised, in words, with their ranks.
        collective: The meetings in which values come from other ranks.
        is_empty: Whether nothing at all was given.
        has_machines: Whether there are modules that load by code of their own.
    """

    missing: list[str] = field(factory=list)
    unexpected: list[str] = field(factory=list)
    common: list[str] = field(factory=list)
    errors: list[str] = field(factory=list)
    faults: list[str] = field(factory=list)
    collective: set[Meeting] = field(factory=set)
    is_empty: bool = False
    has_machines: bool = False

    def with_others(self, others: Iterable[Findings]) -> Findings:
        """Put findings together."""
        every = [self, *others]
        common = set(self.common).intersection(*[one.common for one in every])
        return Findings(
            _once(one.missing for one in every),
            _once(one.unexpected for one in every),
            [name for name in self.common if name in common],
            _once(one.errors for one in every),
            _once(one.faults for one in every),
            {meeting for one in every for meeting in one.collective},
            all(one.is_empty for one in every),
            any(one.has_machines for one in every),
        )


def agreed(mine: Findings, fault: BaseException | None, meetings: Sequence[Meeting]) -> Findings:
    """Put the findings of all ranks together. Collective in each meeting.

    What is heard in one meeting is told in the next ones, and a second time where somebody has several.

    Args:
        mine: What this rank found.
        fault: What was raised on it.
        meetings: Who meets, in an order that is the same on all ranks.

    Raises:
        BaseException: The fault of this rank.
        LoadError: Another rank had a fault.
    """
    known = mine if fault is None else Findings(faults=[f"Rank {this_rank()}: {type(fault).__name__}: {fault}"])
    again: list[Meeting] = []
    for meeting in meetings:
        heard = _heard(known, len(meetings), meeting)
        known = known.with_others(one for one, _ in heard)
        if max(count for _, count in heard) > 1:
            again.append(meeting)
    for meeting in again:
        known = known.with_others(one for one, _ in _heard(known, len(meetings), meeting))
    if fault is not None:
        raise fault
    if known.faults:
        raise LoadError(f"{listing(known.faults)[1:-1]}. Nothing has been written on any rank.")
    own = set(meetings)
    known.collective = {meeting for meeting in known.collective if meeting in own}
    return known


def _heard(known: Findings, count: int, meeting: Meeting) -> list[tuple[Findings, int]]:
    world = world_over(frozenset(meeting))
    statement = astuple(known, recurse=False), count
    said: list[Any] = [statement] if world is None else world.agree(statement)
    return [(Findings(*told), number) for told, number in said]


def _once(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys([item for some in lists for item in some]))
