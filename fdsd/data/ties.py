"""Ties: which names hold one and the same tensor.

Two names are tied when their leaves are one view of one storage object: the same storage, offset, shape and
strides. A bare data pointer is never enough, since empty and meta tensors share it. Tensors over ranks are tied when
what this rank holds of them is, and their global shapes and placements are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from fdsd.data.spec import TensorSpec, VirtualTensor, is_exact

__all__ = ["storage_id", "tie_key", "ties"]


def storage_id(tensor: torch.Tensor) -> int:
    """Give what tells one storage from another while both live.

    The Python object of a storage may differ from call to call; its C++ object does not.
    """
    found: int = tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # torch has no public name
    return found


def tie_key(leaf: object) -> Hashable | None:
    """Give a key that is equal for two live leaves exactly if they are tied; ``None`` for what cannot be.

    >>> w = torch.ones(2, 2)
    >>> tie_key(w) == tie_key(torch.nn.Parameter(w)), tie_key(w) == tie_key(w.t())
    (True, False)
    """
    if isinstance(leaf, torch.Tensor) and is_exact(leaf) and leaf.layout is torch.strided and not leaf.is_nested:
        place = storage_id(leaf), leaf.storage_offset(), tuple(leaf.shape), leaf.stride()
        return *place, leaf.dtype, leaf.is_conj(), leaf.is_neg()
    if isinstance(leaf, TensorSpec):
        return None if leaf.tie is None else ("spec", leaf.tie, leaf.shape, leaf.dtype)
    if isinstance(leaf, torch.Tensor) and (held := _held(leaf)):
        return "over ranks", tuple(leaf.shape), leaf.dtype, getattr(leaf, "placements", None), held
    if isinstance(leaf, torch.Tensor | VirtualTensor):
        return "object", id(leaf)
    return None


def _held(leaf: torch.Tensor) -> tuple[Hashable, ...]:
    """Tell which memory of this rank a wrapper over ranks has: ``state_dict()`` makes a new wrapper for each name.

    DTensor and ShardedTensor are known by the attributes that hold their local tensors; their classes cost an import.
    """
    local: Any = getattr(leaf, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        return (tie_key(local),)
    return tuple([tie_key(shard.tensor) for shard in getattr(leaf, "_local_shards", ())])


def ties(state: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """List the groups of two and more names that hold the same tensor, in order.

    >>> w = torch.ones(2)
    >>> ties({"embed": w, "norm": torch.ones(2), "head": w})
    [('embed', 'head')]
    """
    groups: dict[Hashable, list[str]] = {}
    for name, leaf in state.items():
        if (key := tie_key(leaf)) is not None:
            groups.setdefault(key, []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]
