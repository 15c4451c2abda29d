"""Copies between tensors of this process, many at once. What is overwritten before it would be read is kept first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from attrs import define, field

from fdsd.algebra.dtypes import copy_elements, movable
from fdsd.data.memory import is_grid, is_same_view, storage_id
from fdsd.layout.layout import Block, Layout

__all__ = ["Cuts", "Pair", "copy_pairs", "prepared"]

_COMMON = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool})

Pair = tuple[torch.Tensor, torch.Tensor]
"""A source and a target of one shape."""


@define(eq=False)
class Cuts:
    """The parts that one rank has of whole tensors; where they lie is worked out once for each layout and shape.

    Attributes:
        rank: The rank.
    """

    rank: int
    _known: dict[tuple[int, tuple[int, ...]], tuple[Layout, tuple[Block, ...]]] = field(factory=dict)

    def pairs(self, whole: torch.Tensor, layout: Layout, local: torch.Tensor) -> Iterator[Pair]:
        """Give the parts of a whole tensor, each with its place in the local one.

        Args:
            whole: The tensor.
            layout: How it is cut.
            local: The local tensor of the rank.

        >>> from fdsd.layout.mesh import Mesh
        >>> from fdsd.layout.placement import Shard
        >>> list(Cuts(1).pairs(torch.tensor([1, 2, 3, 4]), Layout(Mesh({"dp": 2}), [Shard(0)]), torch.zeros(2)))
        [(tensor([3, 4]), tensor([0., 0.]))]
        """
        key = id(layout), whole.shape
        if key not in self._known:  # which keeps the layout, so that no other gets its identity
            self._known[key] = layout, layout.blocks(whole.shape, self.rank)
        for starts, sizes, offset in self._known[key][1]:
            place = local if sizes == local.shape else _box(local, offset, sizes)
            yield _box(whole, starts, sizes), place


def _box(tensor: torch.Tensor, starts: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    strides, begin = tensor.stride(), tensor.storage_offset()
    for start, stride in zip(starts, strides, strict=True):
        begin += start * stride
    return tensor.as_strided(sizes, strides, begin)


def prepared(pairs: Sequence[Pair], also_written: Iterable[torch.Tensor] = ()) -> list[Pair]:
    """Make the pairs of which nothing is overwritten before it is read; those that are copied already are left out.

    Args:
        pairs: Sources and targets.
        also_written: Memory that is written beside.

    >>> a, b = torch.ones(2), torch.zeros(2)
    >>> copy_pairs(prepared([(a, b), (b, a)])); a, b
    (tensor([0., 0.]), tensor([1., 1.]))
    """
    moves = [(_plain(source), _plain(target)) for source, target in pairs]
    grids = [pair for pair in moves if is_grid(pair[0]) and is_grid(pair[1])]
    if len(grids) < len(moves):
        return [*_safe(grids, also_written), *_opaque(moves)]
    return _safe(moves, also_written)


def _safe(moves: Sequence[Pair], also_written: Iterable[torch.Tensor]) -> list[Pair]:
    moves = [pair for pair in moves if not is_same_view(*pair)]
    written = {storage_id(target) for _, target in moves} | {storage_id(target) for target in also_written}
    return [(_kept(source) if storage_id(source) in written else source, target) for source, target in moves]


def _opaque(moves: Sequence[Pair]) -> list[Pair]:
    """Prepare the pairs of which one has no storage to ask for: a source that is used again is copied to be safe."""
    pairs = [(a, b) for a, b in moves if not (is_grid(a) and is_grid(b)) and a is not b]
    return [(a.clone(), b) for a, b in pairs]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def copy_pairs(pairs: Sequence[Pair]) -> None:
    """Copy each source to its target, one after the other.

    Args:
        pairs: Sources and targets; elements are cast.
    """
    plain = [pair for pair in pairs if _is_plain(*pair)]
    if plain:
        copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        copy_all([target for _, target in plain], [source for source, _ in plain])
    for source, target in pairs if len(plain) < len(pairs) else ():
        if not _is_plain(source, target):
            copy_elements(source, target)


def _is_plain(source: torch.Tensor, target: torch.Tensor) -> bool:
    return source.dtype == target.dtype and source.dtype in _COMMON


def _kept(source: torch.Tensor) -> torch.Tensor:
    return movable(source).clone().view(source.dtype)
