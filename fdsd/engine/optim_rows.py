"""The state of an optimizer as one table of leaves, and its groups, put together over the ranks of a group.

Live optimizers are unknown here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from attrs import define

from fdsd.data.columns import Slot
from fdsd.data.errors import RankDisagreement
from fdsd.data.groups import ParamGroup
from fdsd.data.optim import OptimState
from fdsd.data.protocols import World
from fdsd.data.values import same_option
from fdsd.engine.unions import everyone, union_of

__all__ = ["Row", "from_rows", "join_groups", "rows_of"]


class Row(NamedTuple):
    """One value of an optimizer's state, and where it stands."""

    slot: Slot
    fqn: str
    value: Any


def rows_of(state: OptimState) -> dict[str, Row]:
    """Give all values of a state by labels that tell them apart, and say what they are.

    >>> list(rows_of(OptimState({"step": {"w": 3}, ("kron", 0): {"w": 4}})))
    ["'step' of 'w'", "('kron', 0) of 'w'"]
    """
    rows = [Row(slot, fqn, value) for slot, column in state.slots.items() for fqn, value in column.items()]
    return {f"{row.slot!r} of {row.fqn!r}": row for row in rows}


def from_rows(
    values: Mapping[str, Any], rows: Mapping[str, Row], world: World, verb: str
) -> dict[Slot, dict[str, Any]]:
    """Sort values by label into slots; collective, since some labels may be known to other ranks only.

    Args:
        values: The values, by label.
        rows: This rank's own rows.
        world: The ranks.
        verb: How errors call the asker.
    """
    every = union_of(world, {label: (row.slot, row.fqn) for label, row in rows.items()}, "the slots of optimizers")
    made: dict[Slot, dict[str, Any]] = {}
    for label, (slot, fqn) in every.items():
        if label in values:
            made.setdefault(slot, {})[fqn] = values[label]
    return made


@define
class _Growing:
    """A group that grows while ranks are gone through."""

    fqns: dict[str, None]
    options: Mapping[str, Any]
    named: bool
    rank: int


def join_groups(groups: Iterable[ParamGroup], world: World, verb: str) -> tuple[ParamGroup, ...]:
    """Join the groups of all ranks; collective, and equal ones do not travel.

    Groups that share parameters are one, and so are those at the same place with the same options: the parts of a
    model have one group each, say. Any others follow.

    Args:
        groups: This rank's groups.
        world: The ranks.
        verb: How errors call the asker.

    Raises:
        RankDisagreement: A parameter is in groups that differ.

    >>> from fdsd.comms.alone import Alone
    >>> join_groups([ParamGroup(["w"], {"lr": 0.1})], Alone(), "restore")
    (ParamGroup(('w',), {'lr': 0.1}),)
    """
    mine = tuple(groups)
    told = everyone(world, mine, f"{verb}: the parameter groups")
    if all(one is mine for one in told):
        return mine
    made: list[_Growing] = []
    homes: dict[str, int] = {}
    for rank, some in zip(world.ranks, told, strict=True):
        for place, group in enumerate(some):
            at = _home(group, place, rank, made, homes, verb)
            made[at].fqns.update(dict.fromkeys(group.fqns))
            homes.update(dict.fromkeys(group.fqns, at))
    return tuple([ParamGroup(one.fqns, one.options, named=one.named) for one in made])


def _home(group: ParamGroup, place: int, rank: int, made: list[_Growing], homes: Mapping[str, int], verb: str) -> int:
    """Find the place among the joined groups where a group belongs."""
    known = {homes[fqn]: fqn for fqn in group.fqns if fqn in homes}
    for at, fqn in known.items():
        if len(known) > 1 or not same_option(dict(made[at].options), dict(group.options)):
            raise RankDisagreement(
                f"{verb}: {fqn!r} is in a group with {dict(made[at].options)} on rank {made[at].rank}, and in one with "
                f"{dict(group.options)} and {len(group.fqns)} parameters on rank {rank}. Group the parameters alike on "
                "all ranks."
            )
        return at
    if place < len(made) and same_option(dict(made[place].options), dict(group.options)):
        return place
    made.append(_Growing({}, group.options, group.named, rank))
    return len(made) - 1
