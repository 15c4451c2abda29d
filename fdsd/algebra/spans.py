"""Arithmetic on spans: cutting them at boundaries and folding them over a pair of dims.

Each function walks the indices of one span together with views of the memory that they go to. The memory is
only ever narrowed, selected, permuted and unflattened, never merged, so that no view can fail. Nothing here
knows of operations or of data.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch

from fdsd.data.region import Region, Span

__all__ = ["cut", "fold", "fold_dims", "move_dims", "unflatten", "view_of"]


def cut(span: Span, bounds: Sequence[int], out: torch.Tensor, dim: int) -> Iterator[tuple[int, Span, torch.Tensor]]:
    """Cut a span at boundaries.

    Args:
        span: Indices of one dim.
        bounds: Ascending starts of the parts, and the end of the last one.
        out: Memory whose dims from ``dim`` on belong to the span's pairs.
        dim: The first of those dims.

    Yields:
        For each run of indices in one part: the part, the indices (not shifted), their memory.

    >>> [(part, piece.start) for part, piece, _ in cut(Span(0, ((5, 1),)), [0, 2, 5], torch.empty(5), 0)]
    [(0, 0), (1, 2)]
    """
    part = bisect_right(bounds, span.start) - 1
    if span.start + span.extent < bounds[part + 1]:
        yield part, span, out
        return
    (length, step), *rest = span.pairs
    tail = tuple(rest)
    inner = Span(0, tail).extent
    i = 0
    while i < length:
        at = span.start + i * step
        part = bisect_right(bounds, at) - 1
        room = bounds[part + 1] - 1 - inner - at
        if room < 0:  # the inner pairs of this one index straddle a boundary
            yield from cut(Span(at, tail), bounds, out.select(dim, i), dim)
            i += 1
            continue
        run = length - i if step == 0 else min(length - i, room // step + 1)
        yield part, Span(at, ((run, step), *tail)), out.narrow(dim, i, run)
        i += run


def unflatten(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """View one dim of a tensor as several of ``sizes``, in row-major order; as none, if it has size 1."""
    if not sizes:
        return tensor.squeeze(dim)
    step = tensor.stride(dim)
    strides: list[int] = []
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= size
    shape = (*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])
    return tensor.as_strided(shape, (*tensor.stride()[:dim], *strides, *tensor.stride()[dim + 1 :]))


def view_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """View a region of a tensor: one dim for each pair.

    >>> view_of(torch.arange(6), Region((Span(1, ((2, 3),)),)))
    tensor([1, 4])
    """
    strides, offset = region.strides(tensor.stride())
    return tensor.as_strided(region.shape, strides, tensor.storage_offset() + offset)


def move_dims(out: torch.Tensor, dim: int, order: Sequence[int]) -> torch.Tensor:
    """Permute the dims ``dim .. dim + len(order) - 1`` of ``out`` into ``order`` (relative to ``dim``)."""
    if list(order) == list(range(len(order))):
        return out
    dims = list(range(out.ndim))
    dims[dim : dim + len(order)] = [dim + k for k in order]
    return out.permute(dims)


def fold(span: Span, inner: int, out: torch.Tensor, dim: int) -> Iterator[tuple[Span, Span, torch.Tensor]]:
    """Fold indices of a merged dim into a pair of dims, the second of size ``inner``.

    Args:
        span: Indices ``n`` of the merged dim; ``n = a * inner + b``.
        inner: The size of the second dim, at least 1.
        out: Memory whose dims from ``dim`` on belong to the span's pairs.
        dim: The first of those dims.

    Yields:
        The indices ``a``, the indices ``b``, and their memory, whose dims from ``dim`` on belong to the pairs of
        ``a`` and then of ``b``.

    >>> [(a.indices(), b.indices()) for a, b, _ in fold(Span(1, ((7, 1),)), 4, torch.empty(7), 0)]
    [([0], [1, 2, 3]), ([1], [0, 1, 2, 3])]
    """
    row, column = divmod(span.start, inner)
    # Steps of whole rows move the first dim only, whatever the rest does.
    lifted = [k for k, (_, step) in enumerate(span.pairs) if step % inner == 0]
    rest = [k for k in range(len(span.pairs)) if k not in lifted]
    out = move_dims(out, dim, lifted + rest)
    over = tuple([(span.pairs[k][0], span.pairs[k][1] // inner) for k in lifted])
    remainder = Span(column, tuple([span.pairs[k] for k in rest]))
    if column + remainder.extent < inner:
        yield Span(row, over), remainder, out
        return
    for a, b, view in _fold_rows(remainder, inner, out, dim + len(lifted)):
        yield Span(row + a.start, over + a.pairs), b, view


def _fold_rows(span: Span, inner: int, out: torch.Tensor, dim: int) -> Iterator[tuple[Span, Span, torch.Tensor]]:
    """Fold a span whose outermost step is no whole number of rows, row by row, equal rows at once."""
    (length, step), *rest = span.pairs
    tail = tuple(rest)
    within = Span(0, tail).extent
    period = inner // step if inner % step == 0 else 0
    i = 0
    while i < length:
        row, at = divmod(span.start + i * step, inner)
        room = inner - 1 - within - at
        if room < 0:  # the inner pairs of this one index straddle a row's end
            yield from fold(Span(span.start + i * step, tail), inner, out.select(dim, i), dim)
            i += 1
            continue
        run = min(length - i, room // step + 1)
        rows = (length - i) // run
        if run == period and rows > 1:
            view = unflatten(out.narrow(dim, i, rows * run), dim, (rows, run))
            yield Span(row, ((rows, 1),)), Span(at, ((run, step), *tail)), view
            i += rows * run
            continue
        yield Span(row), Span(at, ((run, step), *tail)), out.narrow(dim, i, run)
        i += run


def fold_dims(
    span: Span, sizes: Sequence[int], out: torch.Tensor, dim: int
) -> Iterator[tuple[tuple[Span, ...], torch.Tensor]]:
    """Fold indices of a merged dim into dims of ``sizes`` (one or more, none of size 0).

    Yields:
        One span for each of the dims, and their memory.
    """
    if len(sizes) == 1:
        yield (span,), out
        return
    inner = 1
    for size in sizes[1:]:
        inner *= size
    for a, b, view in fold(span, inner, out, dim):
        for others, deep in fold_dims(b, sizes[1:], view, dim + len(a.pairs)):
            yield (a, *others), deep
