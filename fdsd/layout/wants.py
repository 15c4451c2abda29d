"""`Want`: the boxes of a tensor that some ranks want, and where each lies in their local tensors.

What is wanted is said by a layout, by pieces (at most one box a rank), or as a whole; this is the one form of all
three. Expressions and sources are unknown here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from attrs import frozen

from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.layout.layout import Block, Layout
from fdsd.layout.pieces import Pieces

__all__ = ["Target", "Want", "blocks_of", "local_shape_of", "wants_of"]

Target = Layout | Pieces | None
"""Where a tensor is wanted; ``None``: whole."""


@frozen(cache_hash=True)
class Want:
    """Some ranks that want the same boxes in the same places of a local tensor.

    Attributes:
        blocks: The boxes that are not empty.
        shape: The shape of the local tensor.
        dtype: Its dtype.
        ranks: Who wants it, ascending.
    """

    blocks: tuple[Block, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: tuple[int, ...]


def blocks_of(target: Target, shape: tuple[int, ...], rank: int) -> tuple[Block, ...]:
    """Give the boxes of a tensor that a rank has, with their places in its local tensor.

    Args:
        target: How the tensor lies, or is wanted.
        shape: The shape of the whole tensor.
        rank: The rank.

    Raises:
        SpecMismatch: The target does not fit the shape.
        Unsupported: By pieces, the rank has several boxes.

    >>> blocks_of(Pieces.of(1, [(((2,), (2,)), [1])]), (4,), 1)
    (Block(starts=(2,), sizes=(2,), offset=(0,)),)
    """
    if isinstance(target, Layout):
        return target.blocks(shape, rank)
    box = ((0,) * len(shape), shape) if target is None else _box(target, shape, rank)
    return () if box is None or 0 in box[1] else (Block(box[0], box[1], (0,) * len(shape)),)


def local_shape_of(target: Target, shape: tuple[int, ...], rank: int) -> tuple[int, ...] | None:
    """Give the shape of a rank's local tensor; ``None`` if the rank has none.

    Args:
        target: How the tensor lies, or is wanted.
        shape: The shape of the whole tensor.
        rank: The rank.

    Raises:
        SpecMismatch: The target does not fit the shape.
        Unsupported: By pieces, the rank has several boxes.

    >>> local_shape_of(None, (4,), 1), local_shape_of(Pieces.whole((4,), [0]), (4,), 1)
    ((4,), None)
    """
    if isinstance(target, Layout):
        if rank in target.mesh:
            return target.local_shape(shape, rank)
        target.blocks(shape, rank)  # for its error
        return None
    if target is None:
        return shape
    box = _box(target, shape, rank)
    return None if box is None else box[1]


def _box(pieces: Pieces, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if pieces.ndim != len(shape):
        raise SpecMismatch(f"pieces of {pieces.ndim} dims are none of a tensor of shape {shape}.")
    boxes = [pieces.box(i) for i, ranks in enumerate(pieces.ranks) if rank in ranks]
    if len(boxes) > 1:
        raise Unsupported(
            f"by pieces, rank {rank} has {len(boxes)} boxes of one tensor: {listing(boxes)}. Use a Layout."
        )
    return boxes[0] if boxes else None


def wants_of(
    shape: tuple[int, ...], dtype: torch.dtype, targets: Iterable[tuple[Target, Iterable[int]]]
) -> tuple[Want, ...]:
    """Gather ranks that want the same.

    Args:
        shape: The shape of the whole tensor.
        dtype: The dtype of the local tensors.
        targets: Where the tensor is wanted, each with the ranks for which this counts.

    Raises:
        SpecMismatch, Unsupported: As for ``blocks_of``.

    >>> [(want.shape, want.ranks) for want in wants_of((4,), torch.int8, [(None, [1, 0])])]
    [((4,), (0, 1))]
    """
    found: dict[tuple[tuple[Block, ...], tuple[int, ...]], set[int]] = {}
    for target, ranks in targets:
        if target is None:
            found.setdefault((blocks_of(None, shape, -1), shape), set()).update(ranks)
            continue
        for rank in ranks:
            local = local_shape_of(target, shape, rank)
            if local is not None:
                found.setdefault((blocks_of(target, shape, rank), local), set()).add(rank)
    return tuple(
        [Want(blocks, local, dtype, tuple(sorted(ranks))) for (blocks, local), ranks in found.items() if ranks]
    )
