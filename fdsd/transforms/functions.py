"""Verbs that compute new values for each tensor: a user's function, and adding a number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from attrs import field, frozen

from fdsd.algebra.apply import Applier
from fdsd.algebra.ops import AddScalar as AddScalarOp
from fdsd.algebra.ops import Call
from fdsd.algebra.ops.call import function_name
from fdsd.algebra.ops.leaves import exactly
from fdsd.data.errors import SpecMismatch, add_note
from fdsd.data.spec import TensorSpec
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.each import Each
from fdsd.transforms.regroup import call, number_text, shown
from fdsd.transforms.which import Which, choice

__all__ = ["add_scalar", "map_tensors"]

SpecRule = TensorSpec | Callable[[TensorSpec], TensorSpec] | None


@frozen
class MapTensors(Each):
    """See ``map_tensors``."""

    fn: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    spec: SpecRule = None
    verb: ClassVar[str] = "map_tensors"
    checks_first: ClassVar[bool] = False
    computes: ClassVar[str | None] = "a function of the values says nothing about their moments"

    @property
    def own_grade(self) -> Grade:
        return Grade.NONE

    def make(self, apply: Applier, leaf: Any, spec: TensorSpec) -> Any:
        rule = self.spec
        if rule is None:
            return self._one(apply(Call(self.fn), leaf))
        made = rule if isinstance(rule, TensorSpec) else _ask(rule, spec)
        if not isinstance(made, TensorSpec):
            raise SpecMismatch(f"spec= gave {type(made).__name__}, not a TensorSpec.")
        return apply(Call(self.fn, (made,)), leaf)

    def _one(self, made: Any) -> Any:
        if isinstance(made, tuple):
            count = len(made)  # pyright: ignore[reportUnknownArgumentType]
            raise SpecMismatch(f"{function_name(self.fn)} gave {count} tensors. Give one; a name has one tensor.")
        return made

    def inverse(self) -> Step:
        self.refuse_inverse("a function of yours has no inverse that fdsd could know. Compose map_tensors(inverse).")

    def call_text(self) -> str:
        which = [] if self.which.is_default else [self.which.call_text()]
        rule = self.spec
        text = repr(rule) if rule is None or isinstance(rule, TensorSpec) else function_name(rule)
        spec = [] if rule is None else [f"spec={text}"]
        return call(self.verb, [function_name(self.fn), *which, *spec])


def _ask(rule: Callable[[TensorSpec], TensorSpec], spec: TensorSpec) -> Any:
    try:
        return rule(spec)
    except Exception as error:
        add_note(error, f"spec={function_name(rule)}, asked what becomes of {spec}")
        raise


@frozen
class AddScalar(Each):
    """See ``add_scalar``."""

    value: float = field(default=0.0, eq=exactly)
    verb: ClassVar[str] = "add_scalar"
    computes: ClassVar[str | None] = "an offset changes values, not how they were trained"

    @property
    def own_grade(self) -> Grade:
        return Grade.NONE

    def make(self, apply: Applier, leaf: Any, spec: TensorSpec) -> Any:
        return apply(AddScalarOp(self.value), leaf)

    def inverse(self) -> Step:
        self.refuse_inverse(
            "adding rounds, so subtracting does not bring every value back. "
            f"Compose add_scalar(..., {number_text(-self.value)})."
        )

    def call_text(self) -> str:
        return call(self.verb, [self.which.one_text(), number_text(self.value)])


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], *which: Which, spec: SpecRule = None) -> Pipeline:
    """Apply a function of your own to each tensor.

    Args:
        fn: A function from tensor to tensor, which gets a copy of its own of the whole tensor, contiguous.
        *which: The names; see ``select``. Without any, all tensors.
        spec: The spec of the result, or a function from the source's spec to it. Without it, the function is
            evaluated abstractly, once for each spec, when shapes are asked for before it runs.

    Raises:
        SpecMismatch: ``fn`` or ``spec`` is none; when run: the result is no tensor, or not of ``spec``.
        BadPattern: Names are no names.
        UnknownName: When run: a pattern matches nothing.

    Law: not invertible.

    >>> map_tensors(torch.neg, "w")({"w": torch.tensor([1, 2])})["w"]
    tensor([-1, -2])
    """
    if not callable(fn):
        raise SpecMismatch(f"map_tensors: {shown(fn)} is no function. Give the function first, then the names.")
    if not (spec is None or isinstance(spec, TensorSpec) or callable(spec)):
        raise SpecMismatch(f"map_tensors: spec is a TensorSpec, or a function from spec to spec, not {shown(spec)}.")
    return Pipeline((MapTensors(choice("map_tensors", *which), fn, spec),))


def add_scalar(which: Which, value: float) -> Pipeline:
    """Add one number to every element of each tensor, rounding once to the tensor's dtype.

    Args:
        which: The names; see ``select``.
        value: The number; for integer dtypes one that they have, and sums wrap as torch's do.

    Raises:
        SpecMismatch: ``value`` is no number.
        BadPattern: Names are no names.
        UnknownName: When run: a pattern matches nothing.
        Unsupported: When run: the number cannot be added to elements of this dtype.

    Law: not invertible, since adding rounds: norm weights stored as ``w`` and as ``w + 1`` differ in bfloat16.

    >>> add_scalar("norm.weight", 1.0)({"norm.weight": torch.tensor([0.5])})["norm.weight"]
    tensor([1.5000])
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SpecMismatch(f"add_scalar: {shown(value)} is no number.")
    number = int(value) if isinstance(value, Integral) else float(value)
    if isinstance(number, int) and abs(number) > sys.float_info.max:
        raise SpecMismatch(f"add_scalar: {shown(number)} is beyond every dtype.")
    return Pipeline((AddScalar(choice("add_scalar", which), number),))
