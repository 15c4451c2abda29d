"""Nested state dicts whose tensors lie over ranks, made whole. How tensors travel is the engine's business."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from fdsd.comms.kinds import Once, parts_of
from fdsd.comms.worlds import is_among, numbers_of
from fdsd.compat._cpu_memory import to_cpu
from fdsd.compat._errors import NoData
from fdsd.compat._nested import Path, leaves_of, mapped, named, nothing_of, type_fault
from fdsd.data.errors import listing
from fdsd.engine.wholes import gathered, lies_over_ranks

__all__ = ["on_cpu", "whole_tree", "with_tensors"]

_T = TypeVar("_T")


def whole_tree(
    tree: dict[str, Any],
    *,
    pg: Any = None,
    device: torch.device | None = None,
    cpu_offload: bool = False,
    ranks_only: tuple[int, ...] = (),
    type_check: bool = True,
    asked: str = "the tensors of a state dict",
) -> dict[str, Any]:
    """Make the tensors that lie over ranks whole; see ``_gather_state_dict``. Collective over these ranks.

    Args:
        tree: Dicts, lists and tuples, nested in any way.
        pg: The group over which ShardedTensors lie; their own if left out.
        device: Where a ShardedTensor goes on ranks that have no shard of it.
        cpu_offload: Put all tensors on the CPU.
        ranks_only: The ranks (of ``pg``) that get the result; all if empty. The others get ``{}``.
        type_check: Refuse leaves that are neither tensors nor plain values; else such are copied.
        asked: What for, with what has to be equal on all ranks.

    Raises:
        ValueTypeError: A leaf is of another type; on all ranks that have to meet.
        NoData: A tensor that is to be put on the CPU is on the meta device; likewise.

    >>> whole_tree({"w": torch.ones(2)})
    {'w': tensor([1., 1.])}
    """
    leaves = leaves_of(tree)
    names = {path: named(path) for path, leaf in leaves.items() if lies_over_ranks(leaf)}
    is_wanted = is_among(ranks_only, pg)
    error: Exception | None = type_fault(leaves) if type_check else None
    if cpu_offload and is_wanted:
        error = error or _data_fault({path: leaf for path, leaf in leaves.items() if path not in names})
    whole = gathered(
        {name: leaves[path] for path, name in names.items()},
        numbers_of(ranks_only, pg),
        group=pg,
        device=torch.device("cpu") if cpu_offload else None,
        spare=device,
        error=error,
        asked=asked,
    )
    if not is_wanted:
        return nothing_of(tree)
    move: Callable[[Any], Any] = Once(to_cpu) if cpu_offload else lambda tensor: tensor
    return with_tensors(tree, lambda path, leaf: whole[names[path]] if path in names else move(leaf))


def _data_fault(leaves: Mapping[Path, Any]) -> NoData | None:
    """Say which tensors have no data to put on the CPU, if there are any."""
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    names = [named(path) for path, tensor in tensors.items() if any(part.is_meta for part in parts_of(tensor))]
    if not names:
        return None
    they, are = ("it", "is") if len(names) == 1 else ("them", "are")
    return NoData(
        f"{listing(names)} {are} on the meta device, without data to put on the CPU. Give {they} memory first "
        "(to_empty()), or leave cpu_offload out."
    )


def on_cpu(tree: _T) -> _T:
    """Make a tree again, with each tensor on the CPU; what is there already is not copied.

    Raises:
        NoData: Tensors are on the meta device.

    >>> on_cpu({"w": torch.ones(1), "lr": 0.1})
    {'w': tensor([1.]), 'lr': 0.1}
    """
    if (fault := _data_fault(leaves_of(tree))) is not None:
        raise fault
    move = Once(to_cpu)
    return with_tensors(tree, lambda path, leaf: move(leaf))


def with_tensors(tree: _T, change: Callable[[Path, Any], Any]) -> _T:
    """Make a tree again, with each tensor changed.

    >>> with_tensors({"w": torch.ones(1), "lr": 0.1}, lambda path, tensor: tensor * 2)
    {'w': tensor([2.]), 'lr': 0.1}
    """
    made: _T = mapped(tree, lambda path, leaf: change(path, leaf) if isinstance(leaf, torch.Tensor) else leaf)
    return made
