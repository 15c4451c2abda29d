"""Copies between tensors of this process, many at once. What is overwritten before it would be read is kept first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fdsd.algebra.dtypes import copy_elements, movable
from fdsd.data.ties import storage_id

__all__ = ["Pair", "copy_pairs", "prepared"]

_COMMON = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool})

Pair = tuple[torch.Tensor, torch.Tensor]
"""A source and a target of one shape."""


def prepared(pairs: Sequence[Pair], also_written: Iterable[torch.Tensor] = ()) -> list[Pair]:
    """Make the pairs of which nothing is overwritten before it is read; those that are copied already are left out.

    Args:
        pairs: Sources and targets.
        also_written: Memory that is written beside.

    >>> a, b = torch.ones(2), torch.zeros(2)
    >>> copy_pairs(prepared([(a, b), (b, a)])); a, b
    (tensor([0., 0.]), tensor([1., 1.]))
    """
    moves = [(source.detach(), target.detach()) for source, target in pairs]
    moves = [pair for pair in moves if not _is_same(*pair)]
    written = {storage_id(target) for _, target in moves} | {storage_id(target) for target in also_written}
    return [(_kept(source) if storage_id(source) in written else source, target) for source, target in moves]


def copy_pairs(pairs: Sequence[Pair]) -> None:
    """Copy each source to its target, one after the other.

    Args:
        pairs: Sources and targets; elements are cast.
    """
    plain = [pair for pair in pairs if _is_plain(*pair)]
    if plain:
        copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        copy_all([target for _, target in plain], [source for source, _ in plain])
    for source, target in pairs:
        if not _is_plain(source, target):
            copy_elements(source, target)


def _is_plain(source: torch.Tensor, target: torch.Tensor) -> bool:
    return source.dtype == target.dtype and source.dtype in _COMMON


def _kept(source: torch.Tensor) -> torch.Tensor:
    return movable(source).clone().view(source.dtype)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors are one view of one memory, so that nothing has to be done."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.stride() == b.stride()
        and storage_id(a) == storage_id(b)
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )
