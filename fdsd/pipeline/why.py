"""Where one element of a result comes from: the source elements, and what happened to them on the way.

The walk is ``trail``, shared with coverage; here its ends are put into words. Nothing is read.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from attrs import field, frozen

from fdsd.algebra.apply import defer_leaf
from fdsd.algebra.lazy import Lazy, Op
from fdsd.algebra.ops import Call, Cast, Constant, Origin, Same
from fdsd.algebra.ops.call import function_name
from fdsd.data.errors import SpecMismatch, UnknownName, Unsupported, plural
from fdsd.data.naming import nearest
from fdsd.data.region import Region, Span
from fdsd.data.spec import dtype_name
from fdsd.data.statedict import StateDict
from fdsd.pipeline.coverage import End, Way, lazily, mentioned, trail
from fdsd.pipeline.grids import Grid, grids, spread
from fdsd.pipeline.step import Step

__all__ = ["Element", "Made", "Part", "Why", "why"]


@frozen
class Element:
    """One element of a source tensor, and what it passed through, from the source on.

    >>> str(Element("w", (5, 2), ("cast to bfloat16",)))
    'w[5, 2] through cast to bfloat16'
    """

    fqn: str
    index: tuple[int, ...]
    through: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{_element(self.fqn, self.index)}{_through(self.through)}"


@frozen
class Part:
    """Many elements of a source tensor: a function took them all.

    Attributes:
        fqn: The name of the tensor.
        numel: How many of its elements are meant.
        total: How many elements it has.
        regions: Which ones.
        through: What they passed through, from the source on.
    """

    fqn: str
    numel: int
    total: int
    regions: tuple[Region, ...] = field(repr=False)
    through: tuple[str, ...] = ()

    @property
    def is_all(self) -> bool:
        """Whether the whole tensor is meant."""
        return self.numel == self.total

    def __str__(self) -> str:
        what = "all" if self.is_all else f"{self.numel:,} of {plural(self.total, 'element')}"
        return f"{what} of {self.fqn!r}{_through(self.through)}"


@frozen
class Made:
    """A value that comes from no source: a constant, or the result of a function without inputs.

    Attributes:
        value: The constant, or the name of the function.
        by: The verb of the step that made it.
        through: What it passed through.
    """

    value: Any
    by: str
    through: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.value}, made by {self.by}{_through(self.through)}"


Origins = tuple[Element | Part | Made, ...]


@frozen(repr=False)
class Why:
    """What one element of a result is made of.

    Attributes:
        fqn: The name of the tensor in the result.
        index: The place of the element, from the start of each dim.
        sources: What it is made of, in the order in which it is put together.
    """

    fqn: str
    index: tuple[int, ...]
    sources: Origins

    @property
    def through(self) -> tuple[str, ...]:
        """All that happened on the way from any source, each once."""
        return tuple(dict.fromkeys([word for source in self.sources for word in source.through]))

    def __str__(self) -> str:
        place = _element(self.fqn, self.index)
        if len(self.sources) == 1:
            return f"{place} is {self.sources[0]}"
        lines = [f"  {source}" for source in self.sources[:10]]
        if rest := len(self.sources) - len(lines):
            lines.append(f"  and {rest:,} more")
        return "\n".join([f"{place} is made of {plural(len(self.sources), 'source')}:", *lines])

    __repr__ = __str__


def _element(fqn: str, index: Sequence[int]) -> str:
    return f"{fqn}[{', '.join(map(str, index))}]" if index else fqn


def _through(words: Sequence[str]) -> str:
    return f" through {', '.join(words)}" if words else ""


def why(steps: Iterable[Step], source: Any, fqn: str, index: int | Iterable[int] = ()) -> Why:
    """Name the source elements that one element of the result is made of.

    Args:
        steps: The steps of a pipeline.
        source: The state to rewrite, or its specs; of a ``TrainState``, the model.
        fqn: A name of the result.
        index: One integer for each dim of the tensor; negative ones count from the end.

    Returns:
        The elements, by the names of ``source``; tied tensors under their first name.

    Raises:
        UnknownName: The result has no such name.
        Unsupported: What has that name is no tensor.
        SpecMismatch: The index does not fit the shape.

    >>> import torch
    >>> why((), {"w": torch.ones(2, 3)}, "w", (1, -1))
    w[1, 2] is w[1, 2]
    """
    every = tuple(steps)
    states = lazily(every, source)
    leaf = _leaf(states[0], states[-1], fqn)
    place = _place(fqn, index, leaf.shape)
    begins = {id(given.op): name for name, given in reversed(states[0].items()) if isinstance(given, Lazy)}
    found: dict[Hashable, list[End]] = {}
    for number, end in enumerate(trail(leaf, Region(tuple([Span(i) for i in place])))):
        is_part = id(end.op) in begins and end.region.shape
        found.setdefault((id(end.op), _words(end.way)) if is_part else number, []).append(end)
    sources: list[Element | Part | Made] = []
    for ends in found.values():
        end = ends[0]
        if (name := begins.get(id(end.op))) is None:
            verb = _maker(every, states, end.op)
            sources.append(Made(_value(end.op), verb, _words(end.way)))
        elif end.region.shape:
            sources.append(_part(name, end, tuple([one.region for one in ends])))
        else:
            spans = end.region.spans
            sources.append(Element(name, tuple([span.start for span in spans]), _words(end.way)))
    return Why(fqn, place, tuple(sources))


def _leaf(given: StateDict[Any], result: StateDict[Any], fqn: str) -> Lazy:
    if fqn not in result:
        close = nearest(fqn, list(result))
        hint = f"; the nearest name is {close[0]!r}" if close else ""
        was = " It is a name of the source; ask by the name that the result has for it." if fqn in given else ""
        raise UnknownName(f"why: the result of {plural(len(result), 'name')} has no {fqn!r}{hint}.{was}")
    leaf = defer_leaf(result[fqn])
    if not isinstance(leaf, Lazy):
        raise Unsupported(f"why: {fqn!r} is of class {type(leaf).__name__}, not a tensor, and has no elements.")
    return leaf


def _place(fqn: str, index: int | Iterable[int], shape: tuple[int, ...]) -> tuple[int, ...]:
    given = index if isinstance(index, Iterable) else (index,)
    try:
        numbers = [operator.index(i) for i in given]
    except TypeError:
        raise SpecMismatch(f"why: {index!r} is no index. Give one whole number for each dim of {fqn!r}.") from None
    if len(numbers) != len(shape):
        raise SpecMismatch(
            f"why: {fqn!r} has shape {shape}, and {tuple(numbers)} does not name one element of it. Give "
            f"{plural(len(shape), 'number')}, one for each dim."
        )
    if any(not -size <= i < size for i, size in zip(numbers, shape, strict=True)):
        raise SpecMismatch(f"why: {tuple(numbers)} lies outside {fqn!r}, which has shape {shape}.")
    return tuple([i % size for i, size in zip(numbers, shape, strict=True)])


def _part(fqn: str, end: End, regions: tuple[Region, ...]) -> Part:
    assert isinstance(end.op, Origin)
    parts: Counter[Grid] = Counter()
    for region in regions:
        parts.update(dict(grids(region)))
    total = end.op.spec.numel
    return Part(fqn, total - spread(parts, end.op.spec.shape)[0], total, regions, _words(end.way))


def _maker(steps: Sequence[Step], states: Sequence[StateDict[Any]], op: Op) -> str:
    """Name the step that put an operation without inputs there."""
    for step, state in zip(steps, states[1:], strict=True):
        roots = [leaf for leaf in state.values() if isinstance(leaf, Lazy)]
        if any(one is op for one in mentioned(roots)):
            return step.verb
    return "the pipeline"


def _value(op: Op) -> str:
    if isinstance(op, Constant):
        return str(op.value)
    return f"a value of {_word(op)}" if isinstance(op, Call) else "a value"


def _words(way: Way | None) -> tuple[str, ...]:
    words: list[str] = []
    while way is not None:
        words.append(_word(way.op))
        way = way.after
    return tuple(words)


def _word(op: Op) -> str:
    """Name an operation as a user would.

    >>> import torch
    >>> _word(Cast(torch.bfloat16)), _word(Call(len))
    ('cast to bfloat16', 'len')
    """
    if isinstance(op, Cast):
        return f"cast to {dtype_name(op.dtype)}"
    if isinstance(op, Same):
        return f"comparison by {op.reason}"
    if isinstance(op, Call):
        fn: Any = op.fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        return function_name(fn)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(op).__name__).lower()
