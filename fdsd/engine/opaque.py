"""Copies between tensors of which only their own class knows where elements lie: subclasses of users, sparse layouts.

Such code may raise, so what it has done can be undone. Live modules and names of states are unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fdsd.data.errors import SpecMismatch
from fdsd.data.memory import is_grid, storage_id
from fdsd.engine.copying import Pair

__all__ = ["copies_of", "copy_opaque"]


def copy_opaque(pairs: Mapping[str, Pair]) -> None:
    """Copy each source to its target by the target's own ``copy_``; what is overwritten is read first.

    Args:
        pairs: Sources and targets by name.

    Raises:
        SpecMismatch: A tensor does not take its value; others may have taken theirs.

    >>> eye = torch.eye(2).to_sparse()
    >>> copy_opaque({"e": ((2 * torch.eye(2)).to_sparse(), eye)}); eye.to_dense().sum()
    tensor(4.)
    """
    with torch.no_grad():
        written: dict[int, str] = {}
        for name, (_, target) in pairs.items():
            written.update(dict.fromkeys(_memories(target), name))
        moves: dict[str, Pair] = {}
        for name, (source, target) in pairs.items():
            is_safe = all(written.get(memory, name) == name for memory in _memories(source))
            moves[name] = (source if is_safe else source.clone()), target
        for name, (source, target) in moves.items():
            try:
                target.copy_(source)
            except Exception as error:  # whatever a class raises
                raise SpecMismatch(f"{name!r}, a {_told(target)}, does not take a {_told(source)}: {error}") from error


def copies_of(pairs: Mapping[str, Pair]) -> Callable[[], None]:
    """Copy what is in the targets, and give the way back to it."""
    with torch.no_grad():
        kept = [(target, target.detach().clone()) for _, target in pairs.values()]

    def undo() -> None:
        with torch.no_grad():
            for target, copy in kept:
                target.copy_(copy)

    return undo


def _memories(tensor: Any) -> Iterator[int]:
    """Give what tells one memory from another: of a wrapper those of the tensors in it."""
    if is_grid(tensor):
        yield storage_id(tensor)
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _memories(getattr(tensor, name))
    else:
        yield id(tensor)


def _told(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f" of layout {tensor.layout}"
    return type(tensor).__name__ + layout
