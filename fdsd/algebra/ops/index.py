"""Taking any indices of a dim, in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import field, frozen

from fdsd.algebra.dtypes import copy_elements, movable
from fdsd.algebra.lazy import Lazy, Pull, Structural
from fdsd.algebra.ops.moves import check_dim
from fdsd.algebra.spans import unflatten
from fdsd.data.errors import SpecMismatch, listing
from fdsd.data.region import Region, Span
from fdsd.data.spec import TensorSpec

__all__ = ["MAX_RUNS", "IndexSelect"]

MAX_RUNS = 64
"""With more runs than this, a region is gathered from a covering scratch instead of read run by run."""


@frozen(cache_hash=True)
class IndexSelect(Structural):
    """Index ``i`` of dim ``dim`` of the result is index ``index[i]`` of the input's."""

    dim: int
    index: tuple[int, ...] = field(repr=lambda index: f"<{len(index)} indices>")

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        check_dim("index_select", self.dim, x)
        size = x.shape[self.dim]
        if self.index and not (min(self.index) >= 0 and max(self.index) < size):
            odd = sorted({i for i in self.index if not 0 <= i < size})
            raise SpecMismatch(f"index_select: dim {self.dim} of shape {x.shape} has no index {listing(odd)}.")
        return x.with_shape((*x.shape[: self.dim], len(self.index), *x.shape[self.dim + 1 :]))

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        (x,) = inputs
        carrier = movable(x)
        index = torch.tensor(self.index, dtype=torch.int64, device=x.device)
        made = torch.index_select(carrier, self.dim, index)
        return made if carrier is x else made.view(x.dtype)

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        for span, view in self._runs(region.spans[self.dim], out, region.dim_of(self.dim)):
            yield inputs[0], region.replace(self.dim, span), view

    def gathers(self, region: Region) -> bool:
        values = [self.index[i] for i in region.spans[self.dim].indices()]
        i = runs = 0
        while i < len(values) and runs <= MAX_RUNS:
            i += _run(values, i)[0]
            runs += 1
        return runs > MAX_RUNS

    def _runs(self, span: Span, out: torch.Tensor, at: int) -> Iterator[tuple[Span, torch.Tensor]]:
        """Find the runs of evenly ascending indices, each with its memory."""
        if not span.pairs:
            yield Span(self.index[span.start]), out
            return
        (length, step), *inner = span.pairs
        if inner:
            for i in range(length):
                yield from self._runs(Span(span.start + i * step, tuple(inner)), out.select(at, i), at)
            return
        values = [self.index[span.start + i * step] for i in range(length)]
        i = 0
        while i < length:
            count, stride = _run(values, i)
            yield Span(values[i], ((count, stride),)), out.narrow(at, i, count)
            i += count

    def cover(self, region: Region) -> Sequence[Region]:
        values = [self.index[i] for i in region.spans[self.dim].indices()]
        low, high = min(values), max(values)
        return [region.replace(self.dim, Span(low, ((high - low + 1, 1),)))]

    def gather(self, parts: Sequence[torch.Tensor], region: Region, out: torch.Tensor) -> None:
        span, at = region.spans[self.dim], region.dim_of(self.dim)
        values = torch.tensor([self.index[i] for i in span.indices()], device=parts[0].device)
        chosen = torch.index_select(movable(parts[0]), at, values - values.min())
        chosen = unflatten(chosen, at, [length for length, _ in span.pairs])
        copy_elements(chosen.view(parts[0].dtype) if chosen.dtype != parts[0].dtype else chosen, out)


def _run(values: Sequence[int], i: int) -> tuple[int, int]:
    """Give the length and the step of the longest evenly ascending run from position ``i`` on."""
    if i + 1 >= len(values) or (step := values[i + 1] - values[i]) < 1:
        return 1, 1
    j = i + 1
    while j + 1 < len(values) and values[j + 1] - values[j] == step:
        j += 1
    return j - i + 1, step
