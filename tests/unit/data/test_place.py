"""Places: where tensors lie, and that views of lazy tensors and of specs lie where torch's views do."""

from __future__ import annotations

from random import Random

import pytest
import torch

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import AddScalar, Cast, Concat, Distinct, IndexSelect, MergeDims, Permute, Select, Slice, SplitDim
from fdsd.data.place import Place
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import specs
from fdsd.data.ties import place_of, tie_key


def test_equal_views_have_equal_places_whatever_their_strides_are_called() -> None:
    w = torch.arange(6.0)
    assert tie_key(w.as_strided((1, 6), (6, 1))) == tie_key(w.as_strided((1, 6), (99, 1)))
    assert tie_key(w.as_strided((2, 1, 2), (2, 7, 1))) == tie_key(w.as_strided((2, 1, 2), (2, 1, 1)))
    assert tie_key(w.as_strided((2, 1, 2), (1, 7, 2))) == tie_key(w.as_strided((2, 1, 2), (1, 1, 2)))
    assert tie_key(w.as_strided((2, 2), (1, 2))) != tie_key(w.as_strided((2, 2), (2, 1)))
    assert tie_key(w[:2]) != tie_key(w[2:4])


@pytest.mark.parametrize("seed", range(40))
def test_views_lie_where_torchs_views_do(seed: int) -> None:
    """Chains of views of a tensor of any strides, of its lazy twin, and of its spec; a copy ends the comparison."""
    rng = Random(seed)
    shape = [rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(1, 3))]
    base = torch.arange(2 * torch.Size(shape).numel()).reshape(2, *shape)[rng.randint(0, 1)]
    order = list(range(base.ndim))
    rng.shuffle(order)
    eager = base.permute(order)
    lazy, hollow = defer_leaf(eager), specs({"x": eager, "y": eager})["x"]
    offset = eager.storage_offset()
    for _ in range(6):
        if not eager.ndim:
            break
        dim = rng.randrange(eager.ndim)
        size = eager.shape[dim]
        start = rng.randrange(size)
        op = rng.choice(
            [
                Permute(tuple(rng.sample(range(eager.ndim), eager.ndim))),
                Slice(dim, start, rng.randint(1, size - start)),
                Slice(dim, 0, (size + 1) // 2, 2),
                Select(dim, start),
                MergeDims(dim, rng.randint(0, eager.ndim - dim)),
                SplitDim(dim, (size // 2, 2) if size % 2 == 0 else (1, size)),
                Cast(torch.int64),
            ]
        )
        before = eager
        eager, lazy, hollow = apply(op, eager), apply(op, lazy), apply(op, hollow)
        if eager.untyped_storage().data_ptr() != before.untyped_storage().data_ptr():
            assert isinstance(lazy, Lazy) and lazy.place.root == ("object", id(lazy))
            assert isinstance(hollow.tie, object) and not isinstance(hollow.tie, Place)
            return
        assert tie_key(lazy) == tie_key(eager), op
        mine, real = place_of(hollow), place_of(eager)
        assert mine is not None and real is not None
        assert (mine.offset, mine.strides) == (real.offset, real.strides), (op, offset)


@pytest.mark.parametrize(
    "op", [Cast(torch.int8), AddScalar(0.0), Distinct("x"), IndexSelect(0, (0, 1)), Concat(0)], ids=repr
)
def test_copies_lie_in_memory_of_their_own(op: Cast | AddScalar | Distinct | IndexSelect | Concat) -> None:
    w = torch.arange(2.0)
    lazy, spec = defer_leaf(w), TensorSpec((2,), torch.float32, tie="w")
    assert tie_key(apply(op, lazy)) != tie_key(apply(op, lazy))
    assert tie_key(apply(op, spec)) != tie_key(apply(op, spec))
    assert tie_key(apply(op, w)) != tie_key(w)


def test_a_long_chain_of_views_needs_no_stack() -> None:
    x = defer_leaf(torch.arange(6.0).reshape(2, 3))
    for _ in range(20_000):
        x = apply(Permute((1, 0)), x)
    assert x.place == defer_leaf(torch.empty(0)).place._replace(root=x.place.root)


def test_what_is_not_known_to_be_tied_has_no_place() -> None:
    assert place_of(TensorSpec((2,), torch.int8)) is place_of("extra") is None
    assert tie_key(apply(Permute((0,)), TensorSpec((2,), torch.int8))) is None
