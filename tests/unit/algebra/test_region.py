"""Regions: their shapes, their arithmetic, and that it agrees with indexing a tensor."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd.data.errors import SpecMismatch
from fdsd.data.region import Region, Span
from tests.helpers.regions import random_region, random_shape, slice_by
from tests.helpers.tensors import patterns, same_bytes

randoms = st.randoms(use_true_random=False)


def drawn(rng: Random) -> tuple[torch.Tensor, Region]:
    shape = random_shape(rng)
    return patterns(shape, torch.int64), random_region(rng, shape)


@given(randoms)
def test_span_lists_numel_indices_up_to_its_extent(rng: Random) -> None:
    _, region = drawn(rng)
    for span in region.spans:
        indices = span.indices()
        assert len(indices) == span.numel
        if indices:
            assert (min(indices), max(indices)) == (span.start, span.start + span.extent)
        assert span.shift(7).indices() == [i + 7 for i in indices]


@given(randoms)
def test_region_is_a_strided_view(rng: Random) -> None:
    x, region = drawn(rng)
    strides, offset = region.strides(x.stride())
    assert region.inside(tuple(x.shape))
    assert region.numel == slice_by(x, region).numel()
    if region.numel:
        assert same_bytes(x.as_strided(region.shape, strides, offset), slice_by(x, region))


@given(randoms)
def test_narrowing_a_region_narrows_its_memory(rng: Random) -> None:
    x, region = drawn(rng)
    if not region.shape:
        return
    dim = rng.randrange(len(region.shape))
    start = rng.randint(0, region.shape[dim])
    length = rng.randint(0, region.shape[dim] - start)
    if length:
        assert same_bytes(
            slice_by(x, region.narrow(dim, start, length)), slice_by(x, region).narrow(dim, start, length)
        )
    assert region.narrow(dim, start, length).shape[dim] == length


@given(randoms, st.integers(-1, 200))
def test_chunks_cover_once_in_order_within_the_limit(rng: Random, limit: int) -> None:
    x, region = drawn(rng)
    whole = slice_by(x, region)
    seen = torch.zeros(region.shape, dtype=torch.int64)
    last = -1
    order = torch.arange(region.numel).reshape(region.shape)
    for part, where in region.chunks(limit):
        assert part.numel <= max(1, limit)
        assert same_bytes(slice_by(x, part), whole[where])
        seen[where] += 1
        if part.numel:
            assert int(order[where].min()) > last
            last = int(order[where].max())
    assert bool((seen == 1).all())


def test_few_chunks_are_cut_when_few_are_needed() -> None:
    assert len(list(Region.whole((1000, 10)).chunks(1000))) == 10
    assert len(list(Region.whole((4, 1000)).chunks(1000))) == 4
    assert len(list(Region.whole((1000,)).chunks(10_000))) == 1
    assert len(list(Region.whole(()).chunks(0))) == 1
    assert [part.numel for part, _ in Region.whole((0, 3)).chunks(1)] == [0]


@given(randoms)
def test_dim_of_counts_the_pairs_before(rng: Random) -> None:
    _, region = drawn(rng)
    for dim, span in enumerate(region.spans):
        first = region.dim_of(dim)
        assert region.shape[first : first + len(span.pairs)] == tuple(length for length, _ in span.pairs)


def test_whole_box_and_replace() -> None:
    assert Region.whole((2, 3)) == Region.box((0, 0), (2, 3))
    assert Region.whole(()).numel == 1
    assert Region.whole((0, 5)).numel == 0
    assert Region.whole((2, 3)).is_whole((2, 3))
    assert not Region.whole((2, 3)).is_whole((2, 4))
    assert not Region.box((0, 1), (2, 2)).is_whole((2, 3))
    region = Region.whole((2, 3, 4))
    assert region.replace(1) == Region.whole((2, 4))
    assert region.replace(1, Span(5), Span(6)).shape == (2, 4)


@pytest.mark.parametrize(
    ("region", "shape"),
    [
        (Region.whole((3,)), (2,)),
        (Region.whole((3,)), ()),
        (Region.box((1,), (2,)), (2,)),
        (Region((Span(-1, ((1, 1),)),)), (2,)),
        (Region((Span(0, ((2, 2), (2, 1))),)), (3,)),
        (Region((Span(2),)), (2,)),
    ],
)
def test_outside_is_told_with_the_shape(region: Region, shape: tuple[int, ...]) -> None:
    assert not region.inside(shape)
    with pytest.raises(SpecMismatch, match=r"reading 'w'.*does not lie within the shape"):
        region.check_inside(shape, "reading 'w'")


def test_an_empty_region_lies_anywhere() -> None:
    Region.box((7,), (0,)).check_inside((2,), "empty")


def test_narrow_of_no_dim_is_told() -> None:
    with pytest.raises(SpecMismatch, match="no dim 2"):
        Region.whole((2, 3)).narrow(2, 0, 1)
    with pytest.raises(SpecMismatch, match="no dim 0"):
        Region((Span(1),)).narrow(0, 0, 1)


def test_regions_are_values() -> None:
    assert len({Region.whole((2,)), Region.box((0,), (2,)), Region.whole((3,))}) == 2
