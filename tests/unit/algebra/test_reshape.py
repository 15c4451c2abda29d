"""Splitting and merging dims: against plain torch, and their refusals."""

from __future__ import annotations

import pytest
import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.fill import Session
from fdsd.algebra.lazy import Op
from fdsd.algebra.ops import MergeDims, Permute, SplitDim
from fdsd.algebra.plan import plan_of
from fdsd.data.errors import SpecMismatch
from fdsd.data.region import Region, Span
from tests.helpers.checks import agree, spec
from tests.helpers.tensors import MOVABLE, carried, lay_out, name_of, patterns, same_bytes, slots

X = torch.arange(24).reshape(2, 12)
Y = torch.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("op", "given", "want"),
    [
        (SplitDim(1, (3, 4)), X, X.reshape(2, 3, 4)),
        (SplitDim(1, (2, 3, 2)), X, X.reshape(2, 2, 3, 2)),
        (SplitDim(0, (2,)), X, X),
        (SplitDim(0, (1, 2, 1)), X, X.reshape(1, 2, 1, 12)),
        (SplitDim(0, ()), X[:1], X[0]),
        (SplitDim(1, (0, 3)), X[:, :0], X[:, :0].reshape(2, 0, 3)),
        (SplitDim(1, (5, 0, 2)), X[:, :0], X[:, :0].reshape(2, 5, 0, 2)),
        (MergeDims(0, 3), Y, Y.reshape(24)),
        (MergeDims(0, 2), Y, Y.reshape(6, 4)),
        (MergeDims(1, 2), Y, Y.reshape(2, 12)),
        (MergeDims(1, 1), Y, Y),
        (MergeDims(0, 0), Y, Y[None]),
        (MergeDims(3, 0), Y, Y[..., None]),
        (MergeDims(0, 0), Y[0, 0, 0], Y[0, 0, :1]),
        (MergeDims(0, 2), Y[:0], Y[:0].reshape(0, 4)),
        (MergeDims(1, 2), Y[:0], Y[:0].reshape(0, 12)),
        (MergeDims(1, 2), Y[:, :, :0], Y[:, :, :0].reshape(2, 0)),
    ],
)
def test_against_torch(op: Op, given: torch.Tensor, want: torch.Tensor) -> None:
    assert same_bytes(agree(op, given), want)
    if given.ndim > 1:
        assert same_bytes(agree(op, lay_out(given, "transposed")), want)
    if given.ndim:
        assert same_bytes(agree(op, lay_out(given, "strided")), want)


@pytest.mark.parametrize("dtype", MOVABLE, ids=name_of)
def test_every_dtype(dtype: torch.dtype) -> None:
    x = lay_out(patterns((4, 6), dtype), "transposed")
    assert same_bytes(agree(SplitDim(1, (2, 3)), x), slots(carried(x).reshape(4, 2, 3), dtype))
    assert same_bytes(agree(MergeDims(0, 2), x), slots(carried(x).reshape(24), dtype))


def test_the_rope_permutation_is_one_read() -> None:
    heads, size = 32, 128
    w = defer_leaf(torch.empty(4096, 4096, device="meta"))
    split = apply(SplitDim(0, (heads, 2, size // 2)), w)
    rope = apply(MergeDims(0, 3), apply(Permute((0, 2, 1, 3)), split))
    plan = plan_of([rope])
    assert rope.shape == (4096, 4096)
    assert len(plan.steps) == 1 and plan.is_reads_only
    back = apply(MergeDims(0, 3), apply(Permute((0, 2, 1, 3)), apply(SplitDim(0, (heads, size // 2, 2)), rope)))
    assert len(plan_of([back]).steps) == 1


def test_the_rope_permutation_is_right() -> None:
    w = torch.arange(4 * 6 * 5).reshape(24, 5)
    made = agree(MergeDims(0, 3), agree(Permute((0, 2, 1, 3)), agree(SplitDim(0, (4, 2, 3)), w)))
    rows = [head * 6 + half * 3 + i for head in range(4) for i in range(3) for half in range(2)]
    assert same_bytes(made, w[rows])


def test_any_reshape_of_a_tensor_is_few_reads() -> None:
    w = defer_leaf(torch.empty(64, 96, 10, device="meta"))
    flat = apply(MergeDims(0, 3), w)
    for sizes in ((64, 96, 10), (64, 960), (6144, 10), (8, 8, 8, 12, 2, 5)):
        assert len(plan_of([apply(SplitDim(0, sizes), flat)]).steps) == 1
    # rows that straddle each other's ends: one read for each end
    assert len(plan_of([apply(SplitDim(0, (96, 64, 10)), flat)]).steps) <= 64 + 96


def test_a_new_dim_asked_for_several_times() -> None:
    """A pair of step 0 is no indexing that an operation makes, but a region that may be filled."""
    node = apply(MergeDims(0, 0), defer_leaf(torch.arange(3)))
    session = Session([node])
    out = torch.empty(2, 3, dtype=torch.int64)
    session.fill(session.roots[0], Region((Span(0, ((2, 0),)), Span(0, ((3, 1),)))), out)
    assert out.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(
    ("op", "given", "told"),
    [
        (SplitDim(2, (1,)), spec(2, 3), r"no dim 2 in shape \(2, 3\)"),
        (SplitDim(-1, (3,)), spec(2, 3), "no dim -1"),
        (SplitDim(1, (2, 2)), spec(2, 3), r"dim 1 of shape \(2, 3\) has size 3, not \(2, 2\)"),
        (SplitDim(1, ()), spec(2, 3), r"size 3, not \(\)"),
        (SplitDim(1, (-1, -3)), spec(2, 3), r"-1.*-3"),
        (SplitDim(0, ()), spec(0), "size 0"),
        (MergeDims(1, 2), spec(2, 3), r"shape \(2, 3\) has no 2 dims from dim 1"),
        (MergeDims(-1, 1), spec(2, 3), "from dim -1"),
        (MergeDims(2, -1), spec(2, 3), "no -1 dims"),
        (MergeDims(1, 0), spec(), r"shape \(\)"),
    ],
)
def test_refusals_name_the_shape(op: Op, given: object, told: str) -> None:
    with pytest.raises(SpecMismatch, match=told):
        apply(op, given)
