"""Verbs that take, add or cut indices of one dim: ``index_select``, ``pad``, ``crop``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen

from fdsd.algebra.apply import Applier
from fdsd.algebra.ops import Concat, Slice
from fdsd.algebra.ops import IndexSelect as IndexSelectOp
from fdsd.data.errors import SpecMismatch
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.rewrite import Scope
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.each import Each
from fdsd.transforms.regroup import as_dim, as_int, as_ints, call, optional_int, require_spec
from fdsd.transforms.which import Which, choice

__all__ = ["crop", "index_select", "pad"]


@frozen(cache_hash=True)
class IndexSelect(Each):
    """See ``index_select``."""

    index: tuple[int, ...] = ()
    dim: int = 0
    from_size: int | None = None
    verb: ClassVar[str] = "index_select"

    @property
    def _is_permutation(self) -> bool:
        """Whether nothing is left out or repeated, as far as it is known."""
        count = len(self.index)
        return self.from_size in (None, count) and sorted(self.index) == list(range(count))

    @property
    def own_grade(self) -> Grade:
        return Grade.EXACT if self._is_permutation else Grade.NONE

    def make(self, apply: Applier, leaf: Any, spec: TensorSpec) -> Any:
        dim = as_dim(self.dim, spec)
        if self.from_size is not None and spec.shape[dim] != self.from_size:
            raise SpecMismatch(wrong_size(dim, spec, self.from_size))
        return apply(IndexSelectOp(dim, self.index), leaf)

    def inverse(self) -> Step:
        if not self._is_permutation:
            self.refuse_inverse("indices that are left out or repeated cannot be put back; it is no permutation.")
        back = sorted(range(len(self.index)), key=self.index.__getitem__)
        return IndexSelect(self.which, tuple(back), self.dim, self.from_size)

    def fix(self, scope: Scope, names: Sequence[str]) -> tuple[Step, ...]:
        sizes: list[tuple[str, int]] = []
        for name in names if self.from_size is None and self._is_permutation else ():
            spec = require_spec(scope.spec(name))
            sizes.append((name, spec.shape[as_dim(self.dim, spec)]))
        if all(size == len(self.index) for _, size in sizes):
            return (self,)
        return self.fix_each("from_size", sizes)  # of a longer dim, these indices leave some out

    def call_text(self) -> str:
        named = {"dim": self.dim} if self.dim else {}
        if self.from_size is not None:
            named["from_size"] = self.from_size
        return call(self.verb, [self.which.one_text(), repr(list(self.index))], **named)


def wrong_size(dim: int, spec: TensorSpec, wanted: int) -> str:
    """Say that a dim has not the size that was given for it."""
    return f"dim {dim} of shape {spec.shape} has size {spec.shape[dim]}, not from_size={wanted}."


@frozen
class _Sized(Each):
    """What ``pad`` and ``crop`` have: the size of a dim after, and before."""

    to: int = 0
    dim: int = 0
    from_size: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.to < 0 or (self.from_size is not None and self.from_size < 0):
            before = "" if self.from_size is None else f" from {self.from_size}"
            raise SpecMismatch(f"{self.verb}: sizes are 0 or more, not {self.to}{before}.")

    def _measure(self, spec: TensorSpec) -> tuple[int, int]:
        dim = as_dim(self.dim, spec)
        size = spec.shape[dim]
        if self.from_size is not None and size != self.from_size:
            raise SpecMismatch(wrong_size(dim, spec, self.from_size))
        return dim, size

    def fix(self, scope: Scope, names: Sequence[str]) -> tuple[Step, ...]:
        if self.from_size is not None:
            return (self,)
        sizes = [(name, self._measure(require_spec(scope.spec(name)))[1]) for name in names]
        return self.fix_each("from_size", sizes)

    def call_text(self) -> str:
        named = {"dim": self.dim} if self.dim else {}
        if self.from_size is not None:
            named["from_size"] = self.from_size
        return call(self.verb, [self.which.one_text(), str(self.to)], **named)


@frozen
class Pad(_Sized):
    """See ``pad``."""

    verb: ClassVar[str] = "pad"

    @property
    def own_grade(self) -> Grade:
        return Grade.NONE if self.from_size is None else Grade.EXACT

    def make(self, apply: Applier, leaf: Any, spec: TensorSpec) -> Any:
        dim, size = self._measure(spec)
        if size > self.to:
            raise SpecMismatch(f"dim {dim} of shape {spec.shape} has size {size}, more than {self.to}. Use crop().")
        rows = spec.with_shape((*spec.shape[:dim], self.to - size, *spec.shape[dim + 1 :]))
        return apply(Concat(dim), leaf, apply.constant(rows, 0, like=leaf))

    def inverse(self) -> Step:
        if self.from_size is None:
            self.refuse_inverse("how large the dim was is not known. Give from_size=, or use .bind(source) first.")
        return Crop(self.which, self.from_size, self.dim, self.to)


@frozen
class Crop(_Sized):
    """See ``crop``."""

    verb: ClassVar[str] = "crop"

    @property
    def own_grade(self) -> Grade:
        return Grade.NONE if self.from_size is None else Grade.ONE_SIDED

    def make(self, apply: Applier, leaf: Any, spec: TensorSpec) -> Any:
        dim, size = self._measure(spec)
        if size < self.to:
            raise SpecMismatch(f"dim {dim} of shape {spec.shape} has size {size}, less than {self.to}. Use pad().")
        return apply(Slice(dim, 0, self.to), leaf)

    def inverse(self) -> Step:
        if self.from_size is None:
            self.refuse_inverse("how large the dim was is not known. Give from_size=, or use .bind(source) first.")
        return Pad(self.which, self.from_size, self.dim, self.to)


def index_select(
    which: Which, index: Sequence[int] | torch.Tensor, *, dim: int = 0, from_size: int | None = None
) -> Pipeline:
    """Take indices of a dim of each tensor, in any order.

    Args:
        which: The names; see ``select``.
        index: The indices, 0 or more: index ``i`` of the result is index ``index[i]`` of the source. A tensor has one
            dim and whole numbers; a mask is none.
        dim: The dim; negative ones count from the end.
        from_size: The size before, checked; ``.bind(source)`` writes it where ``index`` leaves some out.

    Raises:
        BadPattern: Names are no names.
        UnknownName: When run: a pattern matches nothing.
        SpecMismatch: Indices are no whole numbers; when run: a tensor has no such dim or index, or not ``from_size``.

    Law: exact if ``index`` is a permutation of the dim, otherwise not invertible.

    >>> index_select("w", [2, 0], dim=0)({"w": torch.tensor([5, 6, 7])})["w"]
    tensor([7, 5])
    """
    values: Any = index
    if isinstance(index, torch.Tensor):
        if index.ndim != 1 or index.dtype is torch.bool or index.is_floating_point() or index.is_complex():
            raise SpecMismatch(
                f"index_select: index is a tensor of whole numbers in one dim, not {spec_of(index)}. Of a mask, give "
                "mask.nonzero().flatten()."
            )
        values = list(index)
    indices = as_ints("index_select", "index", values)
    size = optional_int("index_select", "from_size", from_size)
    return Pipeline((IndexSelect(choice("index_select", which), indices, as_int("index_select", "dim", dim), size),))


def pad(which: Which, to: int, *, dim: int = 0, from_size: int | None = None) -> Pipeline:
    """Add zeros at the end of a dim of each tensor, as for a vocabulary padded to a round size.

    Args:
        which: The names; see ``select``.
        to: The size of the dim in the result.
        dim: The dim; negative ones count from the end.
        from_size: The size before, checked, and needed for the inverse.

    Raises:
        BadPattern: Names are no names.
        UnknownName: When run: a pattern matches nothing.
        SpecMismatch: A size is none; when run: a tensor has no such dim, is larger, or not of ``from_size``.

    Law: exact with ``from_size``, or after ``.bind(source)``; ``~`` is the ``crop``.

    >>> pad("w", 3)({"w": torch.tensor([5, 6])})["w"]
    tensor([5, 6, 0])
    """
    size, before = as_int("pad", "to", to), optional_int("pad", "from_size", from_size)
    return Pipeline((Pad(choice("pad", which), size, as_int("pad", "dim", dim), before),))


def crop(which: Which, to: int, *, dim: int = 0, from_size: int | None = None) -> Pipeline:
    """Keep the first indices of a dim of each tensor; the inverse of ``pad``.

    Args:
        which: The names; see ``select``.
        to: The size of the dim in the result.
        dim: The dim; negative ones count from the end.
        from_size: The size before, checked, and needed for the inverse.

    Raises:
        BadPattern: Names are no names.
        UnknownName: When run: a pattern matches nothing.
        SpecMismatch: A size is none; when run: a tensor has no such dim, is smaller, or not of ``from_size``.

    Law: one-sided with ``from_size``, or after ``.bind(source)``: ``~`` pads with zeros.

    >>> crop("w", 2)({"w": torch.tensor([5, 6, 0])})["w"]
    tensor([5, 6])
    """
    size, before = as_int("crop", "to", to), optional_int("crop", "from_size", from_size)
    return Pipeline((Crop(choice("crop", which), size, as_int("crop", "dim", dim), before),))
