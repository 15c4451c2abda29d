"""``Lazy``: a tensor as an expression over source tensors; and the two kinds of operations that make it up.

An operation is a small frozen value. It knows its shape rule and where its elements come from, and nothing of
files, ranks, budgets or the dtypes of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from fdsd.data.errors import LazyError, Unsupported
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec, VirtualTensor

__all__ = ["Computing", "Lazy", "Op", "Pull", "Structural"]

Pull = tuple["Lazy", Region, torch.Tensor]


class Op:
    """An operation: a frozen, hashable value."""

    __slots__ = ()

    def infer(self, *inputs: TensorSpec) -> TensorSpec | tuple[TensorSpec, ...]:
        """Give the spec of the result (a tuple for several), or raise with a reason that names shapes."""
        raise NotImplementedError

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run on tensors that are wholly here; the result may be a view of an input."""
        raise NotImplementedError


class Structural(Op):
    """An operation that moves elements and never looks at values."""

    __slots__ = ()

    rounds: ClassVar[bool] = False
    """Whether elements take this operation's own dtype on the way (a cast)."""

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        """Say where the elements of ``region`` come from.

        Yields:
            An input, its region, and the view of ``out`` that the region fills.
        """
        raise NotImplementedError

    def gathers(self, region: Region) -> bool:
        """Whether ``region`` had better be gathered from a covering scratch than pulled piece by piece."""
        return False

    def cover(self, region: Region) -> Sequence[Region]:
        """Say which region of each input holds all that ``region`` needs, for ``gather``."""
        raise NotImplementedError

    def gather(self, parts: Sequence[torch.Tensor], region: Region, out: torch.Tensor) -> None:
        """Move elements from the covering parts into ``out``."""
        raise NotImplementedError


class Computing(Op):
    """An operation that makes new values."""

    __slots__ = ()

    @property
    def whole(self) -> bool:
        """Whether it needs its whole input for any part of its result."""
        return False

    def needs(self, inputs: Sequence[TensorSpec], region: Region) -> Sequence[Region]:
        """Say which region of each input ``region`` of the result depends on (if not ``whole``)."""
        raise NotImplementedError

    def overhead(self, dtype: torch.dtype) -> int:
        """Say how many bytes an element takes beside its parts and its result while it is computed."""
        return 0

    def compute(self, parts: Sequence[torch.Tensor], region: Region, out: torch.Tensor) -> None:
        """Compute ``region`` from the parts (contiguous, shaped as their regions) into ``out`` (own dtype)."""
        raise NotImplementedError


class Lazy(VirtualTensor):
    """A tensor as an expression: an operation on inputs. It has a spec; its data is read by ``materialize``.

    Lazy tensors compare by identity.

    >>> from fdsd.algebra.apply import defer_leaf
    >>> x = defer_leaf(torch.ones(2, 3))
    >>> x.shape, x.dtype
    ((2, 3), torch.float32)
    >>> bool(x)
    Traceback (most recent call last):
        ...
    fdsd.data.errors.LazyError: This tensor is lazy (float32[2, 3]): it has no truth value until its data is read. \
Use fdsd.materialize(state).
    """

    __slots__ = ("__weakref__", "inputs", "op", "outputs")

    op: Op
    inputs: tuple[Lazy, ...]
    outputs: tuple[TensorSpec, ...]

    def __init__(self, op: Op, inputs: Sequence[Lazy] = (), outputs: Sequence[TensorSpec] | None = None) -> None:
        self.op = op
        self.inputs = tuple(inputs)
        if outputs is None:
            made = op.infer(*[x.spec for x in self.inputs])
            outputs = made if isinstance(made, tuple) else (made,)
        self.outputs = tuple(outputs)

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype of the result."""
        if len(self.outputs) != 1:
            raise Unsupported(f"{self.op} gives {len(self.outputs)} tensors; take one of them with Item(i).")
        return self.outputs[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims."""
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.spec.ndim

    def numel(self) -> int:
        """The number of elements."""
        return self.spec.numel

    def __repr__(self) -> str:
        return f"Lazy({type(self.op).__name__}, {', '.join(map(str, self.outputs))})"

    def _refuse(self, what: str) -> NoReturn:
        outputs = ", ".join(map(str, object.__getattribute__(self, "outputs")))
        raise LazyError(
            f"This tensor is lazy ({outputs}): it has no {what} until its data is read. Use fdsd.materialize(state)."
        )

    def _no_arithmetic(self, *_others: object) -> NoReturn:
        self._refuse("values to compute with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_arithmetic
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _no_arithmetic
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __neg__ = __pos__ = __abs__ = __invert__ = (
        _no_arithmetic
    )
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = __complex__ = _no_arithmetic

    def __contains__(self, item: object) -> bool:
        self._refuse("elements to look for")

    def __bool__(self) -> bool:
        self._refuse("truth value")

    def __len__(self) -> int:
        self._refuse("length")

    def __iter__(self) -> Iterator[Any]:
        self._refuse("elements to iterate over")

    def __getitem__(self, index: object) -> Any:
        self._refuse("elements to index")

    def __getattr__(self, name: str) -> Any:
        # protocols probe for special methods, and copying looks at objects that are not filled yet
        if name.startswith("__") or name in Lazy.__slots__:
            raise AttributeError(name)
        self._refuse(f"attribute {name!r}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise LazyError(
            f"torch.{name} cannot run on a lazy tensor. Use map_tensors() in a pipeline, or fdsd.materialize(state)."
        )
