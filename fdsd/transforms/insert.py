"""Adding a tensor: ``insert``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Complex, Integral, Real
from typing import Any, ClassVar

import torch
from attrs import field, frozen

from fdsd.algebra.apply import Applier, constant, defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import Call
from fdsd.algebra.ops.call import function_name
from fdsd.algebra.ops.leaves import exactly, scalar
from fdsd.data.errors import BadPattern, SpecMismatch, Unsupported
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import Kind
from fdsd.pipeline.pipeline import Pipeline
from fdsd.pipeline.rewrite import Assign, Rewrite, Scope, keep
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.choose import Drop
from fdsd.transforms.regroup import call, number_text, shown
from fdsd.transforms.which import Choice, literal

__all__ = ["insert"]

Init = complex | Callable[[TensorSpec], torch.Tensor]


def _same_init(init: Any) -> Any:
    return init if callable(init) else exactly(init)


@frozen
class Insert(Step):
    """See ``insert``."""

    name: str
    spec: TensorSpec
    init: Init = field(eq=_same_init)
    verb: ClassVar[str] = "insert"

    @property
    def grade(self) -> Grade:
        return Grade.ONE_SIDED

    def rewrite(self, scope: Scope) -> Rewrite:
        problems: list[Problem] = []
        if self.name in scope:
            text = f"{self.name!r} is there already. Drop it first, or choose another name."
            problems.append(Problem("collision", text, (self.name,)))
        new = Assign(self.name, (), partial(self._make, scope.kind))
        return Rewrite.of([*map(keep, scope.names), new], problems)

    def _make(self, kind: Kind, _apply: Applier, _leaves: Any) -> Any:
        if kind == "abstract":
            return self.spec
        if not callable(self.init):
            like = defer_leaf(self.spec) if kind == "lazy" else torch.empty(0)
            return constant(self.spec, self.init, like=like)
        init = Call(_Maker(self.name, self.spec, self.init), (self.spec,), self.verb)
        return Lazy(init, (), [self.spec]) if kind == "lazy" else init.eager()

    def invert(self) -> tuple[Step, ...]:
        return (Drop(Choice(literal([self.name]))),)

    def call_text(self) -> str:
        init = function_name(self.init) if callable(self.init) else number_text(self.init)
        return call(self.verb, [repr(self.name), repr(self.spec), f"init={init}"])


@frozen(eq=False)  # what it makes may differ from call to call, so two of them are never one
class _Maker:
    """Makes a tensor with a user's function, and sees to it that it is the one that was announced."""

    name: str
    spec: TensorSpec
    fn: Callable[[TensorSpec], torch.Tensor]

    def __call__(self) -> torch.Tensor:
        made: Any = self.fn(self.spec)
        if not isinstance(made, torch.Tensor):
            raise SpecMismatch(f"{self._text} gave {type(made).__name__}, not a tensor.")
        found = TensorSpec(made.shape, made.dtype)
        if found != self.spec:
            raise SpecMismatch(f"{self._text} gave {found}, but spec is {self.spec}. Correct one of them.")
        return made

    @property
    def _text(self) -> str:
        return f"init={function_name(self.fn)} of {self.name!r}"

    @property
    def __name__(self) -> str:
        """The name of the user's function, for plans and provenance."""
        fn: Any = self.fn
        while isinstance(fn, partial):
            fn = fn.func
        return function_name(fn)


def insert(name: str, spec: TensorSpec, *, init: Init) -> Pipeline:
    """Add a tensor under a new name, at the end.

    Args:
        name: The name, not a pattern.
        spec: Shape and dtype of the tensor.
        init: One number for all elements, which the dtype must have (floats round), or a function that makes the
            tensor from the spec.

    Raises:
        BadPattern: ``name`` is no name.
        SpecMismatch: ``spec`` is none, or ``init`` is no number; when run: a function makes something else.
        Unsupported: The dtype does not have the number.
        NameConflict: When run: the name is there already.

    Law: one-sided: ``~`` drops it.

    >>> insert("scale", TensorSpec((2,), torch.float32), init=1.0)({})["scale"]
    tensor([1., 1.])
    """
    if not isinstance(name, str) or not name:
        raise BadPattern(f"insert: name is the name of a tensor, a str, not {shown(name)}.")
    if not isinstance(spec, TensorSpec):
        raise SpecMismatch(f"insert: spec is a TensorSpec, not {shown(spec)}.")
    return Pipeline((Insert(name, spec, init if callable(init) else _number(init, spec.dtype)),))


def _number(value: Any, dtype: torch.dtype) -> complex:
    """Read one number that a dtype has."""
    if not isinstance(value, Complex):
        raise SpecMismatch(f"insert: init is one number, or a function of the spec, not {shown(value)}.")
    number: complex = value if isinstance(value, bool) else _plain(value)
    try:
        scalar(number, dtype)
    except Unsupported as error:
        raise Unsupported(f"insert: init: {error}") from error
    return number


def _plain(value: Complex) -> complex:
    """Give a number of any library as one of Python's, so that its text can be read back."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else complex(value)
