"""Memory that was made for an optimizer to be loaded into: which tensors those are, and for which optimizer.

A fresh optimizer shows a state that it has not got yet. Once something has been read into those tensors and they are
set, they become its own, as with torch, instead of being copied. The table keeps neither tensors nor optimizers alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from fdsd.data.optim import OptimState

__all__ = ["is_lent", "lend", "take"]

_LENT: Any = WeakTensorKeyDictionary()  # by tensor, a weak reference to its optimizer; torch gives no types


def _tensors(state: OptimState) -> list[torch.Tensor]:
    return [value for column in state.slots.values() for value in column.values() if isinstance(value, torch.Tensor)]


def lend(state: OptimState, optimizer: Optimizer) -> None:
    """Note that the tensors of a state were made for an optimizer, which has none yet.

    >>> adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    >>> state = OptimState({"exp_avg": {"w": torch.zeros(1)}})
    >>> lend(state, adam)
    >>> is_lent(state.slots["exp_avg"]["w"], [adam]), is_lent(torch.zeros(1), [adam])
    (True, False)
    """
    owner = weakref.ref(optimizer)
    for tensor in _tensors(state):
        _LENT[tensor] = owner


def is_lent(value: object, optimizers: Sequence[Optimizer]) -> bool:
    """Tell whether a value is a tensor that was made for one of some optimizers, and is not its own yet."""
    owner = _LENT.get(value) if _LENT and isinstance(value, torch.Tensor) else None
    return owner is not None and any(owner() is one for one in optimizers)


def take(state: OptimState, optimizers: Sequence[Optimizer]) -> None:
    """Note that optimizers have what was lent to them: any other place gets copies."""
    for tensor in _tensors(state) if _LENT else ():
        if is_lent(tensor, optimizers):
            del _LENT[tensor]
