"""``Lazy``: a tensor as an expression over source tensors; and the two kinds of operations that make it up.

An operation is a small frozen value. It knows its shape rule and where its elements come from, and nothing of
files, ranks, budgets or the dtypes of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from fdsd.algebra.virtual import Standin
from fdsd.data.errors import Unsupported
from fdsd.data.place import Place
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec

__all__ = ["Computing", "Lazy", "Op", "Pull", "Structural"]

Pull = tuple["Lazy", Region, torch.Tensor]


class Op:
    """An operation: a frozen, hashable value."""

    __slots__ = ()

    pointwise: ClassVar[bool] = False
    """Whether each element of the one result depends on the elements at its own place only, whatever the shape."""

    def infer(self, *inputs: TensorSpec) -> TensorSpec | tuple[TensorSpec, ...]:
        """Give the spec of the result (a tuple for several), or raise with a reason that names shapes."""
        raise NotImplementedError

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run on tensors that are wholly here; the result may be a view of an input."""
        raise NotImplementedError

    is_view: ClassVar[bool] = False
    """Whether ``eager`` may give a view of its first input, so that ``view`` has to be asked."""

    def view(self, place: Place, spec: TensorSpec) -> Place | None:
        """Say where the view of a first input of this place and spec lies; ``None`` if ``eager`` would copy it."""
        return None

    def root(self) -> Place | None:
        """Say where the result lies if it is not made by this operation but there before."""
        return None


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


class Lazy(Standin):
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

    __slots__ = ("__weakref__", "_place", "inputs", "op", "outputs")

    _kind = "lazy"
    _until = "until its data is read"
    _remedy = "Use fdsd.materialize(state)"

    op: Op
    inputs: tuple[Lazy, ...]
    outputs: tuple[TensorSpec, ...]
    _place: Place | None

    def __init__(self, op: Op, inputs: Sequence[Lazy] = (), outputs: Sequence[TensorSpec] | None = None) -> None:
        self.op = op
        self.inputs = tuple(inputs)
        if outputs is None:
            made = op.infer(*[x.spec for x in self.inputs])
            outputs = made if isinstance(made, tuple) else (made,)
        self.outputs = tuple(outputs)
        self._place = None

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype of the result."""
        if len(self.outputs) != 1:
            raise Unsupported(f"{self.op} gives {len(self.outputs)} tensors; take one of them with Item(i).")
        return self.outputs[0]

    @property
    def place(self) -> Place:
        """Where ``eager`` would put the tensor, were its sources row-major memory."""
        node: Lazy = self
        views: list[Lazy] = []
        while node._place is None and node.op.is_view:
            views.append(node)
            node = node.inputs[0]
        place = node._place
        if place is None:
            place = node._place = node.op.root() or Place(("object", id(node)))
        for view in reversed(views):
            place = view._place = view.op.view(place, view.inputs[0].spec) or Place(("object", id(view)))
        return place

    def __repr__(self) -> str:
        return f"Lazy({type(self.op).__name__}, {', '.join(map(str, self.outputs))})"

    def _told(self) -> str:
        return f"lazy ({', '.join(map(str, object.__getattribute__(self, 'outputs')))})"
