"""Counting the elements of a tensor by how many grids contain them, without a mask of the tensor's size.

Integers only: nothing here knows of expressions, names or data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

from fdsd.data.region import Region, Span

__all__ = ["Grid", "grids", "spread"]

Grid = tuple[Span, ...]
"""One span for each dim, none with an index twice, pairs of one run joined."""

_WINDOW = 1 << 18
"""How many indices of a dim are looked at one by one at a time, where spans overlap irregularly."""


def grids(region: Region) -> Iterator[tuple[Grid, int]]:
    """Write a region as grids without repeated indices, each with how often it stands there.

    >>> list(grids(Region((Span(1, ((2, 3), (3, 1))),))))
    [((Span(start=1, pairs=((6, 1),)),), 1)]
    """
    for chosen in product(*[_plain(span) for span in region.spans]):
        yield tuple([span for span, _ in chosen]), math.prod([times for _, times in chosen])


def _plain(span: Span) -> list[tuple[Span, int]]:
    """Order the pairs by step, join those of one run, and take apart those that would meet an index twice."""
    if not span.pairs or (len(span.pairs) == 1 and span.pairs[0][0] > 1 and span.pairs[0][1] > 0):
        return [(span, 1)]
    times = math.prod([length for length, step in span.pairs if not step])
    pairs = sorted([pair for pair in span.pairs if pair[0] > 1 and pair[1]], key=lambda pair: -pair[1])
    joined: list[tuple[int, int]] = []
    for k, (length, step) in enumerate(pairs):
        if step <= Span(0, tuple(pairs[k + 1 :])).extent:
            rest = (*pairs[:k], *pairs[k + 1 :])
            apart = [_plain(Span(span.start + i * step, rest)) for i in range(length)]
            return [(one, times * n) for found in apart for one, n in found]
        if joined and joined[-1][1] == length * step:
            joined[-1] = (joined[-1][0] * length, step)
        else:
            joined.append((length, step))
    return [(Span(span.start, tuple(joined)), times)]


def spread(parts: Mapping[Grid, int], shape: tuple[int, ...]) -> Counter[int]:
    """Tell how many elements of a tensor lie in how many of some grids.

    The indices of one dim fall into classes by which spans contain them; each class is counted once, over the
    other dims, however many indices it has.

    Args:
        parts: Grids, each with how often it counts.
        shape: The shape of the tensor.

    Returns:
        For each number of times, the number of elements.

    >>> a, b = Span(0, ((3, 2),)), Span(0, ((4, 1),))
    >>> sorted(spread({(a, b): 1, (b, a): 1}, (6, 6)).items())
    [(0, 16), (1, 16), (2, 4)]
    """
    if not shape:
        return Counter({sum(parts.values()): 1})
    if len(parts) < 2:
        inside = sum([math.prod([span.numel for span in grid]) for grid in parts])
        return Counter({0: math.prod(shape) - inside, **dict.fromkeys(parts.values(), inside)})
    dim = min(range(len(shape)), key=lambda d: len({grid[d] for grid in parts}))
    below: dict[Span, Counter[Grid]] = {}
    for grid, times in parts.items():
        below.setdefault(grid[dim], Counter())[grid[:dim] + grid[dim + 1 :]] += times
    if not all(map(_is_run, below)) and (folded := _fold_all(below)) is not None:
        return _spread_folded(parts, shape, dim, *folded)
    found: Counter[int] = Counter()
    known: dict[frozenset[tuple[Grid, int]], Counter[int]] = {}
    rows = list(below.values())
    for inside_of, width in _classes(list(below), shape[dim]).items():
        merged: Counter[Grid] = Counter()
        for k in inside_of:
            merged.update(rows[k])
        key = frozenset(merged.items())
        if key not in known:
            known[key] = spread(merged, shape[:dim] + shape[dim + 1 :])
        for times, elements in known[key].items():
            found[times] += elements * width
    return found


def _is_run(span: Span) -> bool:
    return not span.pairs or (len(span.pairs) == 1 and span.pairs[0][1] == 1)


def _fold_all(spans: Iterable[Span]) -> tuple[int, dict[Span, Grid]] | None:
    """Find a period by which all spans are grids of rows and columns: interleaved parts become plain ones."""
    every = list(spans)
    steps = sorted({step for span in every for _, step in span.pairs if step > 1}, reverse=True)
    for period in steps[:8]:
        made: dict[Span, Grid] = {}
        for span in every:
            if (grid := _fold(span, period)) is None:
                break
            made[span] = grid
        else:
            return period, made
    return None


def _fold(span: Span, period: int) -> Grid | None:
    row, column = divmod(span.start, period)
    over = tuple([(length, step // period) for length, step in span.pairs if step % period == 0])
    rest = tuple([pair for pair in span.pairs if pair[1] % period])
    if not column and len(rest) == 1 and rest[0][1] == 1 and rest[0][0] % period == 0:  # whole rows
        over, rest = (*over, (rest[0][0] // period, 1)), ((period, 1),)
    if column + Span(0, rest).extent >= period:
        return None
    return _plain(Span(row, over))[0][0], _plain(Span(column, rest))[0][0]


def _spread_folded(
    parts: Mapping[Grid, int], shape: tuple[int, ...], dim: int, period: int, folded: Mapping[Span, Grid]
) -> Counter[int]:
    rows = -(-shape[dim] // period)
    deeper = {grid[:dim] + folded[grid[dim]] + grid[dim + 1 :]: times for grid, times in parts.items()}
    found = spread(deeper, (*shape[:dim], rows, period, *shape[dim + 1 :]))
    beyond = rows * period - shape[dim]  # the last row may be short
    found[0] -= beyond * math.prod(shape[:dim] + shape[dim + 1 :])
    return found


def _classes(spans: Sequence[Span], size: int) -> Counter[tuple[int, ...]]:
    """Count the indices of a dim by which of the spans (by number, ascending) contain them."""
    found: Counter[tuple[int, ...]] = Counter()
    if not all(map(_is_run, spans)):
        for low in range(0, size, _WINDOW):
            found.update(_window(spans, low, min(low + _WINDOW, size)))
        return found
    marks: dict[int, list[int]] = {size: []}
    for k, span in enumerate(spans):
        marks.setdefault(span.start, []).append(k)
        marks.setdefault(span.start + span.extent + 1, []).append(k)
    inside_of: set[int] = set()
    last = 0
    for at in sorted(marks):
        if at > last:
            found[tuple(sorted(inside_of))] += at - last
            last = at
        inside_of.symmetric_difference_update(marks[at])
    return found


def _window(spans: Sequence[Span], low: int, high: int) -> Counter[tuple[int, ...]]:
    """Do what ``_classes`` does for indices from ``low`` on and below ``high``, one by one."""
    inside_of: dict[int, list[int]] = {}
    for k, span in enumerate(spans):
        for part in _between(span, low, high):
            for index in part.indices():
                inside_of.setdefault(index, []).append(k)
    found = Counter(map(tuple, inside_of.values()))
    found[()] += high - low - len(inside_of)
    return found


def _between(span: Span, low: int, high: int) -> Iterator[Span]:
    """Cut out of a span (of a grid) what lies from ``low`` on and below ``high``."""
    if span.start + span.extent < low or span.start >= high:
        return
    if low <= span.start and span.start + span.extent < high:
        yield span
        return
    (length, step), *others = span.pairs
    rest = tuple(others)
    reach = Span(0, rest).extent
    first = max(0, -((span.start + reach - low) // step))
    last = min(length - 1, (high - 1 - span.start) // step)
    whole_first = max(0, -((span.start - low) // step))
    whole_last = min(length - 1, (high - 1 - reach - span.start) // step)
    if whole_first <= whole_last:
        yield Span(span.start + whole_first * step, ((whole_last - whole_first + 1, step), *rest))
    for i in range(first, last + 1):
        if not whole_first <= i <= whole_last:
            yield from _between(Span(span.start + i * step, rest), low, high)
