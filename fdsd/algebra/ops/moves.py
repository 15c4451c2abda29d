"""Operations on one tensor that move elements without folding dims: slices, permutations, casts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import frozen

from fdsd.algebra.dtypes import check_cast, movable
from fdsd.algebra.lazy import Lazy, Pull, Structural
from fdsd.data.errors import SpecMismatch
from fdsd.data.place import Place
from fdsd.data.region import Region, Span
from fdsd.data.spec import TensorSpec, dtype_name

__all__ = ["Cast", "Distinct", "Permute", "Select", "Slice", "check_dim"]


def check_dim(what: str, dim: int, spec: TensorSpec) -> None:
    """Raise unless ``dim`` (not negative) is a dim of ``spec``."""
    if not 0 <= dim < spec.ndim:
        raise SpecMismatch(f"{what}: there is no dim {dim} in shape {spec.shape}, which has {spec.ndim} dims.")


@frozen
class Cast(Structural):
    """Round every element to ``dtype``, exactly here."""

    dtype: torch.dtype
    rounds = True
    pointwise = True
    is_view = True

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        check_cast(inputs[0].dtype, self.dtype)
        return inputs[0].with_dtype(self.dtype)

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0].to(self.dtype)

    def view(self, place: Place, spec: TensorSpec) -> Place | None:
        return place if spec.dtype == self.dtype else None

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        yield inputs[0], region, out

    def __repr__(self) -> str:
        return f"Cast({dtype_name(self.dtype)})"


@frozen
class Distinct(Structural):
    """The same elements as a tensor of its own, no longer tied to others; ``token`` tells such copies apart."""

    token: str
    pointwise = True

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        return inputs[0]

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        carrier = movable(inputs[0]).clone()
        return carrier if carrier.dtype == inputs[0].dtype else carrier.view(inputs[0].dtype)

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        yield inputs[0], region, out


@frozen
class Slice(Structural):
    """Take ``length`` indices of one dim: ``start``, ``start + step``, ..."""

    dim: int
    start: int
    length: int
    step: int = 1
    is_view = True

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        check_dim("slice", self.dim, x)
        size = x.shape[self.dim]
        last = self.start + max(self.length - 1, 0) * self.step
        if self.length < 0 or self.start < 0 or self.step < 1 or (last >= size if self.length else self.start > size):
            raise SpecMismatch(
                f"slice: {self.length} indices from {self.start} by {self.step} do not lie in dim {self.dim} of shape "
                f"{x.shape}."
            )
        return x.with_shape((*x.shape[: self.dim], self.length, *x.shape[self.dim + 1 :]))

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        (x,) = inputs
        span = (self.length - 1) * self.step + 1 if self.length else 0
        view = x.narrow(self.dim, self.start, span)
        return view if self.step == 1 else view[(slice(None),) * self.dim + (slice(None, None, self.step),)]

    def view(self, place: Place, spec: TensorSpec) -> Place | None:
        steps, shape = place.steps(spec.shape), list(spec.shape)
        offset = self.start * steps[self.dim]
        steps[self.dim] *= self.step
        shape[self.dim] = self.length
        return place.moved(shape, steps, offset)

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        span = region.spans[self.dim]
        moved = Span(
            self.start + span.start * self.step,
            tuple([(length, step * self.step) for length, step in span.pairs]),
        )
        yield inputs[0], region.replace(self.dim, moved), out


@frozen
class Select(Structural):
    """Take one index of one dim, which goes away."""

    dim: int
    index: int
    is_view = True

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        check_dim("select", self.dim, x)
        if not 0 <= self.index < x.shape[self.dim]:
            raise SpecMismatch(f"select: there is no index {self.index} in dim {self.dim} of shape {x.shape}.")
        return x.with_shape((*x.shape[: self.dim], *x.shape[self.dim + 1 :]))

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0].select(self.dim, self.index)

    def view(self, place: Place, spec: TensorSpec) -> Place | None:
        steps, shape = place.steps(spec.shape), list(spec.shape)
        del shape[self.dim]
        return place.moved(shape, steps, self.index * steps.pop(self.dim))

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        spans = region.spans
        yield inputs[0], Region((*spans[: self.dim], Span(self.index), *spans[self.dim :])), out


@frozen
class Permute(Structural):
    """Reorder dims: dim ``i`` of the result is dim ``dims[i]`` of the input."""

    dims: tuple[int, ...]
    is_view = True

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        if sorted(self.dims) != list(range(x.ndim)):
            raise SpecMismatch(f"permute{self.dims}: the input has {x.ndim} dims, shape {x.shape}; name each once.")
        return x.with_shape(tuple(x.shape[d] for d in self.dims))

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0].permute(self.dims)

    def view(self, place: Place, spec: TensorSpec) -> Place | None:
        steps = place.steps(spec.shape)
        return place.moved([spec.shape[d] for d in self.dims], [steps[d] for d in self.dims])

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        back = sorted(range(len(self.dims)), key=self.dims.__getitem__)
        order: list[int] = []
        for i in back:
            first = region.dim_of(i)
            order.extend(range(first, first + len(region.spans[i].pairs)))
        yield inputs[0], Region(tuple(region.spans[i] for i in back)), out.permute(order)
