"""Names as people read them: the nearest name for a suggestion, and long lists of names folded.

Nothing here decides what a rewrite does; it only words messages and listings.
"""

from __future__ import annotations

import difflib
import heapq
import re
from collections.abc import Callable, Hashable, Iterable, Sequence

from attrs import frozen

from fdsd.data._parse import Hole
from fdsd.data.errors import BadPattern
from fdsd.data.template import Template, escape

__all__ = ["Fold", "fold", "nearest", "nearest_template"]

_POOL = 120
"""How many names are compared letter by letter."""

_CLOSE = 0.5
"""How alike, from 0 to 1, a name must be to be suggested."""

_MAX_INDICES = 8
"""Integer segments after this many are left as they are."""

_CANONICAL = re.compile(r"0|[1-9][0-9]{0,17}")


def nearest(name: str, names: Sequence[str], n: int = 1) -> list[str]:
    """Give the ``n`` names most like this one, most alike first; fewer, or none, where few are alike.

    What is no text, as a mapping may have it, is like no name.

    >>> nearest("layers.0.wieght", ["layers.0.bias", "layers.0.weight", "norm.weight"])
    ['layers.0.weight']
    """
    given: object = name
    if not isinstance(given, str):
        return []
    pool = _alike(name, [other for other in names if _is_text(other)])
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(name)
    scored: list[tuple[float, int, str]] = []
    for at, other in enumerate(dict.fromkeys(pool)):
        matcher.set_seq1(other)
        if matcher.real_quick_ratio() >= _CLOSE and matcher.quick_ratio() >= _CLOSE:
            score = matcher.ratio()
            if score >= _CLOSE:
                scored.append((-score, at, other))
    return [other for _, _, other in heapq.nsmallest(n, scored)]


def _is_text(name: object) -> bool:
    return isinstance(name, str)


def _alike(name: str, names: Sequence[str]) -> list[str]:
    """Give the names that share most quarters of this one: cheap, as it looks at every name."""
    if len(names) <= _POOL:
        return list(names)
    size = max(1, -(-len(name) // 4))
    a, b, c, d = (name[at : at + size] or "\0" for at in range(0, 4 * size, size))
    shared = [(a in other) + (b in other) + (c in other) + (d in other) for other in names]
    pool: list[str] = []
    for count in range(max(shared), -1, -1):
        level = [other for other, have in zip(names, shared, strict=True) if have == count]
        pool += _narrow(name, level, _POOL - len(pool))
        if len(pool) >= 8:
            break
    return pool


def _narrow(name: str, others: list[str], room: int) -> list[str]:
    """Keep those with the same integer segments, if there are any, and then those of like length."""
    if len(others) <= room:
        return others
    for segment in name.split("."):
        if segment.isdecimal():
            others = [other for other in others if f".{segment}." in other] or others
    return heapq.nsmallest(room, others, key=lambda other: abs(len(other) - len(name)))


def nearest_template(template: Template, names: Sequence[str]) -> tuple[Template | None, str | None]:
    """Give the pattern that would match, with the name nearest to the given one.

    Segments that fit are kept as they are written, the others are taken from the name.

    >>> nearest_template(Template("model.layers.{i}.wq"), ["layers.0.wq", "layers.1.wq"])
    (Template('layers.{i}.wq'), 'layers.0.wq')

    Returns:
        The pattern (None where none with the same holes comes out) and the name (None where none is alike).
    """
    sample = "".join(piece if isinstance(piece, str) else _sample(template, piece) for piece in template.pieces)
    close = nearest(sample, names)
    if not close:
        return None, None
    text = ".".join(_align(_segments(template), close[0].split(".")))
    try:
        found = Template(text, True)
    except BadPattern:
        return None, close[0]
    fits = set(found.holes) == set(template.holes) and found.match(close[0]) is not None
    return (found if fits else None), close[0]


def _sample(template: Template, hole: Hole) -> str:
    domain = None if hole.is_unnamed else template.matcher.domains[hole.name]
    if domain is None or not domain.integer:
        return domain.words[0] if domain is not None and domain.words else "0"
    return hole.encode(str(domain.lo))


def _segments(template: Template) -> list[str]:
    """Cut a pattern at the dots of its literals; each part is a pattern's text again."""
    texts = [""]
    for piece in template.pieces:
        if isinstance(piece, Hole):
            texts[-1] += piece.text
            continue
        first, *rest = piece.split(".")
        texts[-1] += escape(first)
        texts += [escape(segment) for segment in rest]
    return texts


def _align(wanted: list[str], given: list[str]) -> list[str]:
    """Give the name's segments, as the pattern writes those that fit: the alignment with fewest changes."""
    costs = [[(0.0, [""])] * (len(given) + 1) for _ in range(len(wanted) + 1)]
    for row in range(len(wanted) + 1):
        for column in range(len(given) + 1):
            if not row and not column:
                costs[0][0] = 0.0, []
                continue
            options: list[tuple[float, list[str]]] = []  # the first of the cheapest is taken
            if row and column:
                cost, texts = costs[row - 1][column - 1]
                change = _change(wanted[row - 1], given[column - 1])
                kept = wanted[row - 1] if change == 0 else escape(given[column - 1])
                options.append((cost + change, [*texts, kept]))
            if row:
                cost, texts = costs[row - 1][column]
                options.append((cost + 1, texts))
            if column:
                cost, texts = costs[row][column - 1]
                is_more = row > 0 and wanted[row - 1].endswith("...}") and texts[-1:] == [wanted[row - 1]]
                more = texts if is_more else [*texts, escape(given[column - 1])]
                options.append((cost if is_more else cost + 1, more))
            costs[row][column] = min(options, key=lambda option: option[0])
    return costs[-1][-1][1]


def _change(wanted: str, given: str) -> float:
    if not wanted or not given:
        return 0.0 if wanted == given else 1.0
    if Template(wanted, True).match(given) is not None:
        return 0.0
    return 1.0 - 0.5 * difflib.SequenceMatcher(None, wanted, given, autojunk=False).ratio()


@frozen
class Fold:
    """Names that differ in their indices only: the text that stands for all, and the names in order."""

    text: str
    names: tuple[str, ...]


def fold(names: Iterable[str], key: Callable[[str], Hashable] | None = None) -> list[Fold]:
    """Fold the integer segments of names: ``layers.{0..31}.wq``, ``layers.{0,2,5}.wq``.

    Several indices fold only where each value of one goes with each value of the others.

    >>> [f.text for f in fold(["a.0.w", "a.0.b", "a.1.w", "a.1.b", "norm"])]
    ['a.{0..1}.w', 'a.{0..1}.b', 'norm']
    >>> [f.text for f in fold(["a.0.w", "a.1.w"], key=lambda name: name == "a.0.w")]
    ['a.0.w', 'a.1.w']

    Args:
        names: the names, each once.
        key: only names for which it gives equal values fold together.

    Returns:
        The folds in the order of their first names; each name is in exactly one. Literal ``{``, ``}`` and
        ``?`` are doubled, as in patterns.

    Law: writing out every fold's text gives the names, each once.
    """
    families: dict[Hashable, list[tuple[tuple[int, ...], int]]] = {}
    every = list(dict.fromkeys(names))
    for at, name in enumerate(every):
        segments = name.split(".")
        places = [k for k, s in enumerate(segments) if s[:1].isdigit() and _CANONICAL.fullmatch(s)][:_MAX_INDICES]
        indices = tuple(int(segments[place]) for place in places)
        for place in places:
            segments[place] = ""
        shape = (tuple(segments), tuple(places), key(name) if key else None)
        families.setdefault(shape, []).append((indices, at))
    folds: list[tuple[int, Fold]] = []
    for members in families.values():
        for axes, rows in _boxes(dict(members)):
            folds.append((rows[0], Fold(_text(every[rows[0]], axes), tuple(every[row] for row in rows))))
    return [found for _, found in sorted(folds, key=lambda pair: pair[0])]


_Box = tuple[tuple[tuple[int, ...], ...], list[int]]


def _boxes(rows: dict[tuple[int, ...], int]) -> list[_Box]:
    """Cut a set of index tuples into products, first index first; each with its rows in order."""
    axes = tuple(tuple(dict.fromkeys(axis)) for axis in zip(*rows, strict=True))
    size = 1
    for axis in axes:
        size *= len(axis)
    if size == len(rows):
        return [(axes, sorted(rows.values()))]
    by_first: dict[int, dict[tuple[int, ...], int]] = {}
    for (first, *rest), row in rows.items():
        by_first.setdefault(first, {})[tuple(rest)] = row
    alike: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first, below in by_first.items():
        alike.setdefault(frozenset(below), []).append(first)
    boxes: list[_Box] = []
    for firsts in alike.values():
        for below_axes, _ in _boxes(by_first[firsts[0]]):
            inner = [()] if not below_axes else _product(below_axes)
            found = sorted(by_first[first][rest] for first in firsts for rest in inner)
            boxes.append(((tuple(firsts), *below_axes), found))
    return boxes


def _product(axes: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = [()]
    for axis in axes:
        rows = [(*row, value) for row in rows for value in axis]
    return rows


def _text(name: str, axes: tuple[tuple[int, ...], ...]) -> str:
    segments = name.split(".")
    left = list(axes)
    for at, segment in enumerate(segments):
        if left and _CANONICAL.fullmatch(segment):
            values = sorted(left.pop(0))
            segments[at] = segment if len(values) == 1 else "{" + _runs(values) + "}"
        else:
            segments[at] = escape(segment)
    return ".".join(segments)


def _runs(values: list[int]) -> str:
    """Write sorted integers, runs as ``lo..hi``.

    >>> _runs([0, 1, 2, 3]), _runs([0, 1]), _runs([0, 2, 5]), _runs([0, 1, 2, 7, 8])
    ('0..3', '0..1', '0,2,5', '0..2,7,8')
    """
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    short = 1 if len(runs) == 1 else 2
    texts = (f"{r[0]}..{r[-1]}" if len(r) > short else ",".join(map(str, r)) for r in runs)
    return ",".join(texts)
