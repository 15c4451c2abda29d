"""Ties: which names hold one and the same tensor.

Two names are tied when their leaves are one view of one storage object: the same storage, offset, shape and
strides. A bare data pointer is never enough, since empty and meta tensors share it. Tensors over ranks are tied when
what this rank holds of them is, and their global shapes and placements are equal. A leaf that has no memory yet lies
where it would lie if each source were row-major memory, so that all kinds of leaves are tied alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch

from fdsd.data.memory import is_grid, storage_id
from fdsd.data.place import Place, row_major_or
from fdsd.data.spec import PlainAccess, TensorSpec, VirtualTensor

__all__ = ["place_in_parts", "place_of", "place_over_ranks", "tie_key", "ties"]


def place_of(leaf: object) -> Place | None:
    """Give where a leaf lies; ``None`` for what cannot be tied, or is not known to share memory with anything.

    >>> w = torch.ones(2, 3)
    >>> place_of(w[1]).offset, place_of(w.t()).strides, place_of(TensorSpec((2,), torch.int8))
    (3, (1, 3), None)
    """
    if isinstance(leaf, TensorSpec):
        return leaf.tie if leaf.tie is None or isinstance(leaf.tie, Place) else Place(("spec", leaf.tie))
    if isinstance(leaf, VirtualTensor):
        return leaf.place
    if not isinstance(leaf, torch.Tensor):
        return None
    return _place_in_memory(leaf) if is_grid(leaf) else place_over_ranks(leaf) or Place(("object", id(leaf)))


def _place_in_memory(tensor: torch.Tensor) -> Place:
    root = "storage", storage_id(tensor), tensor.is_conj(), tensor.is_neg()
    strides = None if tensor.is_contiguous() else row_major_or(tensor.shape, tensor.stride())
    return Place(root, int(tensor.storage_offset()), strides)


def place_over_ranks(tensor: torch.Tensor) -> Place | None:
    """Tell which memory of this rank a wrapper over ranks has: ``state_dict()`` makes a new wrapper for each name.

    DTensor and ShardedTensor are known by the attributes that hold their local tensors; their classes cost an import.
    """
    local: Any = getattr(tensor, "_local_tensor", None)
    shards = [local] if isinstance(local, torch.Tensor) else [s.tensor for s in getattr(tensor, "_local_shards", ())]
    if not shards:
        return None
    with PlainAccess():
        placements = getattr(tensor, "placements", None)
    return place_in_parts(placements, shards)


def place_in_parts(placements: Hashable, parts: Iterable[torch.Tensor]) -> Place:
    """Tell which memory of this rank a tensor over ranks has, by what is here of it."""
    return Place(("over ranks", placements, tuple([tie_key(part) for part in parts])))


def tie_key(leaf: object) -> Hashable | None:
    """Give a key that is equal for two live leaves exactly if they are tied; ``None`` for what cannot be.

    >>> w = torch.ones(2, 2)
    >>> tie_key(w) == tie_key(torch.nn.Parameter(w)), tie_key(w) == tie_key(w.t())
    (True, False)
    """
    if isinstance(leaf, torch.Tensor):
        if is_grid(leaf):
            return _place_in_memory(leaf), tuple(leaf.shape), leaf.dtype
        if (held := place_over_ranks(leaf)) is None:
            return "object", id(leaf)  # it may have no shape to ask for
        with PlainAccess():
            return held, tuple(leaf.shape), leaf.dtype
    place = place_of(leaf)
    if place is None:
        return None
    spec = leaf if isinstance(leaf, TensorSpec) else leaf.spec if isinstance(leaf, VirtualTensor) else None
    return None if spec is None else (place, spec.shape, spec.dtype)


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
