"""Nested state dicts whose tensors lie over ranks, made whole. How tensors travel is the engine's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fdsd.comms.kinds import Once
from fdsd.comms.worlds import is_among, numbers_of
from fdsd.compat._cpu_memory import data_fault, to_cpu
from fdsd.compat._nested import Path, leaves_of, mapped, named, nothing_of, type_fault
from fdsd.engine.wholes import gathered, lies_over_ranks

__all__ = ["moved", "whole_tree", "with_tensors"]

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
        error = error or data_fault({named(path): leaf for path, leaf in leaves.items() if path not in names})
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
    move = moved(cpu_offload)
    return with_tensors(tree, lambda path, leaf: whole[names[path]] if path in names else move(leaf))


def moved(cpu_offload: bool) -> Callable[[Any], Any]:
    """Give the function that puts tensors on the CPU, or leaves them where they are.

    >>> moved(True)(torch.ones(1)), moved(False)(torch.ones(1))
    (tensor([1.]), tensor([1.]))
    """
    return Once(to_cpu) if cpu_offload else lambda tensor: tensor


def with_tensors(tree: _T, change: Callable[[Path, Any], Any]) -> _T:
    """Make a tree again, with each tensor changed.

    >>> with_tensors({"w": torch.ones(1), "lr": 0.1}, lambda path, tensor: tensor * 2)
    {'w': tensor([2.]), 'lr': 0.1}
    """
    made: _T = mapped(tree, lambda path, leaf: change(path, leaf) if isinstance(leaf, torch.Tensor) else leaf)
    return made
