"""Operations that join several tensors: along a dim, or along a new one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from attrs import frozen

from fdsd.algebra.dtypes import movable
from fdsd.algebra.lazy import Lazy, Pull, Structural
from fdsd.algebra.ops.moves import check_dim
from fdsd.algebra.spans import cut
from fdsd.data.errors import SpecMismatch, listing
from fdsd.data.region import Region, Span
from fdsd.data.spec import TensorSpec, dtype_name

__all__ = ["Concat", "Stack"]


def _one_dtype(what: str, inputs: Sequence[TensorSpec]) -> torch.dtype:
    if not inputs:
        raise SpecMismatch(f"{what}: there is nothing to join; give at least one tensor.")
    dtypes = {x.dtype for x in inputs}
    if len(dtypes) > 1:
        raise SpecMismatch(
            f"{what}: the dtypes differ: {listing(dtype_name(d) for d in dtypes)}. Use cast() on the sources first."
        )
    return inputs[0].dtype


def _back(carrier: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return carrier if carrier.dtype == dtype else carrier.view(dtype)


@frozen
class Concat(Structural):
    """Join tensors along dim ``dim``, in order."""

    dim: int

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        dtype = _one_dtype("concat", inputs)
        for x in inputs:
            check_dim("concat", self.dim, x)
        rest = {(x.shape[: self.dim], x.shape[self.dim + 1 :]) for x in inputs}
        if len(rest) > 1:
            shapes = ", ".join(str(x.shape) for x in inputs[:10])
            raise SpecMismatch(f"concat: shapes may differ in dim {self.dim} only, these differ elsewhere: {shapes}.")
        ((before, after),) = rest
        return TensorSpec((*before, sum(x.shape[self.dim] for x in inputs), *after), dtype)

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        return _back(torch.cat([movable(x) for x in inputs], self.dim), inputs[0].dtype)

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        bounds = [0, *accumulate(x.shape[self.dim] for x in inputs)]
        for part, span, view in cut(region.spans[self.dim], bounds, out, region.dim_of(self.dim)):
            yield inputs[part], region.replace(self.dim, span.shift(-bounds[part])), view


@frozen
class Stack(Structural):
    """Join tensors of one shape along a new dim ``dim``."""

    dim: int

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        dtype = _one_dtype("stack", inputs)
        shapes = sorted({x.shape for x in inputs})
        if len(shapes) > 1:
            raise SpecMismatch(f"stack: the shapes differ: {listing(shapes)}. All must be equal.")
        if not 0 <= self.dim <= len(shapes[0]):
            raise SpecMismatch(f"stack: a new dim {self.dim} cannot stand in shape {shapes[0]}.")
        return TensorSpec((*shapes[0][: self.dim], len(inputs), *shapes[0][self.dim :]), dtype)

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        return _back(torch.stack([movable(x) for x in inputs], self.dim), inputs[0].dtype)

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        yield from self._pull(inputs, region.spans[self.dim], region.replace(self.dim), out, region.dim_of(self.dim))

    def _pull(self, inputs: Sequence[Lazy], span: Span, rest: Region, out: torch.Tensor, at: int) -> Iterator[Pull]:
        if not span.pairs:
            yield inputs[span.start], rest, out
            return
        (length, step), *inner = span.pairs
        for i in range(length):
            chosen = Span(span.start + i * step, tuple(inner))
            yield from self._pull(inputs, chosen, rest, out.select(at, i), at)
