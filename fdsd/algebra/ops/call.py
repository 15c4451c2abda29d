"""A user's own function as an operation, and the choice of one result among several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from attrs import field, frozen

from fdsd.algebra.lazy import Computing, Lazy, Pull, Structural
from fdsd.data.errors import SpecMismatch
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec

__all__ = ["Call", "Item", "check_results", "function_name", "run_function"]


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


@frozen
class Call(Computing):
    """A function of whole tensors, whose results have the given specs (a tuple of results for several specs).

    Without specs they are found by evaluating the function abstractly, once. The function gets contiguous tensors of
    its own or detached aliases of the user's, which it must not write to; it computes on real data only.
    """

    fn: Callable[..., Any] = field(repr=function_name)
    specs: tuple[TensorSpec, ...] | None = None

    @property
    def whole(self) -> bool:
        return True

    def infer(self, *inputs: TensorSpec) -> TensorSpec | tuple[TensorSpec, ...]:
        specs = _abstract_specs(self.fn, inputs) if self.specs is None else self.specs
        return specs[0] if len(specs) == 1 else specs

    def eager(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        results = run_function(self.fn, inputs)
        if self.specs is not None:
            check_results(self.fn, results, self.specs)
        return results[0] if len(results) == 1 else results


def check_results(fn: object, results: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
    """Raise unless results are what a function was said to give."""
    found = [TensorSpec(tuple(r.shape), r.dtype) for r in results]
    if found != list(specs):
        raise SpecMismatch(
            f"map_tensors: {function_name(fn)} gave {', '.join(map(str, found))}, where its spec says "
            f"{', '.join(map(str, specs))}. Correct spec=."
        )


@lru_cache(maxsize=4096)
def _abstract_specs(fn: Callable[..., Any], inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Find the specs of a function's results without data."""
    try:
        with torch.no_grad():
            results = fn(*[torch.empty(x.shape, dtype=x.dtype, device="meta") for x in inputs])
    except Exception as error:  # whatever a user's function does when there are no values to look at
        raise SpecMismatch(
            f"map_tensors: the result of {function_name(fn)} on {', '.join(map(str, inputs))} is not known before it "
            f"runs ({type(error).__name__}: {error}). Say it with spec=: a TensorSpec, or a function from spec to spec."
        ) from error
    return tuple([TensorSpec(tuple(r.shape), r.dtype) for r in _as_tensors(fn, results)])


def _as_tensors(fn: object, results: Any) -> tuple[torch.Tensor, ...]:
    """Give what a function returned as a tuple of tensors, or raise."""
    made: list[Any] = [*results] if isinstance(results, tuple) else [results]
    for result in made:
        if not isinstance(result, torch.Tensor):
            raise SpecMismatch(f"map_tensors: {function_name(fn)} returned {type(result).__name__}, not a tensor.")
    return tuple(made)


def run_function(fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run a user's function on contiguous tensors, and see to it that it gives tensors and writes to no input."""
    given = [x.contiguous() for x in inputs]
    versions = [x._version for x in given]
    results = fn(*given)
    if [x._version for x in given] != versions:
        raise SpecMismatch(
            f"map_tensors: {function_name(fn)} wrote into its input. Inputs are never changed; return a new tensor."
        )
    return tuple([result.detach() for result in _as_tensors(fn, results)])


@frozen
class Item(Structural):
    """One of the results of an operation that gives several."""

    index: int

    def infer(self, *inputs: TensorSpec) -> TensorSpec:
        raise SpecMismatch("Item: its spec is taken from the operation that gives several results.")

    def pull(self, inputs: Sequence[Lazy], region: Region, out: torch.Tensor) -> Iterator[Pull]:
        raise SpecMismatch("Item: the driver reads results of several from what it has kept.")
