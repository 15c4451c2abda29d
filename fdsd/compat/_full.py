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
from fdsd.compat._errors import LoadError, NoMapping
from fdsd.compat._rank0 import RankZero
from fdsd.compat._slots import Slot
from fdsd.compat._subclasses import plain_of
from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.data.protocols import World
from fdsd.data.spec import TensorSpec, is_exact
from fdsd.data.statedict import as_mapping
from fdsd.data.ties import tie_key
from fdsd.data.values import is_mapping
from fdsd.engine.asking import ask
from fdsd.engine.delivery import plan_delivery
from fdsd.engine.request import Request

__all__ = ["Announced", "announce", "cut_here", "owners_of", "put", "slots_of", "spec_told", "spread"]


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
        error: What went wrong on this rank before; it is told later, and only rank 0's counts here.

    Raises:
        LoadError: Rank 0 cannot tell; on all ranks.

    >>> from fdsd.comms.alone import Alone
    >>> announce({"w": torch.ones(2), "lr": 0.1}, Alone()).objects
    {'lr': 0.1}
    """
    if 0 not in world.ranks:
        raise LoadError(f"rank 0 gives the state dict for all, and is not one of the ranks {listing(world.ranks)}.")
    said = _statement(full, error) if world.rank == 0 else None
    heard = ask(world, "the whole tensors that rank 0 gives", said, error)[world.ranks.index(0)]
    if isinstance(heard, str):
        raise LoadError(f"Rank 0 cannot give the state dict: {heard}. Nothing has been written on any rank.") from error
    specs, owners, pickled = heard
    return Announced(specs, owners, pickle.loads(pickled))  # of another rank of this very program


def _statement(full: Any, error: BaseException | None) -> Any:
    if error is None and as_mapping(full) is None:
        error = NoMapping(f"a {type(full).__name__} is no state dict")
    if error is not None:
        return f"{type(error).__name__}: {error}"
    sharded = [name for name, value in full.items() if isinstance(value, torch.Tensor) and not is_exact(value)]
    if sharded:
        return f"it has to be whole, and these tensors lie over ranks: {listing(sharded)}"
    specs = {name: TensorSpec(tuple(v.shape), v.dtype) for name, v in full.items() if is_exact(v)}
    owners = owners_of({name: full[name] for name in specs})
    try:
        pickled = pickle.dumps({name: value for name, value in full.items() if name not in specs})
    except Exception as fault:  # whatever an object of the user's raises
        return f"an entry that is no tensor cannot be sent: {fault}"
    return specs, owners, pickled


def owners_of(full: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Give for each tensor the first name of the same one.

    >>> w = torch.ones(2)
    >>> owners_of({"embed": w, "head": w})
    {'embed': 'embed', 'head': 'embed'}
    """
    first: dict[Hashable, str] = {}
    return {name: first.setdefault(tie_key(tensor), name) for name, tensor in full.items()}


def slots_of(
    local: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
    owners: Mapping[str, str],
    slot: Callable[[Any, TensorSpec], Slot],
) -> tuple[dict[str, Slot], BaseException | None]:
    """Find where whole tensors go, and all that does not fit.

    Args:
        local: The local entries.
        specs: The whole tensors.
        owners: For each whole tensor the first name of the same one.
        slot: Gives the slot for a local entry.

    Returns:
        The slot of each tensor, and the error, if there is one.
    """
    if not is_mapping(local):
        return {}, NoMapping(f"a {type(local).__name__} is no state dict to write to.")
    made: dict[str, Slot] = {}
    shared: dict[Hashable, Slot] = {}
    wrong: dict[str, str] = {}
    kind: type[SpecMismatch | Unsupported] = SpecMismatch
    for name, spec in specs.items():
        try:
            entry = local.get(name)
            key = (_tie_of(entry) or name, owners.get(name, name), spec)  # what is tied there is tied again
            if key not in shared:
                shared[key] = slot(entry, spec)
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
    full: Any, announced: Announced, slots: Mapping[str, Slot], world: World, error: BaseException | None
) -> None:
    """Send each rank its part of what rank 0 has. Collective.

    Args:
        full: On rank 0 the tensors.
        announced: What all know of them.
        slots: Where this rank's parts go.
        world: All ranks.
        error: What went wrong on this rank before; all raise then.
    """
    source = RankZero(full if world.rank == 0 else announced.specs)
    owners = dict.fromkeys(announced.owners.values())
    nodes = {owner: source.node(owner) for owner in owners}  # tied names share one, and travel once
    requests = {
        name: Request(nodes[announced.owners[name]], slot.target, everyone=False, out=slot.memory)
        for name, slot in slots.items()
    }
    for _ in plan_delivery(requests, world, error=error).run():
        pass  # it lies in the memory of its slot


def cut_here(
    full: Mapping[str, torch.Tensor], local: Mapping[str, Any], slot: Callable[[Any, TensorSpec], Slot]
) -> dict[str, Slot]:
    """Write this rank's parts of whole tensors that it has to where they go. Nothing travels.

    Args:
        full: The tensors.
        local: The local entries.
        slot: Gives the slot for a local entry.

    Raises:
        SpecMismatch: Shapes differ; nothing is written.

    >>> from functools import partial
    >>> slot = partial(Slot.of, device=torch.device("cpu"))
    >>> cut_here({"w": torch.tensor([1.0, 2.0])}, {"w": torch.zeros(2)}, slot)["w"].entry
    tensor([1., 2.])
    """
    full = {name: plain_of(tensor) for name, tensor in full.items()}
    slots, fault = slots_of(local, {name: spec_told(tensor) for name, tensor in full.items()}, owners_of(full), slot)
    if fault is not None:
        raise fault
    requests = {
        name: Request(defer_leaf(full[name], name), slot.target, everyone=False, out=slot.memory)
        for name, slot in slots.items()
        if slot.memory is not None
    }
    for _ in plan_delivery(requests, None, rank=this_rank()).run():
        pass
    return slots


def spec_told(told: Any) -> TensorSpec:
    """Read the shape and dtype off a tensor, or off what has them as ``size`` and ``dtype``.

    >>> spec_told(torch.ones(2))
    TensorSpec((2,), torch.float32)
    """
    return TensorSpec(tuple(told.shape if isinstance(told, torch.Tensor) else told.size), told.dtype)


def put(local: MutableMapping[str, Any], slots: Mapping[str, Slot]) -> None:
    """Write the entries of slots into a local state dict, where there is something.

    >>> local = {"w": 1}; put(local, {"w": Slot(None, None, 2), "b": Slot(None, None, None)}); local
    {'w': 2}
    """
    local.update({name: slot.entry for name, slot in slots.items() if slot.entry is not None})
