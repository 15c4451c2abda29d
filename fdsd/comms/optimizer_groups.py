"""Which loaded parameter group has the options for which live group: matched by the names of the parameters.

Positions count only for groups without parameters. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from fdsd.comms.live_optimizers import LiveGroup, LiveOptimizer
from fdsd.data.groups import ParamGroup
from fdsd.data.problem import Problem
from fdsd.data.values import same_option, several

__all__ = ["GroupMatch", "match_groups"]


@frozen(eq=False)
class GroupMatch:
    """What a live group takes over.

    Args:
        live: The live group.
        options: The loaded options; empty if no loaded group has any of its parameters.
        named: Whether the loaded group has the names of its parameters, as ``param_names``.
    """

    live: LiveGroup
    options: Mapping[str, Any]
    named: bool = False


def match_groups(
    groups: Sequence[ParamGroup], optimizers: Sequence[LiveOptimizer]
) -> tuple[list[list[GroupMatch]], list[Problem]]:
    """Find the options of each live group.

    Args:
        groups: The loaded groups, by the names that the live model has.
        optimizers: The live optimizers.

    Returns:
        For each optimizer a match for each of its groups; and the options that one live group would need two of.
    """
    owner = {fqn: i for i, group in enumerate(groups) for fqn in group.fqns}
    empty = _empty_groups(groups, [group for live in optimizers for group in live.groups])
    problems: list[Problem] = []
    made: list[list[GroupMatch]] = []
    for live in optimizers:
        made.append([])
        for number, group in enumerate(live.groups):
            if group.params:
                sources = dict.fromkeys([owner[fqn] for fqn in group.fqns if fqn in owner])
            else:
                sources = dict.fromkeys([empty[id(group)]] if id(group) in empty else [])
            loaded = [groups[i] for i in sources]
            problems += _conflicts(loaded, f"group {number} of {live.label}")
            options = {key: value for one in reversed(loaded) for key, value in one.options.items()}
            made[-1].append(GroupMatch(group, options, any(one.named for one in loaded)))
    return made, problems


def _empty_groups(groups: Sequence[ParamGroup], live: Sequence[LiveGroup]) -> dict[int, int]:
    """Pair groups without parameters: the only ones on both sides, or at the same place among equally many groups."""
    loaded_empty = dict.fromkeys([i for i, group in enumerate(groups) if not group.fqns])
    live_empty = [i for i, group in enumerate(live) if not group.params]
    if len(live_empty) == len(loaded_empty) == 1:
        return {id(live[live_empty[0]]): next(iter(loaded_empty))}
    return {id(live[i]): i for i in live_empty if i in loaded_empty} if len(groups) == len(live) else {}


def _conflicts(loaded: Sequence[ParamGroup], where: str) -> Iterator[Problem]:
    if len(loaded) < 2:
        return
    first, texts, names = loaded[0], list[str](), dict[str, None]()
    seen: dict[str, tuple[Any, str]] = {key: (value, first.fqns[0]) for key, value in first.options.items()}
    for group in loaded[1:]:
        for key, value in group.options.items():
            known, fqn = seen.setdefault(key, (value, group.fqns[0]))
            if key != "param_names" and not same_option(known, value):
                texts.append(f"{key!r} is {known!r} for {fqn!r} and {value!r} for {group.fqns[0]!r}")
                names.update(dict.fromkeys([fqn, group.fqns[0]]))
    if texts:
        yield Problem(
            "spec",
            f"The loaded groups of parameters that are all in {where} differ: {several(texts)}. Make an optimizer with "
            "a group for each, or make the options equal.",
            tuple(names),
        )
