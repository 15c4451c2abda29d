"""`Flattening`: how FSDP1 flattens a tensor to one dim, and back: the same on tensors, expressions and specs.

Who holds which interval of the flattened tensor is unknown here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from attrs import frozen

from fdsd.algebra.apply import apply
from fdsd.algebra.ops import Concat, MergeDims, Permute, Slice, SplitDim

__all__ = ["Flattening"]

Shape = tuple[int, ...]


@frozen(cache_hash=True)
class Flattening:
    """How a tensor is flattened to one dim: part by part along one of its dims, each in an order of its dims.

    FSDP1 flattens what each rank of tensor parallelism holds; one part after the other, they are the whole.

    Args:
        order: The dims in the order in which elements lie, outermost first; empty for their own.
        dim: The dim along which parts are cut.
        sizes: The size of each part along it; empty for one part, the whole.

    Law: ``f.unflatten(f.flatten(x), x.shape) == x``.

    >>> import torch
    >>> columns = Flattening(dim=1, sizes=(1, 1))
    >>> columns.flatten(torch.tensor([[1, 2], [3, 4]]))
    tensor([1, 3, 2, 4])
    >>> columns.unflatten(torch.tensor([1, 3, 2, 4]), (2, 2))
    tensor([[1, 2],
            [3, 4]])
    """

    order: tuple[int, ...] = ()
    dim: int = 0
    sizes: tuple[int, ...] = ()

    def flatten(self, node: Any) -> Any:
        """Flatten a tensor, a lazy one, or a spec."""
        if not self.sizes:
            return self._flat(node)
        parts = [self._flat(apply(Slice(self.dim, start, size), node)) for start, size in self._cuts()]
        return parts[0] if len(parts) == 1 else apply(Concat(0), *parts)

    def unflatten(self, node: Any, shape: Shape) -> Any:
        """Give a flattened tensor its shape again; inverts ``flatten``.

        Args:
            node: A tensor, a lazy one, or a spec.
            shape: The shape of the whole tensor.
        """
        if not self.sizes:
            return self._shaped(node, shape)
        rest = math.prod(shape[: self.dim]) * math.prod(shape[self.dim + 1 :])
        parts = [
            self._shaped(
                apply(Slice(0, start * rest, size * rest), node), (*shape[: self.dim], size, *shape[self.dim + 1 :])
            )
            for start, size in self._cuts()
        ]
        return parts[0] if len(parts) == 1 else apply(Concat(self.dim), *parts)

    def _cuts(self) -> Iterator[tuple[int, int]]:
        """Give the start and size of each part that is not empty; of one at least."""
        cuts = list(zip(accumulate((0, *self.sizes[:-1])), self.sizes, strict=True))
        yield from [cut for cut in cuts if cut[1]] or cuts[:1]

    def _flat(self, node: Any) -> Any:
        ndim: int = node.ndim
        return apply(MergeDims(0, ndim), apply(Permute(self.order), node) if self.order else node)

    def _shaped(self, node: Any, shape: Shape) -> Any:
        if not self.order:
            return apply(SplitDim(0, shape), node)
        stored = apply(SplitDim(0, tuple([shape[dim] for dim in self.order])), node)
        return apply(Permute(tuple([self.order.index(dim) for dim in range(len(shape))])), stored)

    def __str__(self) -> str:
        order = f" as {self.order}" if self.order else ""
        return f"flattened{order}" + (f" by {self.sizes} of dim {self.dim}" if self.sizes else "")
