"""Bringing the leaves of a state to where they are wanted over a group: all at once, or one after the other.

A leaf is wanted whole on every rank, unless it says itself where (``Sharded``). Files are unknown here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from attrs import frozen

from fdsd.algebra.apply import defer_leaf, refuse_kinds
from fdsd.algebra.lazy import Lazy
from fdsd.comms.alone import Alone
from fdsd.data.errors import RankDisagreement, SpecMismatch, Unsupported, listing
from fdsd.data.optim import OptimState
from fdsd.data.protocols import World
from fdsd.data.spec import is_exact, spec_of
from fdsd.data.ties import tie_key
from fdsd.engine.asking import told_ranks
from fdsd.engine.delivery import Delivery, plan_delivery
from fdsd.engine.optim_rows import from_rows, join_groups, rows_of
from fdsd.engine.outlines import has_data
from fdsd.engine.request import Request
from fdsd.engine.unions import agreed_order, everyone, share_objects
from fdsd.layout.layout import Layout
from fdsd.layout.mesh import Mesh
from fdsd.layout.placement import Replicate
from fdsd.layout.sharded import Sharded

__all__ = ["Gathering", "gather_leaves", "gather_optim", "one_rank", "plan_gathering"]


@frozen(eq=False)
class Gathering:
    """Leaves that are brought together.

    Attributes:
        delivery: The tensors.
        leaves: The leaves of this rank.
        order: All names of all ranks.
        objects: The leaves that are no tensors: this rank's, and those that only others have.
        rank: This rank.
    """

    delivery: Delivery
    leaves: Mapping[str, Any]
    order: tuple[str, ...]
    objects: Mapping[str, Any]
    rank: int

    def run(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Deliver: each name that is wanted here with this rank's local tensor, in order."""
        return self.delivery.run()

    def collect(self) -> dict[str, Any]:
        """Deliver everything, and give the leaves as they are wanted here."""
        made = {**self.objects, **{name: self._leaf(name, value) for name, value in self.run()}}
        return {name: made[name] for name in self.order if name in made}

    def _leaf(self, name: str, local: torch.Tensor) -> Any:
        leaf = self.leaves.get(name)
        if not isinstance(leaf, Sharded) or _is_on_one(leaf.layout):
            return local
        return Sharded(leaf.spec.with_dtype(local.dtype), leaf.layout, shards={self.rank: local})


def _is_on_one(layout: Layout) -> bool:
    """Tell whether a tensor is wanted whole on one rank, as ``gather(to=rank)`` says it."""
    return layout.mesh.size == 1


def one_rank(to: Any, verb: str) -> Layout:
    """Give the layout of a whole tensor on one rank.

    Raises:
        Unsupported: ``to`` is no rank.

    >>> one_rank(3, "gather").mesh.ranks
    (3,)
    """
    if not isinstance(to, int) or isinstance(to, bool) or to < 0:
        raise Unsupported(f'{verb}: to is "all" or the number of a rank, not {to!r}.')
    return Layout(Mesh({"rank": 1}, [to]), [Replicate()])


def plan_gathering(
    leaves: Mapping[str, Any],
    world: World,
    *,
    target: Layout | None = None,
    device: torch.device | str | None = None,
    budget: int | None = None,
    keep: bool = False,
    verb: str = "materialize",
    asked: str | None = None,
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
        asked: What has to be asked for alike on all ranks; the verb, if nothing else.

    Raises:
        SpecMismatch: Leaves have no data, or are wanted on ranks that are not in the group.
        RankDisagreement: The ranks know different things of one name.
    """
    requests: dict[str, Request] = {}
    objects: dict[str, Any] = {}
    error: BaseException | None = None
    try:
        _check(leaves, world, target, verb)
        requests, objects = _sorted(leaves, target, device, keep, verb)
    except BaseException as found:  # the other ranks have to hear of it
        error = found
    delivery = plan_delivery(requests, world, budget=budget, device=device, error=error, asked=asked or verb)
    shared = share_objects(world, objects, f"{verb}: objects that are no tensors")
    if odd := sorted(set(shared).intersection(delivery.names)):
        raise RankDisagreement(f"{verb}: some ranks have a tensor, and others something else, of {listing(odd)}.")
    order = agreed_order(everyone(world, list(leaves), verb)) if shared else delivery.names
    return Gathering(delivery, leaves, tuple(order), shared, world.rank)


def _check(leaves: Mapping[str, Any], world: World, target: Layout | None, verb: str) -> None:
    if hollow := [name for name, leaf in leaves.items() if not has_data(leaf)]:
        raise SpecMismatch(
            f"{verb}: {listing(hollow)} have no data (specs, or on the meta device). Open the checkpoint itself, or "
            "give the module memory first."
        )
    wanted: set[tuple[int, ...]] = set() if target is None else {target.mesh.ranks}
    if isinstance(world, Alone):  # other ranks' shards are no business of a process alone
        if target is not None and world.rank not in target.mesh:
            raise SpecMismatch(
                f"{verb}: tensors are wanted on {told_ranks(target.mesh.ranks)}, and this process, rank {world.rank}, "
                "works alone. Give group=, and call it on all of its ranks."
            )
        return
    wanted |= {leaf.layout.mesh.ranks for leaf in leaves.values() if isinstance(leaf, Sharded)}
    if strays := sorted({rank for ranks in wanted for rank in ranks} - set(world.ranks)):
        raise SpecMismatch(
            f"{verb}: tensors are wanted on the ranks {listing(strays)}, and the group has {listing(world.ranks)}."
        )


def _sorted(
    leaves: Mapping[str, Any], target: Layout | None, device: Any, keep: bool, verb: str
) -> tuple[dict[str, Request], dict[str, Any]]:
    """Give the tensors as requests, and all else as it is."""
    requests: dict[str, Request] = {}
    objects: dict[str, Any] = {}
    nodes: dict[Hashable, Lazy] = {}
    try:
        for name, leaf in leaves.items():
            if spec_of(leaf) is None:
                objects[name] = leaf
            else:
                requests[name] = _request(leaf, _node(leaf, name, nodes), target, device, keep)
    except Unsupported as error:
        refuse_kinds(leaves, verb, error)
    return requests, objects


def _node(leaf: Any, name: str, nodes: dict[Hashable, Lazy]) -> Lazy:
    """Give a leaf as an expression: one for all names of a tied tensor, so that it travels once and stays one."""
    key = tie_key(leaf) if isinstance(leaf, torch.Tensor) else None
    found: Lazy = defer_leaf(leaf, name) if key is None or key not in nodes else nodes[key]
    if key is not None:
        nodes[key] = found
    return found


def _request(leaf: Any, node: Lazy, target: Layout | None, device: Any, keep: bool) -> Request:
    if isinstance(leaf, Sharded):
        return Request(node, leaf.layout)
    stays = keep and target is None and is_exact(leaf) and (device is None or leaf.device == torch.device(device))
    return Request(node, target, out=leaf.detach() if stays else None)


def gather_leaves(leaves: Mapping[str, Any], world: World, **how: Any) -> dict[str, Any]:
    """Bring leaves together, and give them as they are wanted on this rank; collective. See ``plan_gathering``."""
    return plan_gathering(leaves, world, **how).collect()


def gather_optim(state: OptimState, world: World, **how: Any) -> OptimState:
    """Bring the state of an optimizer together, and the groups of all ranks; collective. See ``plan_gathering``."""
    rows = rows_of(state)
    got = gather_leaves({label: row.value for label, row in rows.items()}, world, **how)
    groups = join_groups(state.groups, world, "materialize")
    return state.replace(slots=from_rows(got, rows, world, "materialize"), groups=groups)
