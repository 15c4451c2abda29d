"""How the versions that ``nn.Module`` keeps beside its state follow the names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["move_metadata"]


def move_metadata(metadata: Mapping[str, Any] | None, moves: Iterable[tuple[str, str]]) -> Mapping[str, Any] | None:
    """Give the metadata of modules under the names that their tensors have now.

    Args:
        metadata: Module path to versions, as in ``state_dict()._metadata``.
        moves: (old FQN, new FQN) of tensors, and of the first part of those that were made of several.

    >>> move_metadata({"": {"version": 1}, "bn": {"version": 2}}, [("bn.weight", "norm.weight")])
    {'norm': {'version': 2}, '': {'version': 1}}
    """
    if metadata is None:
        return None
    moved: dict[str, Any] = {}
    for old, new in moves:
        old_path, new_path = old.split(".")[:-1], new.split(".")[:-1]
        while True:
            source, target = ".".join(old_path), ".".join(new_path)
            if source in metadata:
                moved.setdefault(target, metadata[source])
            if not old_path or not new_path or old_path[-1] != new_path[-1]:
                break
            del old_path[-1], new_path[-1]
    if "" in metadata:
        moved.setdefault("", metadata[""])
    return moved
