"""Casts: which ones lose nothing, found by trying all values; and that each rounds where it stands, once."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.dtypes import check_cast, copy_elements, is_widening
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.fill import Session
from fdsd.algebra.ops import Cast, Permute
from fdsd.data.errors import Unsupported
from fdsd.data.region import Region
from tests.helpers.tensors import COMPLEX, MOVABLE, NUMERIC, OPAQUE, is_signed, name_of, numbers, same_bytes, slots

SMALL = [dtype for dtype in NUMERIC if dtype.itemsize <= 2 and not dtype.is_complex]
LARGE = [dtype for dtype in NUMERIC if dtype not in SMALL]


def every_value(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([False, True])
    words = torch.arange(1 << 8 * dtype.itemsize)
    return slots(words.to(torch.uint8) if dtype.itemsize == 1 else words.to(torch.int16), dtype)


def keeps_all(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of ``source`` has the same value in ``target``, and comes back."""
    values = every_value(source)
    there = values.to(target)
    exact, found = values.to(torch.complex128), there.to(torch.complex128)
    equal = (exact == found) | (exact.isnan() & found.isnan())
    if not bool(equal.all()):
        return False
    back = (there.real if there.is_complex() else there).to(source).to(torch.complex128)
    return bool(((back == exact) | (back.isnan() & exact.isnan())).all())


@pytest.mark.parametrize("source", SMALL, ids=name_of)
def test_widening_keeps_every_value(source: torch.dtype) -> None:
    for target in NUMERIC:
        if target != source and not target.is_complex:
            assert is_widening(source, target) == keeps_all(source, target), (source, target)


# What is exact of the dtypes that have too many values to try; everything else loses something.
WIDER = {
    torch.int32: {torch.int64, torch.float64},
    torch.uint32: {torch.int64, torch.uint64, torch.float64},
    torch.int64: set(),
    torch.uint64: set(),
    torch.float32: {torch.float64},
    torch.float64: set(),
    torch.complex32: {torch.complex64, torch.complex128},
    torch.complex64: {torch.complex128},
    torch.complex128: set(),
}


@pytest.mark.parametrize("source", LARGE, ids=name_of)
def test_widening_of_large_dtypes(source: torch.dtype) -> None:
    assert {dtype for dtype in NUMERIC if dtype != source and is_widening(source, dtype)} == WIDER[source]


@pytest.mark.parametrize("source", SMALL + LARGE, ids=name_of)
def test_widening_can_be_undone(source: torch.dtype) -> None:
    """A cast that counts as widening has an inverse that may be run."""
    for target in NUMERIC:
        if is_widening(source, target):
            check_cast(source, target)
            check_cast(target, source)


@pytest.mark.parametrize("dtype", OPAQUE, ids=name_of)
def test_opaque_dtypes_widen_to_nothing_and_are_cast_to_nothing(dtype: torch.dtype) -> None:
    for other in MOVABLE:
        assert is_widening(dtype, other) == is_widening(other, dtype) == (dtype == other)
        if other == dtype:
            check_cast(dtype, dtype)
            continue
        for pair in ((dtype, other), (other, dtype)):
            with pytest.raises(Unsupported, match=f"{name_of(dtype)}.*map_tensors"):
                check_cast(*pair)


def test_quantized_dtypes_are_not_cast() -> None:
    assert not is_widening(torch.qint8, torch.float32) and not is_widening(torch.int8, torch.qint8)
    with pytest.raises(Unsupported, match="qint8"):
        check_cast(torch.qint8, torch.float32)


@pytest.mark.parametrize("source", COMPLEX, ids=name_of)
def test_dropping_the_imaginary_part_is_refused_with_the_remedy(source: torch.dtype) -> None:
    for target in NUMERIC:
        if not target.is_complex:
            with pytest.raises(Unsupported, match=r"imaginary part.*torch\.real"):
                apply(Cast(target), torch.zeros(2, dtype=source))


@pytest.mark.parametrize("source", NUMERIC, ids=name_of)
def test_every_other_pair_is_cast_as_torch_does(source: torch.dtype) -> None:
    x = numbers((3, 4), source, 5)
    for target in NUMERIC:
        if source.is_complex and not target.is_complex:
            continue
        want = x.to(target)
        assert same_bytes(apply(Cast(target), x), want)
        assert same_bytes(evaluate([apply(Cast(target), defer_leaf(x))])[0], want)
        out = torch.empty(4, 3, dtype=target).t()
        copy_elements(x, out)
        assert same_bytes(out, want)


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


@pytest.mark.parametrize(("first", "second", "into"), list(product(FLOATS, repeat=3)))
def test_each_rounding_happens_where_the_chain_says(first: torch.dtype, second: torch.dtype, into: torch.dtype) -> None:
    """Two casts in a row, into memory of a third dtype: three roundings, none merged, none skipped."""
    x = torch.linspace(-50, 50, 257, dtype=torch.float64)
    node = apply(Permute((0,)), apply(Cast(second), apply(Cast(first), defer_leaf(x))))
    session = Session([node])
    out = torch.empty(257, dtype=into)
    session.fill(session.roots[0], Region.whole((257,)), out)
    assert same_bytes(out, x.to(first).to(second).to(into))


@pytest.mark.parametrize("source", [torch.float32, torch.float64])
def test_a_negative_bit_is_resolved_before_the_cast(source: torch.dtype) -> None:
    """Torch itself negates after the cast: -0.0 in the imaginary part, and no kernel for bool and float8."""
    x = torch.complex(torch.zeros(5, dtype=source), torch.arange(5, dtype=source) - 2).conj().imag
    assert x.is_neg()
    plain = x.resolve_neg()
    for target in NUMERIC:
        if target is not torch.bool and not is_signed(target):
            continue
        for made in (apply(Cast(target), x), evaluate([apply(Cast(target), defer_leaf(x))])[0]):
            assert same_bytes(made, plain.to(target)), target
