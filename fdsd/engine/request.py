"""`Request`: one tensor that is wanted, as an expression, and where. A value; how it is delivered is unknown here."""

from __future__ import annotations

import torch
from attrs import define

from fdsd.algebra.dtypes import check_cast
from fdsd.algebra.lazy import Lazy
from fdsd.data.errors import SpecMismatch, Unsupported
from fdsd.layout.layout import Layout
from fdsd.layout.pieces import Pieces
from fdsd.layout.wants import local_shape_of

__all__ = ["Request"]


@define(eq=False)  # not frozen: there are thousands, and that takes four times as long
class Request:
    """A tensor that is wanted.

    Args:
        node: The expression; ``None`` if only other ranks of the group know it.
        target: Where it is wanted; ``None``: whole, on every rank of the group or on those that request it.
        everyone: With target ``None``: also on ranks of the group that do not know the name.
        out: This rank's memory, of the local shape of the target; any strides, dtype and device. Fresh if left out.
        dtype: The dtype of the result if there is no ``out``; that of the expression if left out.

    >>> from fdsd.algebra.apply import defer_leaf
    >>> Request(defer_leaf(torch.ones(2)), None, dtype=torch.bfloat16).result_dtype
    torch.bfloat16
    """

    node: Lazy | None
    target: Layout | Pieces | None = None
    everyone: bool = True
    out: torch.Tensor | None = None
    dtype: torch.dtype | None = None

    @property
    def result_dtype(self) -> torch.dtype | None:
        """The dtype of the result; ``None`` if that is the expression's and the expression is not known here."""
        if self.out is not None:
            return self.out.dtype
        return self.dtype if self.dtype is not None or self.node is None else self.node.dtype

    def check(self, rank: int) -> None:
        """Raise if what is asked does not fit together on this rank.

        Raises:
            SpecMismatch: The target does not fit the shape, or ``out`` has another shape than the local tensor.
            Unsupported: torch has no such cast; or several boxes are wanted as pieces, in one memory.
        """
        if self.node is None:
            return
        spec = self.node.spec
        dtype = self.result_dtype
        assert dtype is not None
        check_cast(spec.dtype, dtype)
        local = local_shape_of(self.target, spec.shape, rank)
        if self.out is None or local is None:
            return
        if self.out.is_meta:
            raise Unsupported("the memory to write to is on the meta device. Give it memory first (module.to_empty).")
        if tuple(self.out.shape) != local:
            raise SpecMismatch(
                f"the memory to write to has the shape {tuple(self.out.shape)}, and the local tensor of rank {rank} "
                f"has {local} (the whole is {spec}, wanted as {self.target or 'a whole'})."
            )
