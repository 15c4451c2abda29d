"""Random graphs of operations, grown eagerly and lazily side by side, from a seed.

Each step applies one operation to tensors made before, and keeps the result beside them, so that nodes come to be
used several times. Bounds on the values are carried along: a cast of a number that the target cannot hold is the
one thing that torch itself does differently by memory layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from attrs import define, field, frozen

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.lazy import Lazy, Op
from fdsd.algebra.ops import (
    AddScalar,
    Average,
    Call,
    Cast,
    Concat,
    Constant,
    Distinct,
    IndexSelect,
    Lerp,
    MergeDims,
    Permute,
    Same,
    Select,
    Slice,
    SplitDim,
    Stack,
)
from fdsd.data.spec import TensorSpec
from tests.helpers.functions import FUNCTIONS, call_of
from tests.helpers.regions import random_shape
from tests.helpers.tensors import (
    EIGHT_BIT_FLOATS,
    MOVABLE,
    NUMERIC,
    any_layout,
    as_bytes,
    is_signed,
    numbers,
    patterns,
)

__all__ = ["Chain", "Grown", "can_cast", "grow", "random_structural"]

_MOST = 4096
_E8M0 = getattr(torch, "float8_e8m0fnu", None)


@frozen
class Grown:
    """One tensor, both ways; ``most`` bounds the size of its numbers, ``negative`` tells if some may be below 0."""

    eager: torch.Tensor
    lazy: Lazy
    most: float
    negative: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.eager.shape)


@define
class Chain:
    """A graph that grew from one seed.

    Attributes:
        seed: What it grew from.
        pool: All tensors, the origins first, in the order in which they were made.
        steps: What was done, for messages.
        sources: The origins' tensors with their bytes and version counters before anything was done.
    """

    seed: object
    pool: list[Grown] = field(factory=list)
    steps: list[str] = field(factory=list)
    sources: list[tuple[torch.Tensor, torch.Tensor, int]] = field(factory=list)

    def inputs_changed(self) -> bool:
        """Tell whether an origin's bytes or version counter differ from those before."""
        return any(x._version != version or not torch.equal(as_bytes(x), before) for x, before, version in self.sources)

    def __str__(self) -> str:
        return f"seed {self.seed!r}:\n  " + "\n  ".join(self.steps)


def can_cast(x: Grown, dtype: torch.dtype) -> bool:
    """Tell whether a cast is defined for all the numbers that a tensor may hold."""
    if x.eager.dtype is dtype:
        return True
    if x.eager.dtype.is_complex and not dtype.is_complex:
        return False
    if x.negative and not is_signed(dtype) and dtype is not torch.bool:
        return False
    if dtype is torch.bool or dtype.is_complex:
        return True
    limit = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    return x.most * 1.3 < limit


def _after_cast(x: Grown, dtype: torch.dtype) -> float:
    if dtype is torch.bool:
        return 1.0
    if dtype is _E8M0:
        return 2.0 ** math.ceil(math.log2(max(x.most, 1.0)) + 1)
    return x.most * 1.25 if dtype in EIGHT_BIT_FLOATS else x.most * 1.01


def _origin(rng: Random, dtype: torch.dtype, shape: tuple[int, ...], values: str) -> Grown:
    seed = rng.randrange(1 << 30)
    if values == "patterns":
        tensor, most, negative = patterns(shape, dtype, seed), math.inf, True
    else:
        negative = rng.random() < 0.3 and is_signed(dtype)
        tensor, most = numbers(shape, dtype, seed, signed=negative), 101.0
    laid = any_layout(rng, tensor)
    negative = negative or laid.is_neg() or dtype.is_complex
    if rng.random() < 0.1 and (dtype.is_floating_point or dtype.is_complex) and not laid.is_neg():
        laid = torch.nn.Parameter(laid)
    return Grown(laid, defer_leaf(laid), most, negative)


# -- drawing operations ----------------------------------------------------------------------------------------


def random_structural(rng: Random, shape: tuple[int, ...]) -> Op | None:
    """Draw an operation that moves the elements of one tensor; ``None`` if the one drawn does not fit."""
    ndim = len(shape)
    kind = rng.choice(("slice", "select", "permute", "split", "split", "merge", "merge", "index", "distinct"))
    if kind == "permute":
        return Permute(tuple(rng.sample(range(ndim), ndim)))
    if kind == "merge":
        count = rng.randint(0, min(3, ndim))
        return MergeDims(rng.randint(0, ndim - count), count)
    if kind == "distinct":
        return Distinct(rng.choice("ab"))
    if not ndim:
        return None
    dim = rng.randrange(ndim)
    size = shape[dim]
    if kind == "slice":
        start, step = rng.randint(0, size), rng.randint(1, 3)
        room = 0 if start >= size else (size - 1 - start) // step + 1
        return Slice(dim, start, rng.randint(0 if rng.random() < 0.1 else min(1, room), room), step)
    if kind == "split":
        return SplitDim(dim, _sizes(rng, size))
    if not size:
        return None
    if kind == "select":
        return Select(dim, rng.randrange(size))
    return IndexSelect(dim, _indices(rng, size))


def _sizes(rng: Random, size: int) -> tuple[int, ...]:
    if not size:
        return rng.choice(((0, 3), (2, 0), (0,), (1, 0, 2)))
    if size == 1 and rng.random() < 0.5:
        return ()
    sizes: list[int] = []
    for _ in range(rng.randint(0, 2)):
        sizes.append(rng.choice([f for f in range(1, size + 1) if size % f == 0]))
        size //= sizes[-1]
    return (*sizes, size)


def _indices(rng: Random, size: int) -> tuple[int, ...]:
    kind = rng.random()
    if kind < 0.3:
        return tuple(rng.sample(range(size), size))
    if kind < 0.4:  # more runs than are read one by one
        return tuple(rng.randrange(size) for _ in range(rng.randint(60, 90)))
    if kind < 0.6:
        return tuple(range(rng.randrange(size), size, rng.randint(1, 3)))
    return tuple(rng.randrange(size) for _ in range(rng.randint(0, 2 * size)))


def _join(rng: Random, pool: list[Grown]) -> tuple[Op, list[Grown]] | None:
    first = rng.choice(pool)
    alike = [x for x in pool if x.eager.dtype == first.eager.dtype and x.eager.ndim == first.eager.ndim]
    if first.shape and rng.random() < 0.6:
        dim = rng.randrange(len(first.shape))
        rest = first.shape[:dim] + first.shape[dim + 1 :]
        fitting = [x for x in alike if x.shape[:dim] + x.shape[dim + 1 :] == rest]
        op: Op = Concat(dim)
    else:
        fitting = [x for x in alike if x.shape == first.shape]
        op = Stack(rng.randint(0, len(first.shape)))
    inputs = [rng.choice(fitting) for _ in range(rng.randint(1, 3))]
    return op, inputs


def _compute(rng: Random, x: Grown, pool: list[Grown]) -> tuple[Op, list[Grown]] | None:
    dtype = x.eager.dtype
    alike = [y for y in pool if y.shape == x.shape and y.eager.dtype == dtype]
    whole = not dtype.is_floating_point and not dtype.is_complex
    kind = rng.choice(("add", "add", "average", "lerp"))
    if kind == "add":
        if dtype is torch.bool or (whole and (not is_signed(dtype) and dtype is not torch.uint8)):
            return None
        if whole and x.most + 3 > torch.iinfo(dtype).max:
            return None
        return AddScalar(rng.choice((1, 2, 3.0)) if whole else rng.choice((0.5, 1, 2.75, 0.1))), [x]
    if whole:
        return None
    if kind == "lerp":
        return Lerp(rng.choice((0.0, 1.0, 0.25, 0.3, 0.75))), [x, rng.choice(alike)]
    count = rng.randint(1, 3)
    weights = tuple(rng.choice((0.5, 0.3, 0.1)) for _ in range(count))
    return Average(weights), [x, *[rng.choice(alike) for _ in range(count - 1)]]


def _constant(rng: Random, pool: list[Grown]) -> Grown:
    like = rng.choice(pool)
    dtype = like.eager.dtype
    plain = dtype in NUMERIC and dtype is not _E8M0
    spec = TensorSpec(like.shape, dtype)
    op = Constant(spec, rng.choice((0, 1, 5, 2.7)) if plain and (dtype.is_floating_point or dtype.is_complex) else 0)
    return Grown(op.eager(), Lazy(op), 6.0, False)


# -- growing ---------------------------------------------------------------------------------------------------


def grow(seed: object, *, values: str = "numbers", length: int = 7, calls: bool = True) -> Chain:
    """Grow a graph.

    Args:
        seed: Where the random numbers start.
        values: "numbers" of the dtypes that can be cast and added, or "patterns": any bits of any dtype, only moved.
        length: The most operations.
        calls: Whether users' functions take part.
    """
    rng = Random(repr(seed))
    chain = Chain(seed)
    dtypes = [rng.choice(MOVABLE if values == "patterns" else NUMERIC)]
    shape = random_shape(rng)
    for _ in range(rng.randint(1, 3)):
        shape = shape if rng.random() < 0.7 else random_shape(rng)
        made = _origin(rng, dtypes[0], shape, values)
        chain.pool.append(made)
        chain.sources.append((made.eager, as_bytes(made.eager), made.eager._version))
        chain.steps.append(f"x{len(chain.pool) - 1} = {dtypes[0]}{made.shape} strides {made.eager.stride()}")
    for _ in range(rng.randint(1, length)):
        _step(rng, chain, values, calls)
    return chain


def _step(rng: Random, chain: Chain, values: str, calls: bool) -> None:
    pool = chain.pool
    x = pool[-1] if rng.random() < 0.7 else rng.choice(pool)
    kind = rng.random()
    drawn: tuple[Op, list[Grown]] | None
    if kind < 0.05:
        pool.append(_constant(rng, pool))
        chain.steps.append(f"x{len(pool) - 1} = {pool[-1].lazy.op}")
        return
    if kind < 0.2:
        drawn = _join(rng, pool)
    elif kind < 0.25:
        drawn = Same(("a", "b"), "same"), [x, x]
    elif kind < 0.35:
        drawn = _call(rng, x) if calls else None
    elif kind < 0.55 and values == "numbers":
        drawn = _cast(rng, x) if rng.random() < 0.5 else _compute(rng, x, pool)
    else:
        op = random_structural(rng, x.shape)
        drawn = None if op is None else (op, [x])
    if drawn is not None:
        _take(chain, *drawn)


def _cast(rng: Random, x: Grown) -> tuple[Op, list[Grown]] | None:
    dtype = rng.choice(NUMERIC)
    return (Cast(dtype), [x]) if can_cast(x, dtype) else None


def _call(rng: Random, x: Grown) -> tuple[Op, list[Grown]] | None:
    fn: Callable[..., object] = rng.choice(FUNCTIONS)
    words = x.eager.dtype.itemsize < 16  # complex128 has no integers of its size
    if not words or (fn.__name__ == "spread" and not x.eager.numel()):
        return None
    return call_of(fn, x.eager), [x]


def _take(chain: Chain, op: Op, inputs: list[Grown]) -> None:
    """Apply an operation both ways and keep its results, unless they are large."""
    made: Any = op.infer(*[x.lazy.spec for x in inputs])
    specs = made if isinstance(made, tuple) else (made,)
    if sum(spec.numel for spec in specs) > _MOST:
        return
    names = ", ".join(f"x{next(i for i, y in enumerate(chain.pool) if y is x)}" for x in inputs)
    eager = apply(op, *[x.eager for x in inputs])
    lazy = apply(op, *[x.lazy for x in inputs])
    most, negative = max(x.most for x in inputs), any(x.negative for x in inputs)
    if isinstance(op, Cast):
        most = _after_cast(inputs[0], op.dtype)
        negative = negative and op.dtype is not torch.bool
    elif isinstance(op, AddScalar):
        most = most * 1.25 + 4
    elif isinstance(op, Average | Lerp):
        most *= 2
    elif isinstance(op, Call) and len(specs) > 1:
        most = max(most, 8.0)
    for e, z in zip(
        eager if isinstance(eager, tuple) else (eager,), lazy if isinstance(lazy, tuple) else (lazy,), strict=True
    ):
        chain.pool.append(Grown(e, z, most, negative))
    chain.steps.append(f"x{len(chain.pool) - len(specs)}.. = {op} of {names}")
