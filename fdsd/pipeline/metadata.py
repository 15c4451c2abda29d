"""How the versions that ``nn.Module`` keeps beside its state follow the names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["move_metadata"]


def move_metadata(metadata: Mapping[str, Any] | None, moves: Iterable[tuple[str, str]]) -> Mapping[str, Any] | None:
    """Give the metadata of modules under the names that their tensors have now.

    Args:
        metadata: Module path to versions, as in ``state_dict()._metadata``.
        moves: (old FQN, new FQN) of tensors that were passed on.

    >>> move_metadata({"": {"version": 1}, "bn": {"version": 2}}, [("bn.weight", "norm.weight")])
    {'': {'version': 1}, 'norm': {'version': 2}}
    """
    if metadata is None:
        return None
    moved: dict[str, Any] = {"": metadata[""]} if "" in metadata else {}
    for old, new in moves:
        while True:
            old, _, old_leaf = old.rpartition(".")
            new, _, new_leaf = new.rpartition(".")
            if old_leaf != new_leaf or not new or not old or new in moved:
                break
            if old in metadata:
                moved[new] = metadata[old]
    return moved
