"""Comparing states: names, shapes, dtypes, then values, streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from attrs import frozen

from fdsd.algebra.apply import defer
from fdsd.algebra.dtypes import as_bytes
from fdsd.algebra.fill import Session
from fdsd.algebra.lazy import Lazy
from fdsd.data.errors import SpecMismatch, plural
from fdsd.data.naming import fold
from fdsd.data.optim import OptimState, ParamGroup
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec, is_exact, spec_of
from fdsd.data.statedict import as_mapping
from fdsd.data.train import TrainState
from fdsd.data.values import is_dict, is_sequence, same_value

__all__ = ["Diff", "ValueDiff", "diff"]

_CHUNK = 4 << 20
"""Elements that are compared at a time."""


@frozen
class ValueDiff:
    """How the values of one tensor differ.

    Attributes:
        unequal: How many elements differ beyond the tolerance.
        numel: How many elements there are.
        max_abs: The largest absolute error; ``nan`` where one side has a NaN and the other has not.
        max_rel: The largest error relative to ``b``.
    """

    unequal: int
    numel: int
    max_abs: float
    max_rel: float

    def __str__(self) -> str:
        return (
            f"{self.unequal} of {plural(self.numel, 'element')} differ, "
            f"max abs {self.max_abs:.3g}, max rel {self.max_rel:.3g}"
        )


@frozen(repr=False)
class Diff:
    """All differences of two states. It has no truth value: ask ``.same``.

    Attributes:
        only_a: Names that only ``a`` has.
        only_b: Names that only ``b`` has.
        specs: For names whose shape, dtype or kind differ, both descriptions.
        values: For names whose values differ, how.
        objects: Names whose entries are no tensors and differ.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    specs: Mapping[str, tuple[str, str]]
    values: Mapping[str, ValueDiff]
    objects: tuple[str, ...]
    compared: int

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_a or self.only_b or self.specs or self.values or self.objects)

    def __bool__(self) -> NoReturn:
        raise TypeError("A Diff has no truth value; ask diff(a, b).same.")

    def __str__(self) -> str:
        if self.same:
            return f"no differences in {plural(self.compared, 'entry').replace('entrys', 'entries')}"
        lines = [f"- {line}" for line in _folded(dict.fromkeys(self.only_a, "only in a"))]
        lines += [f"+ {line}" for line in _folded(dict.fromkeys(self.only_b, "only in b"))]
        lines += [f"! {line}" for line in _folded({n: f"{a} became {b}" for n, (a, b) in self.specs.items()})]
        lines += [f"~ {name}: {value}" for name, value in self.values.items()]
        lines += [f"~ {line}" for line in _folded(dict.fromkeys(self.objects, "the objects differ"))]
        return "\n".join(lines)

    __repr__ = __str__


def _folded(texts: Mapping[str, str]) -> Iterator[str]:
    for part in fold(list(texts), key=texts.__getitem__):
        yield f"{part.text}: {texts[part.names[0]]}"


def diff(a: Any, b: Any, *, rtol: float = 0, atol: float = 0) -> Diff:
    """Compare two states name by name: presence, shapes, dtypes, then values.

    Args:
        a: A state: a mapping, an ``OptimState`` or a ``TrainState``; lazy tensors are read piece by piece.
        b: Another.
        rtol: How large an error may be, relative to the value in ``b``.
        atol: How large it may be absolutely. With neither, values are equal when their bytes are.

    Returns:
        All differences; ``.same`` tells whether there are none.

    >>> d = diff({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 2.5]), "b": torch.ones(1)})
    >>> d.same
    False
    >>> print(d)
    + b: only in b
    ~ w: 1 of 2 elements differ, max abs 0.5, max rel 0.2
    """
    if not isinstance(rtol, int | float) or not isinstance(atol, int | float) or rtol < 0 or atol < 0:
        raise SpecMismatch(f"diff: tolerances are 0 or more, not rtol={rtol!r}, atol={atol!r}.")
    left, right = _flat(a), _flat(b)
    specs: dict[str, tuple[str, str]] = {}
    values: dict[str, ValueDiff] = {}
    objects: list[str] = []
    deferred = defer(left), defer(right)
    for name in left:
        if name not in right:
            continue
        x, y = spec_of(left[name]), spec_of(right[name])
        if x is None and y is None:
            if not _same_objects(left[name], right[name]):
                objects.append(name)
        elif x != y:
            specs[name] = (_text(left[name]), _text(right[name]))
        elif not _is_abstract(left[name], right[name]):
            found = _compare(deferred[0][name], deferred[1][name], rtol, atol)
            if found is not None:
                values[name] = found
    return Diff(
        tuple([name for name in left if name not in right]),
        tuple([name for name in right if name not in left]),
        specs,
        values,
        tuple(objects),
        len(left.keys() | right.keys()),
    )


def _flat(state: Any) -> dict[str, Any]:
    """Give one mapping of names to leaves for any kind of state."""
    if isinstance(state, TrainState):
        optim = {} if state.optim is None else _flat(state.optim)
        extra = {f"extra.{key}": value for key, value in state.extra.items()}
        return {**state.model, **{f"optim.{key}": value for key, value in optim.items()}, **extra}
    if isinstance(state, OptimState):
        columns = {
            f"{slot if isinstance(slot, str) else '.'.join(map(str, slot))}.{fqn}": value
            for slot, column in state.slots.items()
            for fqn, value in column.items()
        }
        return {**columns, "param_groups": state.groups}
    leaves = as_mapping(state)
    if leaves is None:
        raise SpecMismatch(f"diff: it compares states, not {type(state).__name__}. Open files with fdsd.open(path).")
    return dict(leaves)


def _text(leaf: Any) -> str:
    spec = spec_of(leaf)
    return type(leaf).__name__ if spec is None else str(spec)


def _is_abstract(*leaves: Any) -> bool:
    return any(isinstance(leaf, TensorSpec) for leaf in leaves)


def _compare(a: Lazy, b: Lazy, rtol: float, atol: float) -> ValueDiff | None:
    """Compare two tensors of one spec, a region at a time; ``None`` if they are equal."""
    if a is b:
        return None
    session = Session([a, b], budget=None)
    shape, dtype = a.shape, a.dtype
    unequal, max_abs, max_rel = 0, 0.0, 0.0
    with torch.no_grad():
        for region, _ in Region.whole(shape).chunks(_CHUNK):
            x, y = (torch.empty(region.shape, dtype=dtype) for _ in range(2))
            session.fill(session.roots[0], region, x)
            session.fill(session.roots[1], region, y)
            if _same_bytes(x, y):
                continue
            count, worst, relative = _errors(x, y, rtol, atol)
            unequal += count
            max_abs, max_rel = _larger(max_abs, worst), _larger(max_rel, relative)
    return ValueDiff(unequal, a.numel(), max_abs, max_rel) if unequal else None


def _same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(as_bytes(x), as_bytes(y))


def _errors(x: torch.Tensor, y: torch.Tensor, rtol: float, atol: float) -> tuple[int, float, float]:
    """Count the elements that differ beyond the tolerances; give the largest absolute and relative error of them."""
    # by bytes, since not every torch can choose elements of every dtype
    p, q = (as_bytes(t).view(-1, x.dtype.itemsize) for t in (x, y))
    differs = (p != q).any(1)
    try:
        error, magnitude = _distance(p[differs].view(x.dtype).view(-1), q[differs].view(x.dtype).view(-1))
    except RuntimeError:  # elements that torch cannot read as numbers are equal or not, and no more
        return int(differs.sum()), float("nan"), float("nan")
    bound = atol + torch.where(magnitude.isfinite(), rtol * magnitude, 0.0)
    beyond = ~(error <= bound) if rtol or atol else torch.ones_like(error, dtype=torch.bool)
    if not bool(beyond.any()):
        return 0, 0.0, 0.0
    error, magnitude = error[beyond], magnitude[beyond]
    relative = torch.where(error == 0, 0.0, error / magnitude)
    return int(beyond.sum()), float(error.max()), float(relative.max())


def _distance(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the absolute errors of elements, 0 for equal ones and for two NaNs, and the magnitudes of ``q``."""
    if p.dtype in (torch.int64, torch.uint64):  # in two halves, since float64 cannot hold every value
        is_signed = p.dtype is torch.int64
        a, b = p.view(torch.int64), q.view(torch.int64)
        high = [(t >> 32) if is_signed else (t >> 32) & 0xFFFFFFFF for t in (a, b)]
        low = [(t & 0xFFFFFFFF).double() for t in (a, b)]
        error = ((high[0] - high[1]).double() * 2.0**32 + (low[0] - low[1])).abs()
        return error, (high[1].double() * 2.0**32 + low[1]).abs()
    x, y = (t.to(torch.complex128 if t.dtype.is_complex else torch.float64) for t in (p, q))
    error = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
    return error, y.abs()


def _same_objects(a: Any, b: Any) -> bool:
    """Compare entries that are no tensors, item by item; tensors within them by their bytes."""
    if is_exact(a) and is_exact(b):
        return spec_of(a) == spec_of(b) and _same_bytes(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, ParamGroup):
        return (a.fqns, a.named) == (b.fqns, b.named) and _same_objects(dict(a.options), dict(b.options))
    if is_sequence(a) and is_sequence(b):
        return len(a) == len(b) and all(map(_same_objects, a, b))
    if is_dict(a) and is_dict(b):
        return a.keys() == b.keys() and all(_same_objects(item, b[key]) for key, item in a.items())
    return same_value(a, b)


def _larger(a: float, b: float) -> float:
    """The larger of two, where a NaN is larger than anything."""
    return a if a != a or a >= b else b
