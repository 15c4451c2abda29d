"""Law 4, Region: filling any region of any expression equals filling all and slicing, byte for byte.

The memory may be contiguous, permuted or have gaps, and of another dtype; the budget may be of any size; what lies
around the memory stays as it was.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.fill import Session
from fdsd.data.region import Region
from tests.helpers.chains import Chain, Grown, can_cast, grow, random_structural
from tests.helpers.regions import memory, random_region, random_shape, slice_by
from tests.helpers.running import floor
from tests.helpers.tensors import LAYOUTS, MOVABLE, NUMERIC, has_layout, lay_out, name_of, patterns, same_bytes

CHAINS = 4000
"""How many graphs each of the long tests grows."""


def check_fill(session: Session, root: object, x: Grown, rng: Random, dtype: torch.dtype, what: object) -> None:
    """Fill one region into memory of ``dtype``, and compare with slicing what was computed eagerly."""
    region = random_region(rng, x.shape)
    place = memory(rng, region.shape, dtype)
    session.fill(root, region, place.out)  # type: ignore[arg-type]
    want = slice_by(x.eager, region)
    told = f"{what}\n{region}\ninto {dtype} strides {place.out.stride()} within {session.budget}"
    assert same_bytes(place.out, want if want.dtype == dtype else want.to(dtype)), told
    assert not place.spilled(), told


def check_chain(chain: Chain, rng: Random, *, other_dtypes: bool) -> None:
    """Fill regions of several results of one graph in one run."""
    picked = [chain.pool[-1], *[rng.choice(chain.pool) for _ in range(2)]]
    budget = rng.choice((None, None, 1, 100, 1000, 20_000))
    session = Session([x.lazy for x in picked], budget=budget, strict=False)
    for position, (x, root) in enumerate(zip(picked, session.roots, strict=True)):
        dtype = x.eager.dtype
        if other_dtypes and can_cast(x, other := rng.choice(NUMERIC)):
            dtype = other
        check_fill(session, root, x, rng, dtype, chain)
        check_fill(session, root, x, rng, x.eager.dtype, chain)
        session.finish(position)
    assert session.in_use == 0, str(chain)
    assert not chain.inputs_changed(), str(chain)


@pytest.mark.parametrize("part", range(4))
def test_numbers(part: int) -> None:
    """Graphs of all operations: each rounding happens exactly where the graph says, whatever memory is filled."""
    for n in range(CHAINS // 4):
        seed = ("numbers", part, n)
        rng = Random(repr((seed, "fill")))
        with floor(rng.choice((1, 64, 1 << 16))):
            check_chain(grow(seed), rng, other_dtypes=True)


@pytest.mark.parametrize("part", range(2))
def test_patterns(part: int) -> None:
    """Graphs that only move elements, of every dtype, NaNs and sub-byte dtypes included."""
    for n in range(CHAINS // 2):
        seed = ("patterns", part, n)
        rng = Random(repr((seed, "fill")))
        with floor(rng.choice((1, 64, 1 << 16))):
            check_chain(grow(seed, values="patterns"), rng, other_dtypes=False)


@given(st.randoms(use_true_random=False))
def test_one_operation(rng: Random) -> None:
    """The same for one structural operation, where hypothesis can show the smallest case."""
    shape = random_shape(rng)
    op = random_structural(rng, shape)
    if op is None:
        return
    source = patterns(shape, torch.int32)
    x = Grown(apply(op, source), apply(op, defer_leaf(source)), 0.0, False)
    session = Session([x.lazy])
    check_fill(session, session.roots[0], x, rng, torch.int32, op)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", MOVABLE, ids=name_of)
def test_origin(dtype: torch.dtype, kind: str) -> None:
    """A tensor in memory, of every dtype and layout."""
    rng = Random(f"{dtype} {kind}")
    for shape in ((), (3,), (4, 5), (2, 3, 4), (0, 3)):
        if not has_layout(kind, shape, dtype):
            continue
        laid = lay_out(patterns(shape, dtype), kind)
        x = Grown(laid, defer_leaf(laid), 0.0, False)
        session = Session([x.lazy])
        for _ in range(5):
            check_fill(session, session.roots[0], x, rng, dtype, (shape, dtype, kind))


@pytest.mark.parametrize("dtype", NUMERIC, ids=name_of)
def test_a_structural_chain_casts_once_at_the_source(dtype: torch.dtype) -> None:
    """Memory of another dtype takes what one cast of the sliced result gives."""
    n = 0
    for seed in range(40):
        chain = grow((name_of(dtype), seed), values="numbers", calls=False)
        x = chain.pool[-1]
        if not can_cast(x, dtype):
            continue
        session = Session([x.lazy])
        out = torch.empty(x.shape, dtype=dtype)
        session.fill(session.roots[0], Region.whole(x.shape), out)
        want = torch.empty(x.shape, dtype=dtype)
        copy_elements(x.eager, want)
        assert same_bytes(out, want), str(chain)
        n += 1
    assert n >= 5
