"""What keeps a state from being written into optimizers, by kind, and in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import astuple, define, field

from fdsd.data.errors import listing, plural
from fdsd.data.naming import nearest
from fdsd.data.problem import Problem
from fdsd.data.values import several

__all__ = ["Faults"]


@define
class Faults:
    """What keeps a state from being written, by kind, so that what several ranks have found can be told as one.

    Attributes:
        stateless: Parameters that train, and lack the state that they need.
        unlisted: Parameters that train, and are in no group.
        spare: Names in groups that no optimizer has, one of which may be meant by such a parameter.
        lacking: Values that parameters with state lack, and options that groups lack, as the flat form calls them.
        strays: Names that no optimizer has.
        extra: Entries beside state and groups that no optimizer takes.
        homeless: State of no parameter that several optimizers might have.
        wrong: Names of parameters, and what is wrong with a value of theirs.
        others: Names that clash, and options.
        used: No fault: parameters whose momentum is more than a place for one.
    """

    stateless: list[str] = field(factory=list)
    unlisted: list[str] = field(factory=list)
    spare: list[str] = field(factory=list)
    lacking: list[str] = field(factory=list)
    strays: list[str] = field(factory=list)
    extra: list[str] = field(factory=list)
    homeless: list[str] = field(factory=list)
    wrong: list[tuple[str, str]] = field(factory=list)
    others: list[Problem] = field(factory=list)
    used: list[str] = field(factory=list)

    @classmethod
    def joined(cls, every: Iterable[Faults]) -> Faults:
        """Put together what several ranks have found; what is found twice is told once."""
        columns = zip(*[astuple(one, recurse=False) for one in every], strict=True)
        return cls(*[list(dict.fromkeys([item for some in lists for item in some])) for lists in columns])

    def problems(self) -> list[Problem]:
        """Word everything."""
        return [*self.others, *self._missing(), *self._unexpected(), *self._misfits()]

    def _missing(self) -> Iterator[Problem]:
        if self.stateless:
            first, *others = self.stateless
            rest = f" Likewise {listing(others)}." if others else ""
            yield Problem(
                "missing",
                f"Missing optimizer state for parameter '{first}' in checkpoint. The parameter requires gradients but "
                f"has no saved optimizer state.{rest} To load anyway, use StateDictOptions(strict=False).",
                tuple(self.stateless),
            )
        if self.unlisted:
            close = nearest(self.unlisted[0], self.spare)
            hint = f" The nearest name of those that no optimizer has is {close[0]!r}." if close else ""
            count = plural(len(self.unlisted), "parameter")
            told = f"{count} that train are in no group of the state: {listing(self.unlisted)}.{hint}"
            yield Problem("missing", told, tuple(self.unlisted))
        if self.lacking:
            told = (
                f"Missing key(s) in optimizer state_dict: {listing(self.lacking)}. A step needs them: add them, or "
                "leave the other state of these parameters out too."
            )
            yield Problem("missing", told, tuple(self.lacking))

    def _unexpected(self) -> Iterator[Problem]:
        if self.strays:
            told = f"The state has parameters that no optimizer has: {listing(self.strays)}. Drop them first."
            yield Problem("unexpected", told, tuple(self.strays))
        if self.extra:
            yield Problem(
                "unexpected",
                f"The state has entries {listing(self.extra)} beside state and groups, and no optimizer has a "
                "load_state_dict of its own to take them.",
                tuple(self.extra),
            )
        if self.homeless:
            yield Problem(
                "unexpected",
                f"State under {listing(self.homeless)} belongs to no parameter, and several optimizers may be meant. "
                "Write to the optimizers one by one.",
                tuple(self.homeless),
            )

    def _misfits(self) -> Iterator[Problem]:
        if self.wrong:
            told = f"State that does not fit: {several([text for _, text in self.wrong])}."
            yield Problem("spec", told, tuple(dict.fromkeys([fqn for fqn, _ in self.wrong])))
