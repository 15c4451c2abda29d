"""Cutting and folding spans: every index lands once, in its place, in as few pieces as can be."""

from __future__ import annotations

import math
from itertools import accumulate, product
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdsd.algebra.spans import cut, fold, fold_dims, move_dims
from fdsd.data.region import Span
from tests.helpers.regions import random_span

randoms = st.randoms(use_true_random=False)


def places(span: Span, rng: Random) -> tuple[torch.Tensor, int, list[int]]:
    """Memory for a span (with other dims around it) that holds the position of each element in the span."""
    shape = tuple(length for length, _ in span.pairs)
    before = rng.randint(0, 1)
    memory = torch.arange(span.numel).reshape(shape)
    memory = memory.expand((2,) * before + shape) if before else memory
    return memory.unsqueeze(-1).expand(*memory.shape, 3), before, span.indices()


def positions(view: torch.Tensor, dim: int, count: int) -> list[int]:
    """The positions that a view of ``places`` holds, those of the surrounding dims left out."""
    assert view.ndim == dim + count + 1
    assert view.shape[-1] == 3 and all(size == 2 for size in view.shape[:dim])
    plain = view[(0,) * dim][..., 0]
    return [int(i) for i in plain.reshape(-1).tolist()]


@settings(max_examples=300)
@given(randoms)
def test_cut(rng: Random) -> None:
    sizes = [rng.choice((0, 1, 2, 3, 5)) for _ in range(rng.randint(1, 5))]
    bounds = [0, *accumulate(sizes)]
    if not bounds[-1]:
        return
    span = random_span(rng, bounds[-1])
    if not span.numel:
        return
    memory, dim, indices = places(span, rng)
    seen: list[int] = []
    for part, piece, view in cut(span, bounds, memory, dim):
        there = positions(view, dim, len(piece.pairs))
        assert piece.indices() == [indices[p] for p in there]
        assert all(bounds[part] <= i < bounds[part + 1] for i in piece.indices())
        seen += there
    assert sorted(seen) == list(range(span.numel))


@settings(max_examples=300)
@given(randoms)
def test_fold(rng: Random) -> None:
    inner = rng.choice((1, 2, 3, 4, 6))
    span = random_span(rng, inner * rng.randint(1, 6))
    if not span.numel:
        return
    memory, dim, indices = places(span, rng)
    seen: list[int] = []
    for a, b, view in fold(span, inner, memory, dim):
        assert all(0 <= i < inner for i in b.indices())
        there = positions(view, dim, len(a.pairs) + len(b.pairs))
        assert [i * inner + j for i, j in product(a.indices(), b.indices())] == [indices[p] for p in there]
        seen += there
    assert sorted(seen) == list(range(span.numel))


@settings(max_examples=300)
@given(randoms)
def test_fold_dims(rng: Random) -> None:
    sizes = [rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 4))]
    span = random_span(rng, math.prod(sizes))
    if not span.numel:
        return
    memory, dim, indices = places(span, rng)
    strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    seen: list[int] = []
    for spans, view in fold_dims(span, sizes, memory, dim):
        assert all(0 <= i < size for s, size in zip(spans, sizes, strict=True) for i in s.indices())
        there = positions(view, dim, sum(len(s.pairs) for s in spans))
        flat = [
            sum(i * stride for i, stride in zip(index, strides, strict=True))
            for index in product(*[s.indices() for s in spans])
        ]
        assert flat == [indices[p] for p in there]
        seen += there
    assert sorted(seen) == list(range(span.numel))


def test_a_long_run_folds_into_few_pieces() -> None:
    """A head, the whole rows in between at once, and a tail."""
    span = Span(3, ((100_000, 1),))
    assert len(list(fold(span, 1000, torch.empty(100_000), 0))) == 3
    assert len(list(fold(Span(0, ((100_000, 1),)), 1000, torch.empty(100_000), 0))) == 1
    assert len(list(fold_dims(Span(0, ((1 << 20, 1),)), (64, 128, 128), torch.empty(1 << 20), 0))) == 1


def test_whole_rows_fold_into_one_piece() -> None:
    """What a RoPE permutation asks: halves of heads, taken in turn."""
    span = Span(0, ((32, 128), (64, 1), (2, 64)))
    ((a, b, view),) = fold(span, 128, torch.empty(32, 64, 2), 0)
    assert (a, b, tuple(view.shape)) == (Span(0, ((32, 1),)), Span(0, ((64, 1), (2, 64))), (32, 64, 2))


def test_cut_within_one_part_is_one_piece() -> None:
    out = torch.empty(10)
    ((part, piece, view),) = cut(Span(5, ((10, 1),)), [0, 5, 15, 20], out, 0)
    assert (part, piece, view is out) == (1, Span(5, ((10, 1),)), True)


def test_cut_passes_over_empty_parts() -> None:
    parts = [part for part, _, _ in cut(Span(0, ((4, 1),)), [0, 0, 2, 2, 2, 4, 4], torch.empty(4), 0)]
    assert parts == [1, 4]


def test_move_dims() -> None:
    out = torch.empty(2, 3, 4, 5)
    assert move_dims(out, 1, [0, 1]) is out
    assert tuple(move_dims(out, 1, [1, 0]).shape) == (2, 4, 3, 5)
    assert tuple(move_dims(out, 1, [2, 0, 1]).shape) == (2, 5, 3, 4)
