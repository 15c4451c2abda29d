"""One verdict on all ranks: what each found is put together, and all raise the same error, or none does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import astuple, define, field

from fdsd.comms.alone import this_rank
from fdsd.comms.optimizer_checks import Faults
from fdsd.comms.worlds import Meeting, world_over
from fdsd.compat._errors import LoadError
from fdsd.data.errors import RankDisagreement
from fdsd.data.values import several
from fdsd.engine.asking import ask

__all__ = ["NOTHING_READ", "Findings", "agreed", "in_words", "raise_faults"]

_NOTHING_WRITTEN = "Nothing has been written on any rank."
NOTHING_READ = "No rank has got a state dict."


@define
class Findings:
    """What stops a load on one rank, or on several.

    Attributes:
        missing: Names that are missing.
        unexpected: Names that are not expected.
        common: Those of them that are expected on no rank.
        errors: What else is wrong, whatever the options.
        collective: The meetings in which values come from other ranks.
        is_empty: Whether nothing at all was given.
        has_machines: Whether there are modules that load by code of their own.
        scalars: Names of one element and one dim that are wanted without dims.
        wishes: What is equal for ranks that wish for the same of others; ``None`` once they are known to differ.
        optim: What is wrong with the state of optimizers.
        fault: An error that was raised, in words.
    """

    missing: list[str] = field(factory=list)
    unexpected: list[str] = field(factory=list)
    common: list[str] = field(factory=list)
    errors: list[str] = field(factory=list)
    collective: set[Meeting] = field(factory=set)
    is_empty: bool = False
    has_machines: bool = False
    scalars: list[str] = field(factory=list)
    wishes: bytes | None = b""
    optim: Faults = field(factory=Faults)
    fault: str | None = None

    @classmethod
    def joined(cls, every: Sequence[Findings]) -> Findings:
        """Put findings together."""
        common = set[str](every[0].common).intersection(*[one.common for one in every])
        return cls(
            _once(one.missing for one in every),
            _once(one.unexpected for one in every),
            [name for name in every[0].common if name in common],
            _once(one.errors for one in every),
            {meeting for one in every for meeting in one.collective},
            all(one.is_empty for one in every),
            any(one.has_machines for one in every),
            _once(one.scalars for one in every),
            every[0].wishes if len({one.wishes for one in every}) == 1 else None,
            Faults.joined(one.optim for one in every),
        )


def agreed(
    mine: Findings,
    fault: BaseException | None,
    meetings: Sequence[Meeting],
    what: str,
    outcome: str = _NOTHING_WRITTEN,
) -> Findings:
    """Put the findings of all ranks together. Collective in each meeting.

    What is heard in one meeting is told in the next ones, and on the way back where somebody has several.

    Args:
        mine: What this rank found.
        fault: What was raised on it.
        meetings: Who meets, in an order that is the same on all ranks.
        what: What they meet for, with what has to be equal on all ranks: the options.
        outcome: What is the case after a fault.

    Raises:
        RankDisagreement: The ranks meet for different things, or have other options.
        BaseException: The fault of this rank, which is that of all others.
        LoadError: Some ranks had a fault.
    """
    known = {this_rank(): mine if fault is None else Findings(fault=in_words(fault))}
    again: list[Meeting] = []
    for meeting in meetings:
        try:
            if _hear(known, len(meetings), meeting, what, fault) > 1:
                again.append(meeting)
        except RankDisagreement as error:  # who is in the other meetings has to hear of it
            fault, known[this_rank()] = error, Findings(fault=in_words(error))
    for meeting in reversed(again):  # down, since it went up: what the last ones know reaches the first along chains
        _hear(known, len(meetings), meeting, what, fault)
    raise_faults({rank: known[rank].fault for rank in sorted(known)}, fault, outcome)
    found = Findings.joined([known[rank] for rank in sorted(known)])
    found.collective = found.collective.intersection(meetings)
    return found


def in_words(fault: BaseException) -> str:
    """Word an error for other ranks.

    >>> in_words(ValueError("no"))
    'ValueError: no'
    """
    return f"{type(fault).__name__}: {fault}"


def raise_faults(faults: Mapping[int, str | None], own: BaseException | None, outcome: str = _NOTHING_WRITTEN) -> None:
    """Raise, on all ranks, what went wrong on any of them.

    Args:
        faults: What each rank tells of its error, in words.
        own: That of this rank, which is raised as it is if all have the same.
        outcome: What is the case after it.

    Raises:
        BaseException: The error of this rank, which is that of all others.
        LoadError: Some ranks have one.

    >>> raise_faults({0: None, 1: None}, None)
    """
    if own is not None and len(set(faults.values())) == 1:
        raise own
    if texts := [f"Rank {rank}: {text}" for rank, text in faults.items() if text is not None]:
        raise LoadError(f"{several(texts).rstrip('.')}. {outcome}") from own


def _hear(known: dict[int, Findings], count: int, meeting: Meeting, what: str, fault: BaseException | None) -> int:
    """Tell what is known in a meeting, and add what others tell; give the most meetings that any of them has."""
    world = world_over(frozenset(meeting))
    if world is None:
        return count
    mine = {rank: astuple(one, recurse=False) for rank, one in known.items()}
    said: list[Any] = ask(world, what, (mine, count), fault)
    for rows, _ in said:
        known.update({rank: Findings(*row) for rank, row in rows.items()})
    return int(max(number for _, number in said))


def _once(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys([item for some in lists for item in some]))
