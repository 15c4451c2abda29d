"""Operations without inputs: where expressions begin."""

from __future__ import annotations

from typing import Any

import torch
from attrs import field, frozen

from fdsd.algebra.dtypes import check_cast, movable
from fdsd.algebra.lazy import Op
from fdsd.data.errors import Unsupported
from fdsd.data.protocols import Source
from fdsd.data.spec import TensorSpec

__all__ = ["Constant", "Origin"]


@frozen
class Origin(Op):
    """A tensor of a source, by its FQN there."""

    source: Source = field(eq=id)
    fqn: str
    spec: TensorSpec = field(eq=False)

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        return self.spec

    def __repr__(self) -> str:
        return f"Origin({self.fqn!r})"


@frozen
class Constant(Op):
    """A tensor of one value, rounded to its own dtype before anything else happens to it."""

    spec: TensorSpec
    value: Any = 0

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        return self.spec

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor:
        out = torch.empty(self.spec.shape, dtype=self.spec.dtype)
        self.fill(out)
        return out

    def fill(self, out: torch.Tensor) -> None:
        """Write the value to all of ``out``, in its dtype."""
        carrier = movable(out)
        if not self.value and not isinstance(self.value, float):  # zero is all zero bits in every dtype
            carrier.zero_()
            return
        check_cast(self.spec.dtype, out.dtype)
        try:
            value = torch.full((), self.value, dtype=self.spec.dtype)
        except (RuntimeError, TypeError) as error:
            raise Unsupported(f"A constant {self.value!r} of dtype {self.spec.dtype}: {error}.") from error
        out.copy_(value)
