"""Names that a step unties: they held one tensor before it, and hold several after it.

Nothing is wrong with that if it is meant, so it is told and never refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from attrs import define, frozen

from fdsd.data.errors import listing
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec
from fdsd.data.ties import tie_key, ties
from fdsd.pipeline.rewrite import UNKNOWN, Assign, Scope
from fdsd.pipeline.step import Step

__all__ = ["Untied", "Watch", "untied"]


@frozen
class Untied:
    """Names that held one tensor: those that still do, and those that have become others.

    >>> print(Untied(("embed",), ("head",)))
    unties 'head' from 'embed'
    """

    kept: tuple[str, ...]
    parted: tuple[str, ...]

    def __str__(self) -> str:
        return f"unties {listing(self.parted)} from {listing(self.kept)}"


def untied(assigns: Iterable[Assign], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Untied]:
    """Find the names of one tensor that a step makes tensors of their own.

    Args:
        assigns: What the step does.
        before: The specs that it sees.
        after: The specs that it gives.

    >>> import torch
    >>> one, other = TensorSpec((2,), torch.int8, tie="w"), TensorSpec((2,), torch.int16)
    >>> print(*untied([Assign("a", ("a",)), Assign("b", ("b",))], {"a": one, "b": one}, {"a": one, "b": other}))
    unties 'b' from 'a'
    """
    groups = _tied(before)
    if not groups:
        return []
    users: dict[str, list[Assign]] = {name: [] for group in groups for name in group}
    for assign in assigns:
        for source in dict.fromkeys(assign.sources):
            if source in users:
                users[source].append(assign)
    return [found for group in groups if (found := _parted(group, users, after)) is not None]


def _tied(state: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return ties({name: leaf for name, leaf in state.items() if isinstance(leaf, TensorSpec)})


def _parted(group: Sequence[str], users: Mapping[str, list[Assign]], after: Mapping[str, Any]) -> Untied | None:
    """Compare what becomes of each name of one tensor; those that go do not count."""
    alive = [name for name in group if users[name]]
    keys = {name: tuple([_key(after, assign.target) for assign in users[name]]) for name in alive}
    if len(set(keys.values())) < 2 or any(after.get(a.target) is UNKNOWN for name in alive for a in users[name]):
        return None
    as_it_was = [name for name in alive if all(assign.build is None for assign in users[name])]
    first = (as_it_was or alive)[0]
    kept = tuple([name for name in alive if keys[name] == keys[first]])
    return Untied(kept, tuple([name for name in alive if name not in kept]))


def _key(state: Mapping[str, Any], name: str) -> Hashable:
    return tie_key(state.get(name)) or ("alone", name)


@define
class _Open:
    """An untying that a later step may undo, or make void: what the names are called by now."""

    where: tuple[int, str]
    told: Untied
    names: set[str]


class Watch:
    """Follows what steps untie, up to the end: what is tied again, or goes, is not told."""

    def __init__(self) -> None:
        self._open: list[_Open] = []

    def step(self, where: tuple[int, str], step: Step, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Take in a step, by its number and its text; of ``untie``, only what it ties again counts."""
        if not self._open and not _tied(before):
            return
        assigns = step.rewrite(Scope(before)).assigns
        targets: dict[str, list[str]] = {}
        for assign in assigns if self._open else ():
            for source in assign.sources:
                targets.setdefault(source, []).append(assign.target)
        for entry in self._open:
            entry.names = {target for name in entry.names for target in targets.get(name, ())}
        if step.verb != "untie":
            for found in untied(assigns, before, after):
                names = {a.target for a in assigns if {*found.kept, *found.parted} & {*a.sources}}
                self._open.append(_Open(where, found, names))
        self._open = [entry for entry in self._open if len({_key(after, name) for name in entry.names}) > 1]

    def warnings(self) -> list[tuple[tuple[int, str], Problem]]:
        """Word what was untied and stayed so, with the step in which it was."""
        return [(entry.where, _problem(entry.told)) for entry in self._open]


def _problem(found: Untied) -> Problem:
    names = (*found.kept, *found.parted)
    some = repr(found.parted[0]) if len(found.parted) == 1 else repr(list(found.parted[:10]))[1:-1]
    text = f"{found}, which were one tensor. Name all of them in this step; if it is meant, untie({some}) first."
    return Problem("untied", text, names)
