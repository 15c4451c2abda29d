"""Arithmetic of strides, against torch and against walking by hand."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd.data.strides import Dim, joined, offsets, row_major

shapes = st.lists(st.integers(1, 4), max_size=4)
grids = st.lists(st.builds(Dim, st.integers(1, 4), st.integers(0, 30), st.integers(-30, 30)), max_size=4)


@given(shapes)
def test_row_major_is_contiguous(shape: list[int]) -> None:
    assert row_major(shape) == torch.empty(shape).stride()


def by_hand(dims: list[Dim]) -> list[tuple[int, int]]:
    points = itertools.product(*[range(dim.length) for dim in dims])
    return [
        (
            sum([i * dim.source for i, dim in zip(point, dims, strict=True)]),
            sum([i * dim.target for i, dim in zip(point, dims, strict=True)]),
        )
        for point in points
    ]


@given(grids)
def test_offsets_walk_the_grid_in_order(dims: list[Dim]) -> None:
    assert list(offsets(dims)) == by_hand(dims)


@given(grids)
def test_joined_dims_have_the_same_points(dims: list[Dim]) -> None:
    made = joined(dims)
    assert sorted(offsets(made)) == sorted(by_hand(dims))
    assert [dim.source for dim in made] == sorted([dim.source for dim in made], reverse=True)
    assert len(made) <= len(dims)


@given(shapes, st.permutations(range(4)))
def test_whatever_the_order_a_contiguous_grid_is_one_dim(shape: list[int], order: list[int]) -> None:
    strides = row_major(shape)
    dims = [Dim(shape[i], strides[i], strides[i]) for i in order if i < len(shape)]
    numel = torch.empty(shape).numel()
    assert joined(dims) == ([Dim(numel, 1, 1)] if numel > 1 else [])
