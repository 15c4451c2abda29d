"""Slices, selections, permutations, casts and copies: each against plain torch, and their refusals."""

from __future__ import annotations

import pytest
import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.lazy import Op
from fdsd.algebra.ops import Cast, Distinct, Permute, Select, Slice
from fdsd.data.errors import SpecMismatch, Unsupported
from fdsd.data.ties import tie_key
from tests.helpers.checks import agree, spec
from tests.helpers.running import CountingSource, run_whole
from tests.helpers.tensors import MOVABLE, OPAQUE, carried, lay_out, name_of, patterns, same_bytes, slots

X = torch.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("op", "want"),
    [
        (Slice(0, 0, 2), X),
        (Slice(0, 1, 1), X[1:]),
        (Slice(1, 1, 2), X[:, 1:]),
        (Slice(2, 1, 2, 2), X[:, :, 1::2]),
        (Slice(2, 0, 2, 3), X[..., ::3]),
        (Slice(2, 3, 1, 100), X[..., 3:]),
        (Slice(1, 0, 0), X[:, :0]),
        (Slice(1, 3, 0), X[:, 3:]),
        (Select(0, 1), X[1]),
        (Select(2, 3), X[..., 3]),
        (Permute((0, 1, 2)), X),
        (Permute((2, 0, 1)), X.permute(2, 0, 1)),
        (Permute((2, 1, 0)), X.permute(2, 1, 0)),
        (Cast(torch.int64), X),
        (Cast(torch.float16), X.half()),
        (Cast(torch.bool), X.bool()),
        (Distinct("a"), X),
    ],
)
def test_against_torch(op: Op, want: torch.Tensor) -> None:
    assert same_bytes(agree(op, X), want)
    flipped = X.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert same_bytes(agree(op, flipped), want)


@pytest.mark.parametrize("op", [Permute(()), Cast(torch.float32), Distinct("a")])
def test_no_dims(op: Op) -> None:
    assert agree(op, torch.tensor(7)).item() == 7


@pytest.mark.parametrize("dtype", MOVABLE, ids=name_of)
def test_every_dtype_moves(dtype: torch.dtype) -> None:
    x = lay_out(patterns((4, 6), dtype), "transposed")
    for op in (Slice(1, 1, 3, 2), Select(0, 2), Permute((1, 0)), Distinct("a")):
        assert same_bytes(agree(op, x), slots(apply(op, carried(x)), dtype)), op
    assert same_bytes(agree(Cast(dtype), x), x)


def test_views_serve_where_they_can() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    for op in (Slice(0, 1, 2), Slice(1, 0, 2, 2), Select(0, 1), Permute((1, 0)), Cast(torch.float32)):
        assert apply(op, x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), op


def test_distinct_is_no_longer_tied() -> None:
    x = torch.arange(3.0)
    copy = apply(Distinct("a"), x)
    assert tie_key(copy) != tie_key(x) and same_bytes(copy, x)
    assert tie_key(apply(Distinct("a"), lay_out(x, "expanded"))) != tie_key(x)
    source = CountingSource({"x": x})
    lazy = source.lazy("x")
    a, b, again = (apply(Distinct(token), lazy) for token in "aba")
    ran = run_whole(a, b, again)
    assert ran.session.roots[0] is ran.session.roots[2] is not ran.session.roots[1]


@pytest.mark.parametrize(
    ("op", "given", "told"),
    [
        (Slice(2, 0, 1), spec(2, 3), r"no dim 2 in shape \(2, 3\)"),
        (Slice(-1, 0, 1), spec(2, 3), "no dim -1"),
        (Slice(0, 0, 1), spec(), r"no dim 0 in shape \(\)"),
        (Slice(1, 1, 3), spec(2, 3), r"3 indices from 1 by 1 do not lie in dim 1 of shape \(2, 3\)"),
        (Slice(1, 0, 2, 3), spec(2, 3), "by 3"),
        (Slice(1, -1, 1), spec(2, 3), "from -1"),
        (Slice(1, 0, -1), spec(2, 3), "-1 indices"),
        (Slice(1, 0, 1, 0), spec(2, 3), "by 0"),
        (Slice(1, 4, 0), spec(2, 3), "from 4"),
        (Select(2, 0), spec(2, 3), "no dim 2"),
        (Select(1, 3), spec(2, 3), r"no index 3 in dim 1 of shape \(2, 3\)"),
        (Select(1, -1), spec(2, 3), "no index -1"),
        (Select(0, 0), spec(0, 3), "no index 0"),
        (Permute((0,)), spec(2, 3), r"2 dims, shape \(2, 3\)"),
        (Permute((0, 0)), spec(2, 3), "name each once"),
        (Permute((0, 2)), spec(2, 3), "name each once"),
        (Permute((-1, 0)), spec(2, 3), "name each once"),
        (Permute((0,)), spec(), r"0 dims, shape \(\)"),
    ],
)
def test_refusals_name_the_shape(op: Op, given: object, told: str) -> None:
    with pytest.raises(SpecMismatch, match=told):
        apply(op, given)


def test_refusals_are_the_same_for_tensors_and_lazy_tensors() -> None:
    for leaf in (X, defer_leaf(X)):
        with pytest.raises(SpecMismatch, match="no index 9"):
            apply(Select(0, 9), leaf)


@pytest.mark.parametrize("dtype", OPAQUE, ids=name_of)
def test_cast_of_opaque_dtypes_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(Unsupported, match="can be moved but not cast"):
        apply(Cast(torch.float32), patterns((2,), dtype))


def test_cast_keeps_a_view_when_nothing_changes() -> None:
    x = torch.arange(3.0)
    assert tie_key(apply(Cast(torch.float32), x)) == tie_key(x)
    assert evaluate([apply(Cast(torch.float32), defer_leaf(x))])[0].dtype == torch.float32
