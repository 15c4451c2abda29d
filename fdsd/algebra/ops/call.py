"""A user's own function as an operation, and the choice of one result among several."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from attrs import field, frozen

from fdsd.algebra.dtypes import movable
from fdsd.algebra.lazy import Computing, Lazy, Pull, Structural
from fdsd.data.errors import SpecMismatch
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec, is_exact

__all__ = ["Call", "Item", "function_name"]


def function_name(fn: object) -> str:
    """Name a function as source text would: with its module for torch's own, else as it is called where it is defined.

    >>> function_name(torch.relu), function_name(function_name)
    ('torch.relu', 'function_name')
    """
    if isinstance(fn, partial):
        return f"partial({', '.join([function_name(fn.func), *map(repr, fn.args)])})"
    name: str | None = getattr(fn, "__name__", None)
    if name is not None and getattr(torch, name, None) is fn:
        return f"torch.{name}"
    qualified: str | None = getattr(fn, "__qualname__", None)
    return qualified or name or repr(fn)


def _comparable(fn: Any) -> Any:
    """What tells functions apart: themselves, or their identity if they cannot be hashed."""
    return fn if isinstance(fn, Hashable) and _has_hash(fn) else ("unhashable", id(fn))


def _has_hash(fn: Any) -> bool:
    try:
        hash(fn)
    except TypeError:
        return False
    return True


@frozen
class Call(Computing):
    """A function of whole tensors, whose results have the given specs (a tuple of results for several specs).

    Without specs they are found by evaluating the function abstractly. The function gets contiguous tensors of its
    own, so that it can write to no input; it computes on real data only. ``verb`` words errors.
    """

    fn: Callable[..., Any] = field(repr=function_name, eq=_comparable)
    specs: tuple[TensorSpec, ...] | None = None
    verb: str = field(default="map_tensors", eq=False)

    @property
    def whole(self) -> bool:
        return True

    def settled(self, inputs: Sequence[TensorSpec | None]) -> Call:
        """Give the same call with the specs of its results known."""
        found = self.infer(*[spec for spec in inputs if spec is not None])
        return Call(self.fn, found if isinstance(found, tuple) else (found,), self.verb)

    def infer(self, *inputs: TensorSpec) -> TensorSpec | tuple[TensorSpec, ...]:
        specs = self._abstract(inputs) if self.specs is None else self.specs
        return specs[0] if len(specs) == 1 else specs

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if self.specs is not None and any(x.is_meta for x in inputs):  # there are no values to run it on
            results = tuple([torch.empty(s.shape, dtype=s.dtype, device="meta") for s in self.specs])
        else:
            results = self.run([_own(x) for x in inputs], self.specs)
        return results[0] if len(results) == 1 else results

    def run(self, own: Sequence[torch.Tensor], specs: Sequence[TensorSpec] | None) -> tuple[torch.Tensor, ...]:
        """Call the function on tensors that it may do anything with, and compare its results with their specs."""
        results = self._tensors(self.fn(*own))
        found = [TensorSpec(tuple(r.shape), r.dtype) for r in results]
        if specs is not None and found != list(specs):
            raise SpecMismatch(
                f"{self.verb}: {function_name(self.fn)} gave {', '.join(map(str, found))}, where its spec says "
                f"{', '.join(map(str, specs))}. Correct spec=."
            )
        return results

    def _abstract(self, inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Find the specs of the function's results without data."""
        try:
            with torch.no_grad():
                results = self.fn(*[torch.empty(x.shape, dtype=x.dtype, device="meta") for x in inputs])
        except Exception as error:  # whatever a user's function does when there are no values to look at
            raise SpecMismatch(
                f"{self.verb}: the result of {function_name(self.fn)} on {', '.join(map(str, inputs))} is not known "
                f"before it runs ({type(error).__name__}: {error}). Say it with spec=: a TensorSpec, or a function "
                "from spec to spec."
            ) from error
        return tuple([TensorSpec(tuple(r.shape), r.dtype) for r in self._tensors(results)])

    def _tensors(self, results: Any) -> tuple[torch.Tensor, ...]:
        """Give what the function returned as a tuple of tensors, or raise."""
        made: list[Any] = [*results] if isinstance(results, tuple) else [results]
        for result in made:
            if not is_exact(result):
                raise SpecMismatch(
                    f"{self.verb}: {function_name(self.fn)} returned {type(result).__name__}, not a plain tensor."
                )
        return tuple([result.detach() for result in made])

    def __str__(self) -> str:
        return f"{self.verb}({function_name(self.fn)})"


def _own(x: torch.Tensor) -> torch.Tensor:
    """Give a function its own copy: whatever it writes to, also through NumPy, is no input of anybody's."""
    copy = movable(x).clone(memory_format=torch.contiguous_format)
    return copy if copy.dtype == x.dtype else copy.view(x.dtype)


@frozen
class Item(Structural):
    """One of the results of an operation that gives several."""

    index: int

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        raise SpecMismatch("Item: its spec is taken from the operation that gives several results.")

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        raise SpecMismatch("Item: the driver reads results of several from what it has kept.")
