"""Operations that split one dim into several, and merge several into one; every reshape is made of these."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from attrs import frozen

from fdsd.algebra.dtypes import movable
from fdsd.algebra.lazy import Lazy, Pull, Structural
from fdsd.algebra.ops.moves import check_dim
from fdsd.algebra.spans import fold_dims, unflatten
from fdsd.data.errors import SpecMismatch
from fdsd.data.place import Place
from fdsd.data.region import Region, Span
from fdsd.data.spec import TensorSpec

__all__ = ["MergeDims", "SplitDim"]


@frozen
class SplitDim(Structural):
    """Split dim ``dim`` into dims of ``sizes``, in row-major order; without sizes, drop a dim of size 1."""

    dim: int
    sizes: tuple[int, ...]
    is_view = True

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        check_dim("split_dim", self.dim, x)
        size = x.shape[self.dim]
        if math.prod(self.sizes) != size:
            raise SpecMismatch(f"split_dim: dim {self.dim} of shape {x.shape} has size {size}, not {self.sizes}.")
        return x.with_shape((*x.shape[: self.dim], *self.sizes, *x.shape[self.dim + 1 :]))

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        return unflatten(inputs[0], self.dim, self.sizes)

    def view(self, place: Place, spec: TensorSpec) -> Place | None:
        steps, step = place.steps(spec.shape), 1
        inner: list[int] = []
        for size in reversed(self.sizes):
            inner.insert(0, step * steps[self.dim])
            step *= size
        shape = (*spec.shape[: self.dim], *self.sizes, *spec.shape[self.dim + 1 :])
        return place.moved(shape, [*steps[: self.dim], *inner, *steps[self.dim + 1 :]])

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        start, stride = 0, 1
        pairs: tuple[tuple[int, int], ...] = ()
        for k in reversed(range(len(self.sizes))):
            span = region.spans[self.dim + k]
            start += span.start * stride
            pairs = (*[(length, step * stride) for length, step in span.pairs], *pairs)
            stride *= self.sizes[k]
        before, after = region.spans[: self.dim], region.spans[self.dim + len(self.sizes) :]
        yield inputs[0], Region((*before, Span(start, pairs), *after)), out


@frozen
class MergeDims(Structural):
    """Merge ``count`` dims from ``dim`` on into one, in row-major order; of no dims, make a dim of size 1."""

    dim: int
    count: int
    is_view = True

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        end = self.dim + self.count
        if not 0 <= self.dim <= end <= x.ndim:
            raise SpecMismatch(f"merge_dims: shape {x.shape} has no {self.count} dims from dim {self.dim} on.")
        return x.with_shape((*x.shape[: self.dim], math.prod(x.shape[self.dim : end]), *x.shape[end:]))

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        (x,) = inputs
        end = self.dim + self.count
        carrier = movable(x)
        merged = carrier.reshape((*x.shape[: self.dim], math.prod(x.shape[self.dim : end]), *x.shape[end:]))
        return merged if carrier is x else merged.view(x.dtype)

    def view(self, place: Place, spec: TensorSpec) -> Place | None:
        steps, end = place.steps(spec.shape), self.dim + self.count
        merged = spec.shape[self.dim : end]
        shape = (*spec.shape[: self.dim], math.prod(merged), *spec.shape[end:])
        inner = [(size, step) for size, step in zip(merged, steps[self.dim : end], strict=True) if size != 1]
        fits = all(step == inner[i + 1][0] * inner[i + 1][1] for i, (_, step) in enumerate(inner[:-1]))
        if not fits and spec.numel:
            return None  # reshape copies what it cannot view
        return place.moved(shape, [*steps[: self.dim], inner[-1][1] if inner else 1, *steps[end:]])

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        before, after = region.spans[: self.dim], region.spans[self.dim + 1 :]
        if not self.count:  # the only index of the new dim is 0, however often it is asked for
            for view in _each(out, region.dim_of(self.dim), len(region.spans[self.dim].pairs)):
                yield inputs[0], Region((*before, *after)), view
            return
        sizes = inputs[0].shape[self.dim : self.dim + self.count]
        for spans, view in fold_dims(region.spans[self.dim], sizes, out, region.dim_of(self.dim)):
            yield inputs[0], Region((*before, *spans, *after)), view


def _each(out: torch.Tensor, dim: int, count: int) -> Iterator[torch.Tensor]:
    """Select each index of ``count`` dims from ``dim`` on."""
    if not count:
        yield out
        return
    for i in range(out.shape[dim]):
        yield from _each(out.select(dim, i), dim, count - 1)
