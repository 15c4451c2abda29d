"""Changing dtypes: ``cast``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen

from fdsd.algebra.apply import Applier
from fdsd.algebra.dtypes import is_widening
from fdsd.algebra.ops import Cast as CastOp
from fdsd.data.errors import SpecMismatch
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec, dtype_name
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.rewrite import Scope
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.each import Each
from fdsd.transforms.regroup import call, require_spec, shown
from fdsd.transforms.which import Which, choice

__all__ = ["cast"]


@frozen
class Cast(Each):
    """See ``cast``."""

    dtype: torch.dtype = torch.float32
    from_dtype: torch.dtype | None = None
    verb: ClassVar[str] = "cast"
    computes: ClassVar[str | None] = "a cast rounds values, and moments keep the optimizer's own dtype"

    @property
    def own_grade(self) -> Grade:
        if self.from_dtype is None or self.from_dtype.is_complex != self.dtype.is_complex:
            return Grade.NONE
        return Grade.EXACT if is_widening(self.from_dtype, self.dtype) else Grade.NONE

    def pick(self, scope: Scope) -> tuple[list[str], list[Problem]]:
        if not self.which.is_default:
            return self.which.pick(scope)
        specs = {name: spec for name in scope.names if (spec := scope.spec(name)) is not None}
        return [n for n, s in specs.items() if s.dtype.is_floating_point or s.dtype.is_complex], []

    def make(self, apply: Applier, leaf: Any, spec: TensorSpec) -> Any:
        if self.from_dtype is not None and spec.dtype != self.from_dtype:
            raise SpecMismatch(
                f"its dtype is {dtype_name(spec.dtype)}, not from_dtype={self.from_dtype}. Choose by name what to cast."
            )
        return leaf if spec.dtype == self.dtype else apply(CastOp(self.dtype), leaf)

    def inverse(self) -> Step:
        if self.from_dtype is None:
            self.refuse_inverse("what dtype it was is not known. Give from_dtype=, or use .bind(source) first.")
        if is_widening(self.from_dtype, self.dtype.to_real()) and self.own_grade is Grade.NONE:
            self.refuse_inverse(
                f"a cast back from {dtype_name(self.dtype)} would drop the imaginary part, which cast refuses. Compose "
                "map_tensors(torch.real)."
            )
        if self.own_grade is Grade.NONE:
            self.refuse_inverse(
                f"{dtype_name(self.dtype)} cannot hold every {dtype_name(self.from_dtype)}, so values were rounded "
                "away. Keep the source checkpoint instead."
            )
        return Cast(self.which, self.from_dtype, self.dtype)

    def fix(self, scope: Scope, names: Sequence[str]) -> tuple[Step, ...]:
        if self.from_dtype is not None:
            return (self,)
        dtypes = [(name, require_spec(scope.spec(name)).dtype) for name in names]
        return self.fix_each("from_dtype", dtypes)

    def call_text(self) -> str:
        which = [] if self.which.is_default else [self.which.call_text()]
        named = {} if self.from_dtype is None else {"from_dtype": self.from_dtype}
        return call(self.verb, [str(self.dtype), *which], **named)


def cast(dtype: torch.dtype, *which: Which, from_dtype: torch.dtype | None = None) -> Pipeline:
    """Cast tensors to a dtype, rounding once, exactly here.

    Args:
        dtype: The dtype of the result.
        *which: The names; see ``select``. Without any, all floating and complex tensors, as ``Module.to`` does.
        from_dtype: The dtype before, checked, and needed for the inverse.

    Raises:
        SpecMismatch: ``dtype`` is none; when run: a tensor is not of ``from_dtype``.
        BadPattern: Names are no names.
        UnknownName: When run: a pattern matches nothing.
        Unsupported: When run: torch cannot cast these elements, or the cast would drop imaginary parts.

    Law: exact with ``from_dtype`` or after ``.bind(source)``, if every value of it is one of ``dtype``; otherwise
    not invertible.

    >>> cast(torch.float32)({"w": torch.ones(2, dtype=torch.bfloat16), "n": torch.tensor(3)})["w"].dtype
    torch.float32
    """
    if not isinstance(dtype, torch.dtype):
        raise SpecMismatch(f"cast: {shown(dtype)} is no torch.dtype. Write for example cast(torch.bfloat16, 'name').")
    if from_dtype is not None and not isinstance(from_dtype, torch.dtype):
        raise SpecMismatch(f"cast: from_dtype={shown(from_dtype)} is no torch.dtype. Write for example torch.float32.")
    return Pipeline((Cast(choice("cast", *which), dtype, from_dtype),))
