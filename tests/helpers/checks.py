"""One operation, run in all ways at once."""

from __future__ import annotations

from typing import Any

import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.lazy import Op
from fdsd.data.spec import TensorSpec, spec_of
from tests.helpers.tensors import same_bytes

__all__ = ["agree", "spec"]


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype)


def agree(op: Op, *tensors: torch.Tensor) -> Any:
    """Run an operation eagerly, lazily and on specs; see that all agree; give the eager result."""
    eager = apply(op, *tensors)
    lazy = apply(op, *[defer_leaf(x) for x in tensors])
    abstract = apply(op, *[spec_of(x) for x in tensors])
    several = isinstance(eager, tuple)
    found = evaluate(list(lazy) if several else [lazy])
    for a, b, c in zip(eager if several else (eager,), found, abstract if several else (abstract,), strict=True):
        assert same_bytes(a, b), f"{op}: eager {a}, lazy {b}"
        assert spec_of(a) == c
        assert not a.requires_grad and not b.requires_grad
    return eager
