"""Changes of many names as few lines: names that differ in their indices only, and change alike, are one line.

Wording only: what a step does is told by its assignments.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from attrs import frozen

from fdsd.data.naming import fold
from fdsd.data.spec import TensorSpec
from fdsd.pipeline.rewrite import UNKNOWN, Assign

__all__ = ["Line", "dropped_lines", "made_lines"]

_UNKNOWN = "unknown"
_Indices = tuple[int, ...]


@frozen
class Line:
    """What becomes of some names that differ in their indices only.

    Attributes:
        kind: "rename", "make" (with operations), "alias" (a further name), "check" (kept, once it is found equal to
            others), "insert" or "drop".
        sources: The names that each target is made of, folded; of a check, those compared; of a drop, those that go.
        target: The names that come, folded; empty for a drop.
        count: How many names come, or go.
        before: Specs of the sources of one target.
        after: The spec of one target.
    """

    kind: str
    sources: tuple[str, ...]
    target: str
    count: int
    before: str
    after: str

    def __str__(self) -> str:
        sources = ", ".join(self.sources[:6])
        if len(self.sources) > 6:
            sources += f" and {len(self.sources) - 6} more"
        if self.kind == "drop":
            return f"- {sources}: {self.before}"
        if self.kind == "check":
            return f"{' = '.join(self.sources)}: {self.before}"
        if self.kind == "insert":
            return f"+ {self.target}: {self.after}"
        names = sources if self.sources == (self.target,) else f"{sources} -> {self.target}"
        tied = " (tied)" if self.kind == "alias" else ""
        specs = self.after if self.before == self.after else f"{self.before} -> {self.after}"
        return f"{names}{tied}" if specs == _UNKNOWN else f"{names}{tied}: {specs}"


def made_lines(assigns: Iterable[Assign], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Line]:
    """Fold assignments, in the order of the first name of each line.

    Args:
        assigns: What is assigned.
        before: The specs of the sources.
        after: The specs of the targets.

    >>> import torch
    >>> specs = {f"{i}.{x}": TensorSpec((2,), torch.int8) for i in range(3) for x in "ab"}
    >>> moves = [Assign(f"{i + 4}.b", (f"{i}.a",)) for i in range(3)]
    >>> print(made_lines(moves, specs, {})[0])
    {0..2}.a -> {4..6}.b: int8[2] -> unknown
    """
    changes = list(assigns)
    return list(_folded(_families(changes, before, after), [assign.target for assign in changes]))


def dropped_lines(dropped: Mapping[str, Any]) -> list[Line]:
    """Fold names that go, with their specs."""
    texts = {name: _spec_text(leaf) for name, leaf in dropped.items()}
    return [
        Line("drop", (found.text,), "", len(found.names), texts[found.names[0]], "")
        for found in fold(texts, texts.__getitem__)
    ]


class _Row(NamedTuple):
    """One assignment that changes something, with the indices in its target and, block by block, its sources."""

    assign: Assign
    indices: _Indices
    blocks: list[list[_Indices]]


class _Family(NamedTuple):
    """What rows have in common that are alike but for indices.

    Attributes:
        kind: The kind of change.
        target: The target without its indices.
        blocks: The sources without their indices, as runs of names with ascending indices: name and count.
        before: The specs of the sources.
        after: The spec of the target.
    """

    kind: str
    target: tuple[str, ...]
    blocks: tuple[tuple[tuple[str, ...], int], ...]
    before: str
    after: str


def _families(
    assigns: Iterable[Assign], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[_Family, list[_Row]]:
    found: dict[_Family, list[_Row]] = {}
    for assign in assigns:
        names: list[tuple[str, ...]] = []
        blocks: list[list[_Indices]] = []
        kind = _kind(assign)
        compared = assign.beside if kind == "check" else ()
        for source in (*assign.sources, *compared):
            name, indices = _parse(source)
            if names and names[-1] == name and blocks[-1][-1] < indices:
                blocks[-1].append(indices)
            else:
                names.append(name)
                blocks.append([indices])
        target, own = _parse(assign.target)
        runs = tuple([(name, len(block)) for name, block in zip(names, blocks, strict=True)])
        texts = [_spec_text(before.get(source, UNKNOWN)) for source in assign.sources]
        made = _spec_text(after.get(assign.target, UNKNOWN))
        family = _Family(kind, target, runs, _joined(texts), made)
        found.setdefault(family, []).append(_Row(assign, own, blocks))
    return found


def _kind(assign: Assign) -> str:
    if assign.alias:
        return "alias"
    if assign.build is None:
        return "rename"
    return "check" if assign.beside else "make" if assign.sources else "insert"


def _joined(texts: list[str]) -> str:
    """Word the specs of the sources of one target: ``3 x float32[2] + float32[1]``."""
    if len(texts) == 1:
        return texts[0]
    runs = [(text, len(list(same))) for text, same in groupby(texts)]
    shown = [text if count == 1 else f"{count} x {text}" for text, count in runs[:4]]
    return " + ".join([*shown, *([f"{len(runs) - 4} more"] if len(runs) > 4 else [])])


def _parse(name: str) -> tuple[tuple[str, ...], _Indices]:
    """Take the indices out of a name.

    >>> _parse("layers.3.w.0")
    (('layers.', '.w.', ''), (3, 0))
    """
    pieces = _INDEX.split(name)
    return tuple(pieces[::2]), tuple(map(int, pieces[1::2]))


_INDEX = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,17})(?![^.])")


def _folded(families: Mapping[_Family, list[_Row]], order: Iterable[str]) -> Iterator[Line]:
    """Fold rows into lines: only rows whose indices go from sources to target in one and the same way."""
    keys: dict[str, Hashable] = {}
    found: dict[str, tuple[_Family, _Row]] = {}
    for number, (family, rows) in enumerate(families.items()):
        for row, apart in zip(rows, _apart(rows), strict=True):
            keys[row.assign.target] = (number, apart)
            found[row.assign.target] = (family, row)
    for folded in fold(order, keys.__getitem__):
        family = found[folded.names[0]][0]
        assigns = [found[name][1].assign for name in folded.names]
        sources = [(*a.sources, *a.beside) if family.kind == "check" else a.sources for a in assigns]
        texts: dict[str, None] = {}
        first = 0
        for _, count in family.blocks:
            names = [name for row in sources for name in row[first : first + count]]
            texts.update(dict.fromkeys([source.text for source in fold(names)]))
            first += count
        yield Line(family.kind, tuple(texts), folded.text, len(sources), family.before, family.after)


def _apart(rows: Sequence[_Row]) -> list[tuple[_Indices, ...]]:
    """Give for each row the source indices that do not follow from the target's: rows unequal there stay apart.

    Indices have to follow in the order in which they stand, so that a line can be read from left to right.
    """
    targets = list(map(list, zip(*[row.indices for row in rows], strict=True)))
    apart: list[tuple[_Indices, ...]] = [()] * len(rows)
    for b, block in enumerate(rows[0].blocks):
        at = 0
        for place in range(len(block[0])):
            every = [tuple([indices[place] for indices in row.blocks[b]]) for row in rows]
            values = [column[0] for column in every if len(column) == 1 or min(column) == max(column)]
            if len(values) == len(rows):
                if len(set(values)) == 1:
                    continue
                follows = (k for k in range(at, len(targets)) if _in_step(values, targets[k]))
                if (found := next(follows, None)) is not None:
                    at = found + 1
                    continue
            apart = [(*before, column) for before, column in zip(apart, every, strict=True)]
    return apart


def _in_step(values: list[int], others: list[int]) -> bool:
    """Tell whether values grow with others along one line.

    >>> _in_step([8, 9, 10], [0, 1, 2]), _in_step([0, 2, 4], [0, 1, 2]), _in_step([1, 0], [0, 1])
    (True, True, False)
    """
    value, other = values[0], others[0]
    if values == others:
        return True
    dv, do = next(((v - value, o - other) for v, o in zip(values, others, strict=True) if o != other), (0, 0))
    return dv * do > 0 and all((v - value) * do == (o - other) * dv for v, o in zip(values, others, strict=True))


def _spec_text(leaf: Any) -> str:
    if isinstance(leaf, TensorSpec):
        return _cached_text(leaf)
    return _UNKNOWN if leaf is UNKNOWN else type(leaf).__name__


@lru_cache(maxsize=4096)
def _cached_text(spec: TensorSpec) -> str:
    return str(spec)
