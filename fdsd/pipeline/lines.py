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


@frozen
class Line:
    """What becomes of some names that differ in their indices only.

    Attributes:
        kind: "rename", "make" (with operations), "alias" (a further name), "insert" or "drop".
        sources: The names that each target is made of, folded; of a drop, the names that go.
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
    return list(_folded([_row(assign, before, after) for assign in assigns]))


def dropped_lines(dropped: Mapping[str, Any]) -> list[Line]:
    """Fold names that go, with their specs."""
    texts = {name: _spec_text(leaf) for name, leaf in dropped.items()}
    return [
        Line("drop", (found.text,), "", len(found.names), texts[found.names[0]], "")
        for found in fold(texts, texts.__getitem__)
    ]


class _Row(NamedTuple):
    """One assignment that changes something: sources by runs of names that differ in ascending indices only."""

    kind: str
    target: str
    skeleton: str
    indices: tuple[int, ...]
    blocks: list[_Block]
    before: str
    after: str


class _Block(NamedTuple):
    skeleton: str
    names: list[str]
    indices: list[tuple[int, ...]]


def _row(assign: Assign, before: Mapping[str, Any], after: Mapping[str, Any]) -> _Row:
    blocks: list[_Block] = []
    for name in assign.sources:
        skeleton, indices = _parse(name)
        if blocks and blocks[-1].skeleton == skeleton and blocks[-1].indices[-1] < indices:
            blocks[-1].names.append(name)
            blocks[-1].indices.append(indices)
        else:
            blocks.append(_Block(skeleton, [name], [indices]))
    kind = "make" if assign.build is not None else "rename"
    kind = "alias" if assign.alias else kind if assign.sources else "insert"
    texts = [_spec_text(before.get(name, UNKNOWN)) for name in assign.sources]
    made = _spec_text(after.get(assign.target, UNKNOWN))
    return _Row(kind, assign.target, *_parse(assign.target), blocks, _joined(texts), made)


def _joined(texts: list[str]) -> str:
    """Word the specs of the sources of one target: ``3 x float32[2] + float32[1]``."""
    if len(texts) == 1:
        return texts[0]
    runs = [(text, len(list(same))) for text, same in groupby(texts)]
    shown = [text if count == 1 else f"{count} x {text}" for text, count in runs[:4]]
    return " + ".join([*shown, *([f"{len(runs) - 4} more"] if len(runs) > 4 else [])])


def _parse(name: str) -> tuple[str, tuple[int, ...]]:
    """Take the indices out of a name.

    >>> _parse("layers.3.w.0")
    ('layers.#.w.#', (3, 0))
    """
    if not _INDEX.search(name):
        return name, ()
    return _INDEX.sub("#", name), tuple([int(found) for found in _INDEX.findall(name)])


_INDEX = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,17})(?![^.])")


def _folded(rows: Iterable[_Row]) -> Iterator[Line]:
    """Fold rows into lines: only rows whose indices go from sources to target in one and the same way."""
    families: dict[Hashable, list[_Row]] = {}
    for row in rows:
        blocks = tuple([(block.skeleton, len(block.names)) for block in row.blocks])
        families.setdefault((row.kind, row.skeleton, blocks, row.before, row.after), []).append(row)
    keys: dict[str, Hashable] = {}
    by_target: dict[str, _Row] = {}
    for number, family in enumerate(families.values()):
        for row, apart in zip(family, _apart(family), strict=True):
            keys[row.target] = (number, apart)
            by_target[row.target] = row
    for found in fold([row.target for row in by_target.values()], keys.__getitem__):
        members = [by_target[name] for name in found.names]
        first = members[0]
        sources: dict[str, None] = {}
        for b in range(len(first.blocks)):
            names = [name for row in members for name in row.blocks[b].names]
            sources.update(dict.fromkeys([source.text for source in fold(names)]))
        yield Line(first.kind, tuple(sources), found.text, len(members), first.before, first.after)


def _apart(family: Sequence[_Row]) -> list[tuple[Any, ...]]:
    """Give for each row the source indices that do not follow from the target's: rows unequal there stay apart."""
    targets = list(zip(*[row.indices for row in family], strict=True))
    apart: list[list[Any]] = [[] for _ in family]
    for b, block in enumerate(family[0].blocks):
        for place in range(len(block.indices[0])):
            found = [[indices[place] for indices in row.blocks[b].indices] for row in family]
            values = [column[0] for column in found]
            is_single = all(min(column) == max(column) for column in found)
            if not (is_single and (len(set(values)) == 1 or any(_in_step(values, other) for other in targets))):
                for row, column in zip(apart, found, strict=True):
                    row.append(tuple(column))
    return [tuple(row) for row in apart]


def _in_step(values: Sequence[int], others: Sequence[int]) -> bool:
    """Tell whether values grow with others along one line.

    >>> _in_step([8, 9, 10], [0, 1, 2]), _in_step([0, 2, 4], [0, 1, 2]), _in_step([1, 0], [0, 1])
    (True, True, False)
    """
    value, other = values[0], others[0]
    dv, do = next(((v - value, o - other) for v, o in zip(values, others, strict=True) if o != other), (0, 0))
    return dv * do > 0 and all((v - value) * do == (o - other) * dv for v, o in zip(values, others, strict=True))


def _spec_text(leaf: Any) -> str:
    if isinstance(leaf, TensorSpec):
        return _cached_text(leaf)
    return _UNKNOWN if leaf is UNKNOWN else type(leaf).__name__


@lru_cache(maxsize=4096)
def _cached_text(spec: TensorSpec) -> str:
    return str(spec)
