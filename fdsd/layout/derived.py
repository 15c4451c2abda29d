"""How the result of an operation lies, if its inputs lie in given layouts and every rank works on what it has.

A guess at what is wanted, where nobody says it: dims follow the operation. Whether a rank has all that its part needs
is not asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from attrs import evolve

from fdsd.algebra.apply import defer_leaf
from fdsd.algebra.graph import walk
from fdsd.algebra.lazy import Computing, Lazy, Op
from fdsd.algebra.ops import Concat, Item, MergeDims, Origin, Permute, Select, SplitDim, Stack
from fdsd.data.errors import SpecMismatch
from fdsd.data.spec import TensorSpec, VirtualTensor, is_exact
from fdsd.layout.layout import Layout
from fdsd.layout.placed import PlacedSource
from fdsd.layout.placement import Placement, Shard
from fdsd.layout.sharded import Sharded, check_fit

__all__ = ["Lies", "derive", "fits", "lies_of"]

Lies = Layout | Literal["everywhere"] | None
"""How a tensor lies: in a layout, wholly on every rank, or in no way that is known."""

_Move = Callable[[int], int | None]


def derive(node: Lazy, known: Mapping[int, Lies]) -> Lies:
    """Derive how an expression lies.

    Args:
        node: The expression.
        known: How its inputs lie, by their ids.

    Returns:
        The layout that all inputs have, dims moved as the operation moves them; inputs that are everywhere fit any.
        ``None`` if layouts differ, or the dim that is cut does not stay.

    >>> from fdsd.algebra.apply import apply, defer_leaf
    >>> from fdsd.layout.mesh import Mesh
    >>> import torch
    >>> x = defer_leaf(torch.ones(2, 3))
    >>> derive(apply(Permute((1, 0)), x), {id(x): Layout(Mesh({"dp": 2}), [Shard(0)])})
    Layout(Mesh({'dp': 2}), (Shard(1),))
    """
    lies = [known[id(x)] for x in node.inputs]
    found = {one for one in lies if isinstance(one, Layout)}
    if not found:
        return None if None in lies else "everywhere"
    if len(found) > 1 or None in lies:
        return None
    (layout,) = found
    if isinstance(node.op, Item):
        return layout if len({spec.shape for spec in node.outputs}) == 1 and fits(layout, node.shape) else None
    if len(node.outputs) > 1:
        return layout
    move = _move_of(node.op, [x.spec for x in node.inputs if len(x.outputs) == 1], node.spec)
    if move is None:
        return None
    return _moved(layout, node.inputs[0].ndim, move, node.spec)


def lies_of(leaf: Any) -> Lies:
    """Tell how a leaf lies by itself: a sharded one, or a tensor that a source has laid out over ranks.

    Returns:
        Its layout; ``None`` for an expression over such tensors, and for one that lies in other pieces.

    >>> import torch
    >>> lies_of(torch.ones(2)), lies_of("extra")
    ('everywhere', 'everywhere')
    """
    if isinstance(leaf, Sharded):
        return leaf.layout
    if is_exact(leaf) or not isinstance(leaf, torch.Tensor | VirtualTensor):
        return "everywhere"
    node = defer_leaf(leaf)
    placed = [one.op for one in walk([node]) if isinstance(one.op, Origin) and isinstance(one.op.source, PlacedSource)]
    if not placed:
        return "everywhere"
    source, fqn = placed[0].source, placed[0].fqn
    placement = source.placement(fqn) if placed[0] is node.op and isinstance(source, PlacedSource) else None
    return placement if isinstance(placement, Layout) else None


def fits(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Tell whether a layout fits a shape.

    >>> from fdsd.layout.mesh import Mesh
    >>> fits(Layout(Mesh({"dp": 2}), [Shard(1)]), (4,))
    False
    """
    try:
        check_fit(layout, shape)
    except SpecMismatch:
        return False
    return True


def _moved(layout: Layout, ndim: int, move: _Move, spec: TensorSpec) -> Layout | None:
    placements: list[Placement] = []
    for placement in layout.placements:
        if not isinstance(placement, Shard):
            placements.append(placement)
            continue
        dim = move(placement.dim % ndim)
        if dim is None:
            return None
        placements.append(evolve(placement, dim=dim))
    made = Layout(layout.mesh, placements, order=layout.order)
    return made if fits(made, spec.shape) else None


def _move_of(op: Op, inputs: Sequence[TensorSpec], spec: TensorSpec) -> _Move | None:
    """Say to which dim of the result each dim of the inputs goes."""
    if isinstance(op, Permute):
        return op.dims.index
    if isinstance(op, SplitDim):
        return _split(op)
    if isinstance(op, MergeDims):
        return _merge(op, inputs[0].shape)
    if isinstance(op, Stack):
        return lambda dim: dim + (dim >= op.dim)
    if isinstance(op, Select):
        return lambda dim: None if dim == op.dim else dim - (dim > op.dim)
    is_like = all(x.ndim == spec.ndim for x in inputs) if not isinstance(op, Computing) else _same_shapes(inputs, spec)
    return (lambda dim: dim) if is_like or isinstance(op, Concat) else None


def _same_shapes(inputs: Sequence[TensorSpec], spec: TensorSpec) -> bool:
    return all(x.shape == spec.shape for x in inputs)


def _split(op: SplitDim) -> _Move:
    """A dim that is cut stays cut in its outermost part of more than one index."""
    first = next((k for k, size in enumerate(op.sizes) if size > 1), 0)

    def move(dim: int) -> int | None:
        if dim == op.dim:
            return op.dim + first if op.sizes else None
        return dim + (len(op.sizes) - 1 if dim > op.dim else 0)

    return move


def _merge(op: MergeDims, shape: tuple[int, ...]) -> _Move:
    """Of dims that are merged, only the outermost one of more than one index can be cut."""
    end = op.dim + op.count

    def move(dim: int) -> int | None:
        if op.dim <= dim < end:
            return op.dim if all(size == 1 for size in shape[op.dim : dim]) else None
        return dim if dim < op.dim else dim + 1 - op.count

    return move
