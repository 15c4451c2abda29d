"""Bringing the leaves of a state to where they are wanted over a group: all at once, or one after the other.

A leaf is wanted whole on every rank, unless it says itself where (``Sharded``). Files are unknown here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import torch
from attrs import frozen

from fdsd.algebra.apply import defer_leaf
from fdsd.data.columns import Slot
from fdsd.data.errors import SpecMismatch, listing
from fdsd.data.groups import ParamGroup
from fdsd.data.optim import OptimState
from fdsd.data.protocols import World
from fdsd.data.spec import TensorSpec, is_exact, spec_of
from fdsd.engine.delivery import Delivery, plan_delivery
from fdsd.engine.request import Request
from fdsd.data.values import same_mapping
from fdsd.engine.unions import union_of
from fdsd.layout.layout import Layout
from fdsd.layout.sharded import Sharded

__all__ = ["Gathering", "gather_leaves", "gather_optim", "plan_gathering"]


@frozen(eq=False)
class Gathering:
    """Leaves that are brought together.

    Attributes:
        delivery: The tensors.
        order: All names of all ranks.
        leaves: The leaves of this rank.
        others: The leaves that are no tensors, of all ranks.
        rank: This rank.
    """

    delivery: Delivery
    order: tuple[str, ...]
    leaves: Mapping[str, Any]
    others: Mapping[str, Any]
    rank: int

    def run(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Deliver: each name that is wanted here with this rank's local tensor, in order."""
        with closing(self.delivery.run()) as items:  # type: ignore[type-var]  # it is a generator
            yield from items

    def collect(self) -> dict[str, Any]:
        """Deliver everything, and give the leaves as they are wanted here."""
        got = {name: self._leaf(name, value) for name, value in self.run()}
        wants_nothing = not got and len(self.others) < len(self.order)
        rest: Mapping[str, Any] = {} if wants_nothing else self.others
        return {name: got.get(name, rest.get(name)) for name in self.order if name in got or name in rest}

    def _leaf(self, name: str, local: torch.Tensor) -> Any:
        leaf = self.leaves.get(name)
        if not isinstance(leaf, Sharded) or _is_on_one(leaf.layout):
            return local
        return Sharded(leaf.spec.with_dtype(local.dtype), leaf.layout, shards={self.rank: local})


def _is_on_one(layout: Layout) -> bool:
    """Tell whether a tensor is wanted whole on one rank, as ``gather(to=rank)`` says it."""
    return layout.mesh.size == 1


def plan_gathering(
    leaves: Mapping[str, Any],
    world: World,
    *,
    target: Layout | None = None,
    device: torch.device | str | None = None,
    budget: int | None = None,
    keep: bool = False,
    verb: str = "materialize",
) -> Gathering:
    """Plan to bring leaves together; collective.

    Args:
        leaves: This rank's leaves by name, of any kind.
        world: Who works together.
        target: Where leaves are wanted that do not say it themselves; by default whole, on every rank.
        device: Where results are made; by default on the CPU.
        budget: Bytes that may be under way at once, beside results.
        keep: Whether tensors that are here already may be given as they are, not as copies.
        verb: How errors call the asker.

    Raises:
        SpecMismatch: Leaves have no data.
        RankDisagreement: The ranks know different things of one name.
    """
    requests: dict[str, Request] = {}
    others: dict[str, Any] = {}
    error: Exception | None = None
    try:
        if hollow := [name for name, leaf in leaves.items() if isinstance(leaf, TensorSpec)]:
            raise SpecMismatch(f"{verb}: {listing(hollow)} are specs and have no data. Open the checkpoint itself.")
        for name, leaf in leaves.items():
            if spec_of(leaf) is None:
                others[name] = leaf
            else:
                requests[name] = _request(leaf, name, target, device, keep)
    except Exception as found:  # the other ranks have to hear of it
        error = found
    delivery = plan_delivery(requests, world, budget=budget, device=device, error=error)
    order = union_of(world, dict.fromkeys(leaves, 0), f"{verb}: the names")
    if len(world.ranks) > 1 and (len(order) != len(leaves) or len(order) != len(requests)):
        others = union_of(world, others, f"{verb}: objects that are no tensors") if _differ(world, others) else others
    return Gathering(delivery, tuple(order), leaves, others, world.rank)


def _differ(world: World, others: Mapping[str, Any]) -> bool:
    """Tell whether some ranks have other names of objects than others; each keeps its own objects otherwise."""
    return len({tuple(sorted(names)) for names in world.agree(list(others))}) > 1


def _request(leaf: Any, name: str, target: Layout | None, device: Any, keep: bool) -> Request:
    if isinstance(leaf, Sharded):
        return Request(defer_leaf(leaf, name), leaf.layout)
    node = defer_leaf(leaf, name)
    stays = keep and target is None and is_exact(leaf) and (device is None or leaf.device == torch.device(device))
    return Request(node, target, out=leaf.detach() if stays and not leaf.is_meta else None)


def gather_leaves(leaves: Mapping[str, Any], world: World, **how: Any) -> dict[str, Any]:
    """Bring leaves together, and give them as they are wanted on this rank; collective. See ``plan_gathering``."""
    return plan_gathering(leaves, world, **how).collect()


def gather_optim(state: OptimState, world: World, **how: Any) -> OptimState:
    """Bring the state of an optimizer together, and the groups of all ranks; collective. See ``plan_gathering``.

    Groups at the same place with the same options are one group of the parameters of all ranks; others follow.
    """
    places = {f"{fqn} ({slot!r})": (slot, fqn) for slot, column in state.slots.items() for fqn in column}
    leaves = {label: state.slots[slot][fqn] for label, (slot, fqn) in places.items()}
    got = gather_leaves(leaves, world, **how)
    every = union_of(world, places, "materialize: the slots")
    columns: dict[Slot, dict[str, Any]] = {}
    for label, (slot, fqn) in every.items():
        if label in got:
            columns.setdefault(slot, {})[fqn] = got[label]
    return state.replace(slots=columns, groups=_joined(state.groups, world))


def _joined(groups: tuple[ParamGroup, ...], world: World) -> tuple[ParamGroup, ...]:
    """Join the groups of all ranks; equal ones do not travel."""
    if len(set(world.agree([group.fqns for group in groups].__repr__()))) == 1:
        return groups
    made: list[ParamGroup] = []
    for some in world.agree(groups):
        for i, group in enumerate(some):
            if i < len(made) and same_mapping(made[i].options, group.options):
                fqns = dict.fromkeys((*made[i].fqns, *group.fqns))
                made[i] = ParamGroup(fqns, made[i].options, named=made[i].named)
            else:
                made.append(group)
    return tuple(made)
