"""How results lie that nobody lays out: dims follow the operations, or it is not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd.algebra.apply import apply, constant, defer_leaf
from fdsd.algebra.graph import walk
from fdsd.algebra.lazy import Lazy, Op
from fdsd.algebra.ops import (
    Average,
    Call,
    Cast,
    Concat,
    IndexSelect,
    MergeDims,
    Permute,
    Select,
    Slice,
    SplitDim,
    Stack,
)
from fdsd.data.spec import TensorSpec
from fdsd.layout import Layout, Mesh, Replicate, Shard
from fdsd.layout.derived import Lies, derive

MESH = Mesh({"dp": 2, "tp": 2})


def on(dp: int | None, tp: int | None, order: list[str] | None = None) -> Layout:
    return Layout(MESH, [Replicate() if dim is None else Shard(dim) for dim in (dp, tp)], order=order)


def lies(root: Lazy, **layouts: Lies) -> Lies:
    """Derive from the layouts of sources, by name; those without are everywhere."""
    known: dict[int, Lies] = {}
    for node in walk([root]):
        fqn = getattr(node.op, "fqn", None)
        known[id(node)] = derive(node, known) if node.inputs else layouts.get(fqn or "", "everywhere")
    return known[id(root)]


def x(*shape: int, name: str = "x") -> Any:
    return defer_leaf(TensorSpec(shape, torch.float32), name)


CASES: list[tuple[Op, tuple[int, ...], Layout, Layout | None]] = [
    (Cast(torch.int8), (4, 6), on(0, -1), on(0, 1)),
    (Permute((2, 0, 1)), (4, 6, 2), on(0, -1), on(1, 0)),
    (Permute((1, 0)), (4, 6), on(0, 0, ["tp", "dp"]), on(1, 1, ["tp", "dp"])),
    (Slice(0, 1, 2), (4, 6), on(0, 1), on(0, 1)),
    (IndexSelect(1, (5, 0)), (4, 6), on(0, 1), on(0, 1)),
    (SplitDim(0, (2, 2)), (4, 6), on(0, 1), on(0, 2)),
    (SplitDim(0, (1, 4)), (4, 6), on(0, 1), on(1, 2)),
    (SplitDim(0, ()), (1, 6), on(None, 1), on(None, 0)),
    (SplitDim(0, ()), (1, 6), on(0, 1), None),
    (MergeDims(0, 2), (4, 6, 3), on(0, 2), on(0, 1)),
    (MergeDims(0, 2), (4, 6, 3), on(1, 2), None),
    (MergeDims(0, 2), (1, 6, 3), on(1, 2), on(0, 1)),
    (MergeDims(1, 0), (4, 6), on(0, 1), on(0, 2)),
    (Select(0, 1), (4, 6), on(None, 1), on(None, 0)),
    (Select(0, 1), (4, 6), on(0, 1), None),
    (Select(1, 1), (4, 6), on(0, None), on(0, None)),
    (Call(torch.relu), (4, 6), on(0, 1), on(0, 1)),
    (Call(torch.t), (4, 6), on(0, 1), None),
]


@pytest.mark.parametrize("op, shape, before, after", CASES, ids=str)
def test_one_input(op: Op, shape: tuple[int, ...], before: Layout, after: Layout | None) -> None:
    assert lies(apply(op, x(*shape)), x=before) == after
    assert lies(apply(op, x(*shape))) == "everywhere"


def test_several_inputs() -> None:
    a, b = x(4, 6, name="a"), x(4, 6, name="b")
    for op in (Concat(0), Concat(1), Average()):
        made = apply(op, a, b)
        assert lies(made, a=on(0, 1), b=on(0, 1)) == on(0, 1)
        assert lies(made, a=on(0, 1)) == on(0, 1)  # the other is everywhere, and fits any layout
        assert lies(made, a=on(0, 1), b=on(1, 0)) is None
        assert lies(made, a=on(0, 1), b=None) is None
    assert lies(apply(Stack(1), a, b), a=on(0, 1), b=on(0, 1)) == on(0, 2)
    padded = apply(Concat(0), a, constant(TensorSpec((1, 6), torch.float32), 0))
    assert lies(padded, a=on(0, 1)) == on(0, 1)


def test_sizes_of_parts_have_to_fit_still() -> None:
    fused = Layout(Mesh({"tp": 2}), [Shard(0, parts=[3, 1])])
    assert lies(apply(Slice(0, 0, 3), x(4, 6)), x=fused) is None
    assert lies(apply(Permute((1, 0)), x(4, 6)), x=fused) == Layout(Mesh({"tp": 2}), [Shard(1, parts=[3, 1])])
    counted = Layout(Mesh({"tp": 2}), [Shard(0, parts=2)])
    assert lies(apply(Slice(0, 0, 3), x(4, 6)), x=counted) == counted


def test_functions_of_several_results() -> None:
    specs = (TensorSpec((4, 6), torch.float32), TensorSpec((4, 6), torch.float32))
    first, _ = apply(Call(torch.frexp, specs), x(4, 6))
    assert lies(first, x=on(0, 1)) == on(0, 1)
