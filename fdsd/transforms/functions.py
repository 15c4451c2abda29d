"""Verbs that compute new values for each tensor: a user's function, and adding a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from attrs import frozen

from fdsd.algebra.apply import Applier
from fdsd.algebra.ops import AddScalar as AddScalarOp
from fdsd.algebra.ops import Call
from fdsd.algebra.ops.call import function_name
from fdsd.data.errors import SpecMismatch
from fdsd.data.spec import TensorSpec
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.each import Each
from fdsd.transforms.regroup import call
from fdsd.transforms.which import Choice, Which

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
            return apply(Call(self.fn), leaf)
        made = rule if isinstance(rule, TensorSpec) else rule(spec)
        if not isinstance(made, TensorSpec):
            raise SpecMismatch(f"spec= gave {type(made).__name__}, not a TensorSpec.")
        return apply(Call(self.fn, (made,)), leaf)

    def inverse(self) -> Step:
        self.refuse_inverse("a function of yours has no inverse that fdsd could know. Compose map_tensors(inverse).")

    def call_text(self) -> str:
        which = [] if self.which.is_default else [self.which.call_text()]
        rule = self.spec
        text = repr(rule) if rule is None or isinstance(rule, TensorSpec) else function_name(rule)
        spec = [] if rule is None else [f"spec={text}"]
        return call(self.verb, [function_name(self.fn), *which, *spec])


@frozen
class AddScalar(Each):
    """See ``add_scalar``."""

    value: float = 0.0
    verb: ClassVar[str] = "add_scalar"
    computes: ClassVar[str | None] = "an offset changes values, not how they were trained"

    @property
    def own_grade(self) -> Grade:
        return Grade.NONE

    def make(self, apply: Applier, leaf: Any, spec: TensorSpec) -> Any:
        return apply(AddScalarOp(self.value), leaf)

    def inverse(self) -> Step:
        self.refuse_inverse(
            f"adding rounds, so subtracting does not bring every value back. Compose add_scalar(..., {-self.value})."
        )

    def call_text(self) -> str:
        return call(self.verb, [self.which.one_text(), repr(self.value)])


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], *which: Which, spec: SpecRule = None) -> Pipeline:
    """Apply a function of your own to each tensor.

    Args:
        fn: A function from tensor to tensor, which gets the whole tensor, contiguous, and must not write to it.
        *which: The names; see ``select``. Without any, all tensors.
        spec: The spec of the result, or a function from the source's spec to it. Without it, the function is
            evaluated abstractly, once for each spec, when shapes are asked for before it runs.

    Raises:
        SpecMismatch: When run: the result is no tensor, not of ``spec``, or ``fn`` wrote into its input.

    Law: not invertible.

    >>> map_tensors(torch.neg, "w")({"w": torch.tensor([1, 2])})["w"]
    tensor([-1, -2])
    """
    if not callable(fn):
        raise SpecMismatch(f"map_tensors: {fn!r} is no function. Give the function first, then the names.")
    return Pipeline((MapTensors(Choice.of(*which), fn, spec),))


def add_scalar(which: Which, value: float) -> Pipeline:
    """Add one number to every element of each tensor, rounding once to the tensor's dtype.

    Args:
        which: The names; see ``select``.
        value: The number; a whole one for integer dtypes.

    Law: not invertible, since adding rounds: norm weights stored as ``w`` and as ``w + 1`` differ in bfloat16.

    >>> add_scalar("norm.weight", 1.0)({"norm.weight": torch.tensor([0.5])})["norm.weight"]
    tensor([1.5000])
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecMismatch(f"add_scalar: {value!r} is no number.")
    return Pipeline((AddScalar(Choice.of(which), value),))
