"""Flattening part by part: what the parts are when torch cuts and flattens them, and back, for leaves of all kinds."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd.algebra.apply import defer_leaf
from fdsd.data.spec import TensorSpec
from fdsd.engine.materializing import materialize
from fdsd.layout.flattening import Flattening


@st.composite
def flattenings(draw: st.DrawFn) -> tuple[Flattening, tuple[int, ...]]:
    shape = list(draw(st.lists(st.integers(0, 4), min_size=0, max_size=3)))
    order = tuple(draw(st.permutations(range(len(shape))))) if draw(st.booleans()) else ()
    if not shape or draw(st.booleans()):
        return Flattening(order), tuple(shape)
    dim = draw(st.integers(0, len(shape) - 1))
    sizes = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
    shape[dim] = sum(sizes)
    return Flattening(order, dim, sizes), tuple(shape)


@given(flattenings())
def test_each_part_is_flattened_as_torch_does_and_the_whole_comes_back(
    case: tuple[Flattening, tuple[int, ...]],
) -> None:
    how, shape = case
    x = torch.arange(math.prod(shape)).reshape(shape)
    parts = x.split([*how.sizes], how.dim) if how.sizes else (x,)
    expected = torch.cat([(part.permute(how.order) if how.order else part).reshape(-1) for part in parts])
    flat = how.flatten(x)
    assert torch.equal(flat, expected)
    assert torch.equal(how.unflatten(flat, shape), x)
    spec = how.flatten(TensorSpec(shape, x.dtype))
    assert spec == TensorSpec(tuple(flat.shape), x.dtype)
    assert how.unflatten(spec, shape) == TensorSpec(shape, x.dtype)
    lazy = how.flatten(defer_leaf(x))
    assert torch.equal(materialize({"x": lazy})["x"], expected)
    assert torch.equal(materialize({"x": how.unflatten(defer_leaf(expected), shape)})["x"], x)
