"""Users' functions for tests: module-level, so that they compare, hash and pickle; several kinds of results."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fdsd.algebra.ops import Call
from fdsd.data.spec import TensorSpec
from tests.helpers.tensors import carried, plain, slots

__all__ = ["FUNCTIONS", "call_of"]


def backwards(x: torch.Tensor) -> torch.Tensor:
    """A fresh result."""
    return slots(carried(x).flip(tuple(range(x.ndim))), x.dtype)


def itself(x: torch.Tensor) -> torch.Tensor:
    """The input, as the result."""
    return x


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of the input, of other shapes."""
    flat = x.reshape(-1)
    return flat[: flat.numel() // 2], flat[flat.numel() // 2 :]


def turned(x: torch.Tensor) -> torch.Tensor:
    """A view of the input with other strides."""
    return x.permute(tuple(reversed(range(x.ndim))))


def spread(x: torch.Tensor) -> torch.Tensor:
    """One element, expanded."""
    return x.reshape(-1)[:1].expand(3, -1)


def described(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three results of three dtypes; one has no dims, one has a zero size."""
    return torch.tensor(x.ndim), carried(x) == 0, x.reshape(-1)[:0]


def running(x: torch.Tensor) -> torch.Tensor:
    """A result each of whose elements depends on many of the input's."""
    return slots(carried(x).reshape(-1).cummax(0).values, x.dtype) if x.numel() else x


FUNCTIONS: tuple[Callable[..., object], ...] = (backwards, itself, halves, turned, spread, described, running)


def call_of(fn: Callable[..., object], *inputs: torch.Tensor) -> Call:
    """Make a ``Call`` whose specs are those of the results on these inputs."""
    results = fn(*[slots(carried(plain(x)).contiguous(), x.dtype) for x in inputs])
    made = results if isinstance(results, tuple) else (results,)
    return Call(fn, tuple(TensorSpec(tuple(r.shape), r.dtype) for r in made))
