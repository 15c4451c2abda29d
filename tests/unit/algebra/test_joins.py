"""Concat and stack: against plain torch, and their refusals."""

from __future__ import annotations

import pytest
import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.evaluate import evaluate
from fdsd.algebra.lazy import Op
from fdsd.algebra.ops import Concat, Stack
from fdsd.data.errors import SpecMismatch
from fdsd.data.spec import TensorSpec
from tests.helpers.checks import agree, spec
from tests.helpers.running import CountingSource, run
from tests.helpers.tensors import LAYOUTS, MOVABLE, carried, has_layout, lay_out, name_of, patterns, same_bytes, slots

A = torch.arange(6).reshape(2, 3)
B = torch.arange(6, 15).reshape(3, 3)
C = torch.arange(15, 23).reshape(2, 4)


@pytest.mark.parametrize(
    ("op", "inputs", "want"),
    [
        (Concat(0), [A], A),
        (Concat(0), [A, B], torch.cat([A, B])),
        (Concat(1), [C, A, A], torch.cat([C, A, A], 1)),
        (Concat(0), [A[:0], B, A[:0], A, A[:0]], torch.cat([B, A])),
        (Concat(0), [A[:0], B[:0]], A[:0]),
        (Concat(1), [A[:0], C[:0]], torch.cat([A[:0], C[:0]], 1)),
        (Concat(0), [torch.empty(0, dtype=torch.int64), A[0]], A[0]),
        (Stack(0), [A], A[None]),
        (Stack(0), [A, A + 100], torch.stack([A, A + 100])),
        (Stack(1), [A, A + 100, A], torch.stack([A, A + 100, A], 1)),
        (Stack(2), [A, A + 100], torch.stack([A, A + 100], 2)),
        (Stack(0), [A[0, 0], A[0, 1]], A[0, :2]),
        (Stack(1), [A[:0], A[:0]], torch.stack([A[:0], A[:0]], 1)),
    ],
)
def test_against_torch(op: Op, inputs: list[torch.Tensor], want: torch.Tensor) -> None:
    assert same_bytes(agree(op, *inputs), want)
    laid = [lay_out(x, "transposed") if x.ndim > 1 else x for x in inputs]
    assert same_bytes(agree(op, *laid), want)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", MOVABLE, ids=name_of)
def test_every_dtype_joins(dtype: torch.dtype, kind: str) -> None:
    if not has_layout(kind, (2, 3), dtype):
        return
    x = lay_out(patterns((2, 3), dtype, 1), kind)
    y = patterns((2, 3), dtype, 2)
    plain = torch.cat([carried(x), carried(y)])
    assert same_bytes(agree(Concat(0), x, y), slots(plain, dtype))
    assert same_bytes(agree(Stack(0), x, y), slots(plain.reshape(2, 2, 3), dtype))


def test_only_the_parts_that_are_asked_for_are_read() -> None:
    source = CountingSource({"a": torch.arange(10), "b": torch.arange(10, 30), "c": torch.arange(30, 40)})
    joined = apply(Concat(0), *[source.lazy(name) for name in "abc"])
    from fdsd.data.region import Region

    (found,) = run([(joined, Region.box((8,), (5,)))]).results
    assert found.tolist() == [8, 9, 10, 11, 12]
    assert [(name, region.numel) for name, region in source.reads] == [("a", 2), ("b", 3)]


def test_many_parts() -> None:
    parts = [torch.full((3,), i) for i in range(2000)]
    lazy = [defer_leaf(part) for part in parts]
    assert same_bytes(evaluate([apply(Stack(0), *lazy)])[0], torch.stack(parts))
    assert same_bytes(evaluate([apply(Concat(0), *lazy)])[0], torch.cat(parts))


BF16 = TensorSpec((2, 3), torch.bfloat16)


@pytest.mark.parametrize(
    ("op", "given", "told"),
    [
        (Concat(0), [], "nothing to join"),
        (Stack(0), [], "nothing to join"),
        (Concat(0), [spec(2, 3), BF16], r"dtypes differ.*bfloat16.*float32.*cast\(\)"),
        (Stack(0), [spec(2, 3), BF16], r"dtypes differ.*bfloat16.*float32.*cast\(\)"),
        (Concat(2), [spec(2, 3)], r"no dim 2 in shape \(2, 3\)"),
        (Concat(-1), [spec(2, 3)], "no dim -1"),
        (Concat(0), [spec()], r"no dim 0 in shape \(\)"),
        (Concat(0), [spec(2, 3), spec(2, 4)], r"dim 0 only.*\(2, 3\), \(2, 4\)"),
        (Concat(1), [spec(2, 3), spec(2)], r"no dim 1 in shape \(2,\)"),
        (Concat(0), [spec(2, 3), spec(2)], r"\(2, 3\), \(2,\)"),
        (Stack(0), [spec(2, 3), spec(3, 2)], r"shapes differ: \(2, 3\), \(3, 2\)"),
        (Stack(3), [spec(2, 3)], r"dim 3 cannot stand in shape \(2, 3\)"),
        (Stack(-1), [spec(2, 3)], "dim -1"),
        (Stack(1), [spec()], r"dim 1 cannot stand in shape \(\)"),
    ],
)
def test_refusals_name_shapes_and_dtypes(op: Op, given: list[TensorSpec], told: str) -> None:
    with pytest.raises(SpecMismatch, match=told):
        apply(op, *given)


def test_at_most_ten_shapes_are_shown() -> None:
    with pytest.raises(SpecMismatch) as caught:
        apply(Concat(0), *[spec(1, n) for n in range(1, 300)])
    assert len(str(caught.value)) < 400
    with pytest.raises(SpecMismatch, match="and 289 more"):
        apply(Stack(0), *[spec(n) for n in range(1, 300)])
