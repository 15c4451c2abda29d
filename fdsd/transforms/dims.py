"""Verbs that rearrange the dims of each tensor: ``transpose``, ``permute``, ``reshape``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from attrs import frozen

from fdsd.algebra.apply import Applier
from fdsd.algebra.ops import MergeDims, SplitDim
from fdsd.algebra.ops import Permute as PermuteOp
from fdsd.data.errors import SpecMismatch
from fdsd.data.spec import TensorSpec
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.rewrite import Scope
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.each import Each
from fdsd.transforms.regroup import as_dim, as_int, as_ints, call, optional_ints, require_spec
from fdsd.transforms.which import Which, choice

__all__ = ["permute", "reshape", "transpose"]


@frozen
class Transpose(Each):
    """See ``transpose``."""

    dim0: int = -2
    dim1: int = -1
    verb: ClassVar[str] = "transpose"

    @property
    def own_grade(self) -> Grade:
        return Grade.EXACT

    def make(self, apply: Applier, leaf: Any, spec: TensorSpec) -> Any:
        a, b = as_dim(self.dim0, spec), as_dim(self.dim1, spec)
        dims = list(range(spec.ndim))
        dims[a], dims[b] = b, a
        return apply(PermuteOp(tuple(dims)), leaf)

    def inverse(self) -> Step:
        return self

    def call_text(self) -> str:
        dims = [] if (self.dim0, self.dim1) == (-2, -1) else [str(self.dim0), str(self.dim1)]
        return call(self.verb, [self.which.one_text(), *dims])


@frozen
class Permute(Each):
    """See ``permute``."""

    dims: tuple[int, ...] = ()
    verb: ClassVar[str] = "permute"

    def __attrs_post_init__(self) -> None:
        ndim = len(self.dims)
        if sorted(d % ndim if -ndim <= d < ndim else -1 for d in self.dims) != list(range(ndim)):
            raise SpecMismatch(f"permute: {self.dims} is no order of {ndim} dims; name each dim once.")

    @property
    def _order(self) -> tuple[int, ...]:
        return tuple(d % len(self.dims) for d in self.dims)

    @property
    def own_grade(self) -> Grade:
        return Grade.EXACT

    def make(self, apply: Applier, leaf: Any, spec: TensorSpec) -> Any:
        return apply(PermuteOp(self._order), leaf)

    def inverse(self) -> Step:
        order = self._order
        back = tuple(sorted(range(len(order)), key=order.__getitem__))
        return Permute(self.which, back)

    def call_text(self) -> str:
        return call(self.verb, [self.which.one_text(), repr(self.dims)])


@frozen
class Reshape(Each):
    """See ``reshape``."""

    shape: tuple[int, ...] = ()
    from_shape: tuple[int, ...] | None = None
    verb: ClassVar[str] = "reshape"

    def __attrs_post_init__(self) -> None:
        if any(size < -1 for size in self.shape) or self.shape.count(-1) > 1:
            raise SpecMismatch(f"reshape: {self.shape} is no shape; sizes are 0 or more, and at most one is -1.")

    @property
    def own_grade(self) -> Grade:
        return Grade.NONE if self.from_shape is None else Grade.EXACT

    def make(self, apply: Applier, leaf: Any, spec: TensorSpec) -> Any:
        if self.from_shape is not None and spec.shape != self.from_shape:
            raise SpecMismatch(f"its shape is {spec.shape}, not from_shape={self.from_shape}.")
        for op in reshape_ops(spec.shape, self._target(spec)):
            leaf = apply(op, leaf)
        return leaf

    def _target(self, spec: TensorSpec) -> tuple[int, ...]:
        known = math.prod(size for size in self.shape if size != -1)
        if -1 in self.shape and known and spec.numel % known == 0:
            return tuple([spec.numel // known if size == -1 else size for size in self.shape])
        if -1 in self.shape or known != spec.numel:
            raise SpecMismatch(f"shape {spec.shape} has {spec.numel} elements, which do not fit shape {self.shape}.")
        return self.shape

    def inverse(self) -> Step:
        if self.from_shape is None:
            self.refuse_inverse("what shape it was is not known. Give from_shape=, or use .bind(source) first.")
        if -1 in self.shape:
            known = math.prod(size for size in self.shape if size != -1)
            full = math.prod(self.from_shape) // max(known, 1)
            return Reshape(self.which, self.from_shape, tuple(full if s == -1 else s for s in self.shape))
        return Reshape(self.which, self.from_shape, self.shape)

    def fix(self, scope: Scope, names: Sequence[str]) -> tuple[Step, ...]:
        if self.from_shape is not None:
            return (self,)
        shapes = [(name, require_spec(scope.spec(name)).shape) for name in names]
        return self.fix_each("from_shape", shapes)

    def call_text(self) -> str:
        named = {} if self.from_shape is None else {"from_shape": self.from_shape}
        return call(self.verb, [self.which.one_text(), repr(self.shape)], **named)


def reshape_ops(source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[MergeDims | SplitDim]:
    """Give the operations that turn one shape into another with as many elements, in row-major order.

    Dims that stay by themselves are left alone.

    >>> list(reshape_ops((4, 6), (4, 2, 3)))
    [SplitDim(dim=1, sizes=(2, 3))]
    """
    if not math.prod(source):  # no elements: any way will do
        yield MergeDims(0, len(source))
        yield SplitDim(0, target)
        return
    i = j = dim = 0
    while i < len(source) or j < len(target):
        start_i, start_j, a, b = i, j, 1, 1
        if i < len(source):
            a, i = source[i], i + 1
        if j < len(target):
            b, j = target[j], j + 1
        while a != b:
            if a < b:
                a, i = a * source[i], i + 1
            else:
                b, j = b * target[j], j + 1
        sizes = target[start_j:j]
        if i - start_i != 1:
            yield MergeDims(dim, i - start_i)
        if len(sizes) != 1:
            yield SplitDim(dim, sizes)
        dim += len(sizes)


def transpose(which: Which, dim0: int = -2, dim1: int = -1) -> Pipeline:
    """Swap two dims of each tensor.

    Args:
        which: The names; see ``select``.
        dim0: One dim; negative ones count from the end.
        dim1: The other.

    Raises:
        BadPattern: Names are no names.
        UnknownName: When run: a pattern matches nothing.
        SpecMismatch: A dim is no whole number; when run: a tensor has no such dim.

    Law: exact; it is its own inverse.

    >>> import torch
    >>> transpose("w")({"w": torch.zeros(2, 3)})["w"].shape
    torch.Size([3, 2])
    """
    first, second = as_int("transpose", "dim0", dim0), as_int("transpose", "dim1", dim1)
    return Pipeline((Transpose(choice("transpose", which), first, second),))


def permute(which: Which, dims: Sequence[int]) -> Pipeline:
    """Reorder the dims of each tensor: dim ``i`` of the result is dim ``dims[i]`` of the source.

    Args:
        which: The names; see ``select``.
        dims: Each dim once; negative ones count from the end.

    Raises:
        BadPattern: Names are no names.
        UnknownName: When run: a pattern matches nothing.
        SpecMismatch: ``dims`` is no order of dims; when run: a tensor has more or fewer.

    Law: exact; ``~`` is the order back.

    >>> import torch
    >>> permute("w", (2, 0, 1))({"w": torch.zeros(2, 3, 4)})["w"].shape
    torch.Size([4, 2, 3])
    """
    return Pipeline((Permute(choice("permute", which), as_ints("permute", "dims", dims)),))


def reshape(which: Which, shape: Sequence[int], *, from_shape: Sequence[int] | None = None) -> Pipeline:
    """Give each tensor another shape, elements in row-major order.

    Args:
        which: The names; see ``select``.
        shape: The new shape; one size may be -1, to be worked out.
        from_shape: The shape before, checked, and needed for the inverse.

    Raises:
        BadPattern: Names are no names.
        UnknownName: When run: a pattern matches nothing.
        SpecMismatch: ``shape`` is none; when run: the elements do not fit it, or a tensor is not of ``from_shape``.

    Law: exact with ``from_shape``, or after ``.bind(source)``.

    >>> import torch
    >>> reshape("w", (3, -1))({"w": torch.arange(6)})["w"]
    tensor([[0, 1],
            [2, 3],
            [4, 5]])
    """
    new, old = as_ints("reshape", "shape", shape), optional_ints("reshape", "from_shape", from_shape)
    return Pipeline((Reshape(choice("reshape", which), new, old),))
