"""The drop-in for ``torch.distributed._state_dict_utils``: changing the import is all that its users do.

Each function is a short pipeline over the parts beside it. They differ from torch's where those go wrong: nothing is
half written, names are matched on all ranks, tied tensors stay tied, each byte travels once to each rank that needs it,
and inputs are changed only by functions whose purpose that is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fdsd.comms.kinds import Once, is_sharded_tensor
from fdsd.comms.modules import is_dtensor
from fdsd.comms.worlds import is_among, world_in
from fdsd.compat._companions import CompanionMismatch, are_alike, companions, copied
from fdsd.compat._cpu_memory import Allocator, check_pinning
from fdsd.compat._destinations import Destination
from fdsd.compat._flat_keys import (
    CONTAINER_TYPE,
    FLATTEN_MAPPING,
    OBJ_PATH,
    PATH_ITEM,
    STATE_DICT_TYPE,
    flatten,
    set_element,
    traverse,
    unflatten,
)
from fdsd.compat._full import Announced, announce, cut_here, destinations_of, put, spec_told, spread
from fdsd.compat._nested import Path, leaves_of, nothing_of, type_fault
from fdsd.compat._subclasses import plain_tree
from fdsd.compat._whole_trees import on_cpu, whole_tree, with_tensors
from fdsd.data.values import is_sequence
from fdsd.engine.wholes import gathered

__all__ = [
    "CONTAINER_TYPE",
    "FLATTEN_MAPPING",
    "OBJ_PATH",
    "PATH_ITEM",
    "STATE_DICT_TYPE",
    "CompanionMismatch",
    "_TensorInfo",
    "_all_gather_sharded_tensor",
    "_broadcast_state_dict",
    "_broadcast_tensors",
    "_check_state_dict_similarity",
    "_copy_state_dict",
    "_create_cpu_state_dict",
    "_distribute_state_dict",
    "_distribute_tensors",
    "_flatten_state_dict",
    "_gather_state_dict",
    "_identity_func",
    "_iterate_state_dict",
    "_offload_state_dict_to_cpu",
    "_set_element",
    "_traverse_state_dict",
    "_unflatten_state_dict",
]

_CPU = torch.device("cpu")
_TensorFunc = Callable[[Any, Any, Any, Any], Any]


class _TensorInfo(NamedTuple):
    size: torch.Size
    dtype: torch.dtype


def _gather_state_dict(
    state_dict: dict[str, Any],
    *,
    pg: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    cpu_offload: bool = False,
    ranks_only: tuple[int, ...] = (),
    type_check: bool = True,
) -> dict[str, Any]:
    """Make the tensors that lie over ranks whole. Collective over these ranks; each byte goes once to who wants it.

    Args:
        state_dict: Dicts, lists and tuples, nested in any way.
        pg: The group over which ShardedTensors lie; their own if left out.
        device: Where a ShardedTensor goes on ranks that have no shard of it.
        cpu_offload: Put all tensors on the CPU.
        ranks_only: The ranks (of ``pg``) that get the result; all if empty. The others get ``{}``.
        type_check: Refuse leaves that are neither tensors nor plain values; else such are copied.

    Returns:
        Plain dicts, lists and tuples. Tensors that are whole already are given by reference; tied ones stay tied.

    Raises:
        ValueTypeError: A leaf is of another type; on all ranks.
        RankDisagreement: The ranks have different tensors under one name; on all ranks.

    >>> _gather_state_dict({"w": torch.ones(2), "betas": (0.9, 0.99)})
    {'w': tensor([1., 1.]), 'betas': (0.9, 0.99)}
    """
    return whole_tree(
        state_dict,
        pg=pg,
        device=device,
        cpu_offload=cpu_offload,
        ranks_only=ranks_only,
        type_check=type_check,
    )


def _offload_state_dict_to_cpu(
    state_dict: dict[str, Any], *, ranks_only: tuple[int, ...] = (), type_check: bool = True
) -> dict[str, Any]:
    """Put all tensors on the CPU. Those that are there already are given by reference; sharded ones keep their layout.

    Args:
        state_dict: Dicts, lists and tuples, nested in any way.
        ranks_only: The ranks that get the result; all if empty. The others get ``{}``.
        type_check: Refuse leaves that are neither tensors nor plain values; else such are copied.

    Raises:
        ValueTypeError: A leaf is of another type.
        NoData: A tensor is on the meta device.

    >>> _offload_state_dict_to_cpu({"w": torch.ones(2)})
    {'w': tensor([1., 1.])}
    """
    _check_types(state_dict, type_check)
    if not is_among(ranks_only, None):
        return nothing_of(state_dict)
    return on_cpu(state_dict)


def _create_cpu_state_dict(
    state_dict: dict[str, Any], pin_memory: bool = False, share_memory: bool = False
) -> dict[str, Any]:
    """Make a state dict of the same structure with new memory on the CPU for all tensors; their values are undefined.

    Args:
        state_dict: Dicts, lists and tuples, nested in any way.
        pin_memory: Page-locked memory, for fast copies from an accelerator.
        share_memory: Shared memory, for other processes.

    Returns:
        Plain dicts, lists and tuples. Sharded tensors keep their layout, and tied tensors are tied again; tensors
        without dims are 0; what is no tensor is as it was.

    Raises:
        PinningError: There is no accelerator for which memory could be locked.

    >>> _create_cpu_state_dict({"step": torch.tensor(7.0), "lr": 0.1}, share_memory=True)
    {'step': tensor(0.), 'lr': 0.1}
    """
    if pin_memory:
        check_pinning()
    allocate = Once(Allocator(pin_memory, share_memory))
    return with_tensors(state_dict, lambda path, leaf: allocate(leaf))


def _copy_state_dict(
    state_dict: dict[str, Any], copy_state_dict: dict[str, Any], non_blocking: bool = False, type_check: bool = True
) -> dict[str, Any]:
    """Copy the tensors of a state dict into those of another one of the same structure. All is checked first.

    Args:
        state_dict: What is copied.
        copy_state_dict: Whose tensors are written; the dicts themselves are not.
        non_blocking: Do not wait for copies between devices.
        type_check: Refuse leaves that are neither tensors nor plain values; else such are copied.

    Returns:
        Plain dicts, lists and tuples, with the tensors of ``copy_state_dict``, and what is no tensor of ``state_dict``.

    Raises:
        CompanionMismatch: The structures differ.
        SpecMismatch: Shapes or layouts differ.
        ValueTypeError: A leaf is of another type.

    >>> target = {"w": torch.zeros(2), "lr": 0.2}
    >>> _copy_state_dict({"w": torch.ones(2), "lr": 0.1}, target), target
    ({'w': tensor([1., 1.]), 'lr': 0.1}, {'w': tensor([1., 1.]), 'lr': 0.2})
    """
    _check_types(state_dict, type_check)
    return copied(state_dict, copy_state_dict, non_blocking)


def _check_state_dict_similarity(state_dict: dict[str, Any], compared_state_dict: dict[str, Any]) -> bool:
    """Tell whether two state dicts have the same structure, and tensors of the same shapes, dtypes and layouts.

    >>> _check_state_dict_similarity({"w": torch.ones(2)}, {"w": torch.zeros(2)})
    True
    >>> _check_state_dict_similarity({"w": torch.ones(2)}, {"w": torch.zeros(1)})
    False
    """
    return are_alike(state_dict, compared_state_dict)


def _broadcast_state_dict(
    full_state_dict: dict[str, Any],
    local_state_dict: dict[str, Any],
    device: torch.device,
    pg: dist.ProcessGroup | None = None,
    strict: bool = False,
    cpu_offload: bool = False,
) -> None:
    """Bring what rank 0 has into the local state dict of each rank, by name. Collective; ranks get only their parts.

    Args:
        full_state_dict: Whole tensors and other values; only those of rank 0 count.
        local_state_dict: Is changed: sharded tensors are filled (on the meta device: replaced), others replaced. Names
            that are not in it are left out.
        device: Where new memory is made.
        pg: The ranks; all if left out.
        strict: Remove what rank 0 does not have.
        cpu_offload: All that is written goes to the CPU.

    Raises:
        LoadError: Rank 0 gives something that cannot be sent.
        SpecMismatch: Shapes differ on some rank. As any error, it is raised on all ranks, and nothing is written.

    >>> local = {"w": torch.zeros(2, dtype=torch.int8), "lr": None}
    >>> _broadcast_state_dict({"w": torch.ones(2), "new": 1}, local, torch.device("cpu"), strict=True); local
    {'w': tensor([1, 1], dtype=torch.int8)}
    """
    world = world_in(pg)
    full_state_dict, odd = plain_tree(full_state_dict)
    said = announce(full_state_dict, world, odd)
    destination = partial(Destination.of, device=torch.device(device), offload=cpu_offload)
    destinations, fault = destinations_of(local_state_dict, said.specs, said.owners, destination)
    spread(full_state_dict, said, destinations, world, fault)
    put(local_state_dict, destinations)
    local_state_dict.update({name: value for name, value in said.objects.items() if name in local_state_dict})
    for name in [name for name in local_state_dict if strict and name not in said]:
        del local_state_dict[name]


def _distribute_state_dict(
    full_state_dict: dict[str, Any],
    local_state_dict: dict[str, Any],
    device: torch.device,
    pg: dist.ProcessGroup | None = None,
) -> None:
    """Cut each rank's parts out of whole tensors that every rank has. Nothing travels: that ranks differ is not seen.

    Args:
        full_state_dict: Whole tensors and other values.
        local_state_dict: Is changed: tensors are replaced, each with its own dtype and layout; those of names that
            are not in it are left out. What is no tensor, or has no dims, is added.
        device: Where new memory is made.
        pg: Not needed.

    Raises:
        SpecMismatch: Shapes differ; nothing is written.

    >>> local = {"w": torch.zeros(2, dtype=torch.int8)}
    >>> _distribute_state_dict({"w": torch.ones(2), "lr": 0.1}, local, torch.device("cpu")); local
    {'w': tensor([1, 1], dtype=torch.int8), 'lr': 0.1}
    """
    tensors = {name: value for name, value in full_state_dict.items() if isinstance(value, torch.Tensor)}
    destination = partial(Destination.of, device=torch.device(device), in_place=False)
    put(local_state_dict, cut_here(tensors, local_state_dict, destination))
    for name, value in full_state_dict.items():
        if name not in tensors:
            local_state_dict[name] = value
        elif not tensors[name].ndim and local_state_dict.get(name) is None:
            local_state_dict[name] = tensors[name].detach().to(_CPU, copy=True)


def _distribute_tensors(
    local_state_dict: dict[str, Any],
    keys: list[str],
    device: torch.device,
    pg: dist.ProcessGroup | None = None,
) -> None:
    """Replace pairs of a DTensor and the whole tensor by the DTensor with its part of it. Nothing travels.

    Args:
        local_state_dict: Is changed: the DTensor is filled in place, unless it is on the meta device.
        keys: The names to look at; those without a pair are left alone.
        device: Where new memory is made.
        pg: Not needed.

    Raises:
        SpecMismatch: Shapes differ; nothing is written.
    """
    pairs = {key: pair for key in keys if is_sequence(pair := local_state_dict.get(key)) and len(pair) == 2}
    entries, wholes = ({key: pair[i] for key, pair in pairs.items()} for i in (0, 1))
    put(local_state_dict, cut_here(wholes, entries, partial(Destination.of, device=torch.device(device))))


def _broadcast_tensors(
    full_state_dict: dict[str, Any],
    local_state_dict: dict[str, Any],
    keys: list[str],
    device: torch.device,
    pg: dist.ProcessGroup | None = None,
) -> None:
    """Do as ``_broadcast_state_dict`` with tensors of which the other ranks know, and give, the shape and dtype."""
    world = world_in(pg)
    specs = {key: spec_told(full_state_dict[key]) for key in keys}
    said = Announced(specs, {key: key for key in keys}, {})
    destinations, fault = destinations_of(
        local_state_dict, said.specs, said.owners, partial(Destination.of, device=torch.device(device))
    )
    spread({key: full_state_dict[key] for key in keys}, said, destinations, world, fault)
    put(local_state_dict, destinations)


_flatten_state_dict = flatten
_unflatten_state_dict = unflatten
_traverse_state_dict = traverse
_set_element = set_element


def _iterate_state_dict(
    iter_object: Any,
    sharded_tensor_func: _TensorFunc,
    dtensor_func: _TensorFunc,
    tensor_func: _TensorFunc,
    *,
    pg: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    cpu_offload: bool = False,
    companion_obj: Any = None,
    ranks_only: tuple[int, ...] = (),
    type_check: bool = True,
    non_blocking: bool = True,
) -> Any:
    """Change each tensor by a function of its kind, which gets the tensor, ``pg``, ``device`` and the companion.

    Args:
        iter_object: Dicts, lists and tuples, nested in any way; or a leaf.
        sharded_tensor_func: For ShardedTensors.
        dtensor_func: For DTensors.
        tensor_func: For other tensors.
        pg: Handed on to the functions.
        device: Handed on to the functions.
        cpu_offload: Put the results on the CPU, if there is no companion.
        companion_obj: Of the same structure; the results are copied into its tensors, which are given then.
        ranks_only: The ranks (of ``pg``) that get the result; all if empty. The functions run on all.
        type_check: Refuse leaves that are neither tensors nor plain values; else such are copied.
        non_blocking: Do not wait for copies between devices.

    Raises:
        CompanionMismatch: The structures differ.
        ValueTypeError: A leaf is of another type.
        NoData: A result that is to be put on the CPU is on the meta device.

    >>> keep = lambda tensor, pg, device, companion: tensor
    >>> _iterate_state_dict({"w": torch.ones(2)}, keep, keep, lambda tensor, *_: tensor + 1)
    {'w': tensor([2., 2.])}
    """
    _check_types(iter_object, type_check)
    others = {} if companion_obj is None else companions(iter_object, companion_obj)

    def change(path: Path, leaf: Any) -> Any:
        kind = dtensor_func if is_dtensor(leaf) else sharded_tensor_func if is_sharded_tensor(leaf) else tensor_func
        return kind(leaf, pg, device, others[path][1] if others else None)

    made = with_tensors(iter_object, change)
    if not is_among(ranks_only, pg):
        return nothing_of(made)
    if companion_obj is not None:
        return copied(made, companion_obj, non_blocking)
    return on_cpu(made) if cpu_offload else made


def _identity_func(obj: torch.Tensor, pg: Any, device: torch.device | None, companion_obj: Any) -> torch.Tensor:
    return obj


def _all_gather_sharded_tensor(
    sharded_tensor: Any, pg: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Give the whole of a ShardedTensor on all ranks over which it lies. Collective."""
    whole: torch.Tensor = gathered({"": sharded_tensor}, None, group=pg, device=device)[""]
    return whole


def _check_types(tree: Any, type_check: bool) -> None:
    fault = type_fault(leaves_of(tree)) if type_check else None
    if fault is not None:
        raise fault
