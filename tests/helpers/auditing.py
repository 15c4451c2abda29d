"""Checks for every kind of parallelism: all of them in one start of ranks, and each by itself where one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from attrs import define, field, frozen

from tests.helpers.audit_values import case
from tests.helpers.audited import Kind, kinds_of
from tests.helpers.ranks import RankFailure, run_ranks

__all__ = ["Audit", "Check", "group", "num_ranks"]

_T = TypeVar("_T")


def group() -> Any:
    """Give the group of all ranks; ``None`` in one process."""
    return dist.group.WORLD if dist.is_initialized() else None


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@frozen(eq=False)
class Check:
    """A check of one kind of parallelism: ``run(rank, kind)`` raises, or gives what all ranks have to give alike.

    Attributes:
        turn: Where it begins to deal out cases.
    """

    run: Callable[[int, Kind], Any]
    joined: bool
    meta: bool
    turn: int

    def __repr__(self) -> str:
        return self.run.__name__

    def share(self, cases: Iterable[_T], kind: Kind, of: int, *, n: int | None = None) -> list[_T]:
        """Give a kind its share of the cases of this check: one of so many, dealt out in turn.

        The kinds of a number of ranks have all cases together, as long as there are as many of them; the next check
        deals to the next kind first, so that each kind meets each way to give a state. One process has all cases.
        """
        n = num_ranks() if n is None else n
        if n == 1:
            return list(cases)
        place = kinds_of(n, joined=self.joined, meta=self.meta).index(kind) + self.turn
        return list(cases)[place % of :: of]

    def of_all_kinds(self, rank: int, n: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for kind in kinds_of(n, joined=self.joined, meta=self.meta):
            with case(self, kind):
                made[kind.name] = self.run(rank, kind)
        return made


@define(eq=False)
class Audit:
    """Checks that are run together.

    Attributes:
        checks: All of them, in order.
    """

    checks: list[Check] = field(factory=list)
    _told: dict[int, Sequence[dict[Check, Any]] | None] = field(factory=dict)

    def check(self, *, joined: bool = False, meta: bool = False) -> Callable[[Callable[[int, Kind], Any]], Check]:
        """Register a function as a check: of all kinds, those that lie over ranks, or those that can be on meta."""

        def register(run: Callable[[int, Kind], Any]) -> Check:
            made = Check(run, joined, meta, len(self.checks))
            self.checks.append(made)
            return made

        return register

    def verify(self, check: Check, n: int) -> None:
        """See that a check holds on a number of ranks. The first call for a number runs all checks.

        One process needs no start of ranks: there each check is run by itself.
        """
        if n == 1:
            check.of_all_kinds(0, 1)
            return
        if n not in self._told:
            try:
                self._told[n] = _run(self.checks, n)
            except RankFailure:
                self._told[n] = None  # one that fails stops all; each is run by itself then
        told = self._told[n]
        if told is None:
            told = _run([check], n)
        first = told[0][check]
        for rank, found in enumerate(told):
            for kind, result in found[check].items():
                assert result == first[kind], f"{check}, {kind}: rank {rank} was told another thing than rank 0"


def _run(checks: Sequence[Check], n: int) -> list[dict[Check, Any]]:
    found = run_ranks(lambda rank: [check.of_all_kinds(rank, n) for check in checks], n, timeout=60)
    return [dict(zip(checks, told, strict=True)) for told in found]
