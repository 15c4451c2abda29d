"""`Outline`: a state as the ranks of a group hold it together: what is here, and what only others have.

Collective, where there are several ranks. Tensors do not travel here; other objects do, to where they are lacking.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from attrs import frozen

from fdsd.algebra.apply import defer_leaf, refuse_kinds
from fdsd.algebra.lazy import Lazy
from fdsd.data.errors import RankDisagreement, Unsupported
from fdsd.data.protocols import World
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.data.ties import ties
from fdsd.engine.unions import everyone, share_objects, together, union_of

__all__ = ["Outline", "has_data", "outline_of", "shared_ties"]

_OBJECT = "no tensor"


@frozen(eq=False)
class Outline:
    """A state as the ranks of a group hold it together.

    Attributes:
        own: The leaves that this rank has data of.
        leaves: The leaves of all ranks: specs for tensors that only others have.
        owners: The names that are tied, on any rank, and the first name of the same tensor.
        hollow: Names of which no rank has data, though this one has a spec or a meta tensor.
    """

    own: Mapping[str, Any]
    leaves: Mapping[str, Any]
    owners: Mapping[str, str]
    hollow: tuple[str, ...] = ()

    def node(self, name: str) -> Lazy | None:
        """Give a tensor of this rank as an expression; ``None`` if only others have it."""
        leaf = self.own.get(name)
        try:
            found = leaf if isinstance(leaf, Lazy) else defer_leaf(leaf, name)
        except Unsupported as error:
            refuse_kinds(self.own, "restore", error)
        return found if isinstance(found, Lazy) else None


def has_data(leaf: Any) -> bool:
    """Tell whether a leaf has data: a spec has none, nor has a tensor on the meta device.

    >>> has_data(torch.ones(1)), has_data(torch.ones(1, device="meta")), has_data(None)
    (True, False, True)
    """
    return not (isinstance(leaf, TensorSpec) or (isinstance(leaf, torch.Tensor) and leaf.is_meta))


def outline_of(world: World, leaves: Mapping[str, Any], verb: str) -> Outline:
    """Find out what the ranks of a group hold together; collective.

    Args:
        world: The ranks.
        leaves: This rank's leaves by name; those without data count as not there.
        verb: How errors call the asker.

    Raises:
        RankDisagreement: The ranks have different tensors of one name, or a tensor and an object; or they tie names
            differently.
        Unsupported: A tensor is of an unknown kind, or an object that others lack cannot be sent.

    >>> from fdsd.comms.alone import Alone
    >>> outline_of(Alone(), {"w": TensorSpec((2,), torch.int8), "x": 3}, "restore").hollow
    ('w',)
    """
    own = {name: leaf for name, leaf in leaves.items() if has_data(leaf)}
    if len(world.ranks) == 1:
        hollow = [name for name in leaves if name not in own] if len(own) < len(leaves) else []
        return Outline(own, own, shared_ties(world, own, verb), tuple(hollow))
    known = union_of(world, together(world, verb, lambda: _told(own, verb)), "what the state holds", show=_shown)
    objects = share_objects(
        world, {name: own[name] for name, told in known.items() if told == _OBJECT and name in own}, verb
    )
    made: dict[str, Any] = {}
    for name, told in known.items():
        made[name] = own[name] if name in own else objects[name] if told == _OBJECT else TensorSpec(*told)
    absent = tuple([name for name in leaves if name not in known])
    return Outline(own, made, shared_ties(world, own, verb), absent)


def _told(leaves: Mapping[str, Any], verb: str) -> dict[str, Any]:
    try:
        found = {name: spec_of(leaf) for name, leaf in leaves.items()}
    except Unsupported as error:
        refuse_kinds(leaves, verb, error)
    return {name: _OBJECT if spec is None else (tuple(spec.shape), spec.dtype) for name, spec in found.items()}


def _shown(told: Any) -> object:
    return told if told == _OBJECT else TensorSpec(*told)


def shared_ties(world: World, leaves: Mapping[str, Any], verb: str) -> dict[str, str]:
    """Give the names that are tied on any rank, each with the first name of the same tensor; collective.

    Args:
        world: The ranks.
        leaves: This rank's leaves by name.
        verb: How errors call the asker.

    Raises:
        RankDisagreement: Names are tied on one rank, and different tensors on another.

    >>> from fdsd.comms.alone import Alone
    >>> w = torch.ones(2)
    >>> shared_ties(Alone(), {"embed": w, "norm": torch.ones(1), "head": w}, "save")
    {'head': 'embed'}
    """
    mine = {alias: group[0] for group in ties(leaves) for alias in group[1:]}
    if len(world.ranks) == 1:
        return mine
    told = everyone(world, mine, f"{verb}: the tied names")
    if not any(told):
        return {}
    owners = _joined([pair for one in told for pair in one.items()])
    apart = [name for name, owner in owners.items() if _is_apart(name, owner, mine, leaves)]
    clashes = sorted({name for names in everyone(world, apart, verb) for name in names})
    if clashes:
        shown = ", ".join([f"{name!r} and {owners[name]!r}" for name in clashes[:10]])
        rest = f", and {len(clashes) - 10} more" if len(clashes) > 10 else ""
        raise RankDisagreement(
            f"{verb}: names that are tied on some ranks are different tensors on others: {shown}{rest}. Tie them on "
            "all ranks (tie()), or on none (untie())."
        )
    return owners


def _joined(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Give each alias the first name of all that it is tied to, over several steps too."""
    first: dict[str, str] = {}

    def root(name: str) -> str:
        while name in first:
            name = first[name]
        return name

    for alias, owner in pairs:
        a, b = root(owner), root(alias)
        if a != b:
            first[b] = a
    return {name: root(name) for name in first}


def _is_apart(name: str, owner: str, mine: Mapping[str, str], leaves: Mapping[str, Any]) -> bool:
    both = name in leaves and owner in leaves
    return both and mine.get(name, name) != mine.get(owner, owner)
