"""From whole tensors to the local entries of each rank: rank 0 has them for all, or every rank has them.

All is checked on all ranks before anything is written. Models and optimizers are unknown here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from typing import Any

import torch
from attrs import frozen

from fdsd.algebra.apply import defer_leaf
from fdsd.comms.alone import this_rank
from fdsd.comms.kinds import kind_of, parts_of, spec_of_kind
from fdsd.compat._destinations import Destination
from fdsd.compat._errors import LoadError, NoMapping
from fdsd.compat._rank0 import RankZero, announcement
from fdsd.compat._subclasses import plain_of
from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.data.protocols import World
from fdsd.data.spec import TensorSpec, is_exact
from fdsd.data.statedict import as_mapping
from fdsd.data.ties import tie_key
from fdsd.data.values import is_mapping
from fdsd.engine.delivery import plan_delivery
from fdsd.engine.request import Request

__all__ = ["Announced", "announce", "cut_here", "destinations_of", "owners_of", "put", "spec_told", "spread"]


@frozen(eq=False)
class Announced:
    """What rank 0 has, as all ranks know it.

    Attributes:
        specs: The tensors, in order.
        owners: For each tensor the first name of the same one.
        objects: What is no tensor.
    """

    specs: Mapping[str, TensorSpec]
    owners: Mapping[str, str]
    objects: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:
        return name in self.specs or name in self.objects


def announce(full: Any, world: World, error: BaseException | None = None) -> Announced:
    """Tell all ranks what rank 0 has. Collective.

    Args:
        full: The whole tensors, and other values, by name; only those of rank 0 count.
        world: All ranks.
        error: What is wrong with them; only with those of rank 0.

    Raises:
        LoadError: Rank 0 cannot tell; on all ranks.

    >>> from fdsd.comms.alone import Alone
    >>> announce({"w": torch.ones(2), "lr": 0.1}, Alone()).objects
    {'lr': 0.1}
    """
    if 0 not in world.ranks:
        raise LoadError(f"rank 0 gives the state dict for all, and is not one of the ranks {listing(world.ranks)}.")
    if world.rank:
        error = None
    elif error is None and as_mapping(full) is None:
        error = NoMapping(f"a {type(full).__name__} is no state dict.")
    told = announcement(full, world, _outline_of, error, "the whole tensors that rank 0 gives")
    return Announced(*pickle.loads(told))  # of another rank of this very program


def _outline_of(full: Mapping[str, Any]) -> tuple[Any, list[str]]:
    sharded = [name for name, value in full.items() if isinstance(value, torch.Tensor) and not is_exact(value)]
    specs = {name: TensorSpec(tuple(v.shape), v.dtype) for name, v in full.items() if is_exact(v)}
    owners = owners_of({name: full[name] for name in specs})
    return (specs, owners, {name: value for name, value in full.items() if name not in specs}), sharded


def owners_of(full: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Give for each tensor the first name of the same one.

    >>> w = torch.ones(2)
    >>> owners_of({"embed": w, "head": w})
    {'embed': 'embed', 'head': 'embed'}
    """
    first: dict[Hashable, str] = {}
    return {name: first.setdefault(tie_key(tensor), name) for name, tensor in full.items()}


def destinations_of(
    local: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
    owners: Mapping[str, str],
    destination: Callable[[Any, TensorSpec], Destination],
) -> tuple[dict[str, Destination], BaseException | None]:
    """Find where whole tensors go, and all that does not fit.

    Args:
        local: The local entries.
        specs: The whole tensors.
        owners: For each whole tensor the first name of the same one.
        destination: Gives the destination for a local entry.

    Returns:
        The destination of each tensor, and the error, if there is one.
    """
    if not is_mapping(local):
        return {}, NoMapping(f"a {type(local).__name__} is no state dict to write to.")
    made: dict[str, Destination] = {}
    shared: dict[Hashable, Destination] = {}
    wrong: dict[str, str] = {}
    kind: type[SpecMismatch | Unsupported] = SpecMismatch
    for name, spec in specs.items():
        try:
            entry = local.get(name)
            key = (_tie_of(entry) or name, owners.get(name, name), spec)  # what is tied there is tied again
            if key not in shared:
                shared[key] = destination(entry, spec)
            made[name] = shared[key]
        except (SpecMismatch, Unsupported) as error:
            wrong[name] = str(error)
            kind = SpecMismatch if isinstance(error, SpecMismatch) else Unsupported
    if not wrong:
        return made, None
    told = "; ".join([f"{name!r}: {wrong[name]}" for name in sorted(wrong)[:10]])
    rest = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
    return made, kind(f"size mismatch of whole tensors and local entries: {told}{rest}. Nothing has been written.")


def _tie_of(entry: Any) -> Hashable | None:
    """Give what is equal for entries that are one tensor."""
    if not isinstance(entry, torch.Tensor):
        return None
    return kind_of(entry), spec_of_kind(entry), tuple([tie_key(part) for part in parts_of(entry)])


def spread(
    full: Any, announced: Announced, destinations: Mapping[str, Destination], world: World, error: BaseException | None
) -> None:
    """Send each rank its part of what rank 0 has. Collective.

    Args:
        full: On rank 0 the tensors.
        announced: What all know of them.
        destinations: Where this rank's parts go.
        world: All ranks.
        error: What went wrong on this rank before; all raise then.
    """
    source = RankZero(full if world.rank == 0 else announced.specs)
    owners = dict.fromkeys(announced.owners.values())
    nodes = {owner: source.find(owner) for owner in owners}  # tied names share one, and travel once
    requests = {
        name: Request(nodes[announced.owners[name]], destination.target, everyone=False, out=destination.memory)
        for name, destination in destinations.items()
    }
    for _ in plan_delivery(requests, world, error=error).run():
        pass  # it lies in the memory of its destination


def cut_here(
    full: Mapping[str, torch.Tensor], local: Mapping[str, Any], destination: Callable[[Any, TensorSpec], Destination]
) -> dict[str, Destination]:
    """Write this rank's parts of whole tensors that it has to where they go. Nothing travels.

    Args:
        full: The tensors.
        local: The local entries.
        destination: Gives the destination for a local entry.

    Raises:
        SpecMismatch: Shapes differ; nothing is written.

    >>> from functools import partial
    >>> destination = partial(Destination.of, device=torch.device("cpu"))
    >>> cut_here({"w": torch.tensor([1.0, 2.0])}, {"w": torch.zeros(2)}, destination)["w"].entry
    tensor([1., 2.])
    """
    full = {name: plain_of(tensor) for name, tensor in full.items()}
    destinations, fault = destinations_of(
        local, {name: spec_told(tensor) for name, tensor in full.items()}, owners_of(full), destination
    )
    if fault is not None:
        raise fault
    requests = {
        name: Request(defer_leaf(full[name], name), destination.target, everyone=False, out=destination.memory)
        for name, destination in destinations.items()
        if destination.memory is not None
    }
    for _ in plan_delivery(requests, None, rank=this_rank()).run():
        pass
    return destinations


def spec_told(told: Any) -> TensorSpec:
    """Read the shape and dtype off a tensor, or off what has them as ``size`` and ``dtype``.

    >>> spec_told(torch.ones(2))
    TensorSpec((2,), torch.float32)
    """
    return TensorSpec(tuple(told.shape if isinstance(told, torch.Tensor) else told.size), told.dtype)


def put(local: MutableMapping[str, Any], destinations: Mapping[str, Destination]) -> None:
    """Write the entries of destinations into a local state dict, where there is something.

    >>> local = {"w": 1}; put(local, {"w": Destination(None, None, 2), "b": Destination(None, None, None)}); local
    {'w': 2}
    """
    local.update(
        {name: destination.entry for name, destination in destinations.items() if destination.entry is not None}
    )
