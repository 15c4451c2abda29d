"""``Sharded``: what it is made of, what it gives, what it refuses; and a rank that holds its own shard alone."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fdsd import Lazy, Sharded, TensorSpec, defer, gather, materialize, specs
from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.memory import MemorySource
from fdsd.algebra.ops import AddScalar, Average, Cast, Distinct, Item, Permute
from fdsd.algebra.ops.leaves import Origin
from fdsd.data.errors import FdsdError, LazyError, SpecMismatch, Unsupported
from fdsd.data.protocols import Source
from fdsd.data.region import Region, Span
from fdsd.data.spec import spec_of
from fdsd.data.ties import tie_key, ties
from fdsd.layout import Layout, Mesh, Replicate, Shard
from fdsd.layout.placed import PlacedSource
from fdsd.layout.shard_source import ShardSource
from fdsd.layout.sharded import lazy_sharded, place, whole_of

X = torch.arange(15).reshape(5, 3)
SPEC = TensorSpec((5, 3), torch.int64)
ROWS = Layout(Mesh({"dp": 2}, ranks=[4, 1]), [Shard(0)])
BOTH = Layout(Mesh({"dp": 2, "tp": 2}), [Shard(0), Shard(1)])
FUSED = Layout(Mesh({"tp": 2}), [Shard(0, parts=[3, 2])])


def pieces(layout: Layout, *ranks: int) -> Sharded:
    return Sharded(SPEC, layout, shards={rank: place(X, layout).shard(rank).clone() for rank in ranks})


def test_shards_of_a_tensor_are_views() -> None:
    x = Sharded(SPEC, ROWS, whole=X)
    assert (x.shape, x.dtype, x.ndim, x.numel(), x.spec, x.layout) == ((5, 3), torch.int64, 2, 15, SPEC, ROWS)
    assert x.shard(4).untyped_storage().data_ptr() == X.untyped_storage().data_ptr()
    assert x.shard(1).tolist() == X[3:].tolist()
    assert x.kept is x.whole() is X
    assert dict(x.shards) == {}


def test_shards_of_a_parameter_are_detached_and_the_whole_is_itself() -> None:
    w = torch.nn.Parameter(torch.arange(5.0))
    spec = TensorSpec((5,), torch.float32)
    assert not Sharded(spec, ROWS, whole=w).shard(1).requires_grad
    assert Sharded(spec, Layout(Mesh({"dp": 2}), [Replicate()]), whole=w).shard(1) is w


@pytest.mark.parametrize("layout", [ROWS, BOTH, FUSED], ids=str)
def test_of_lazy_tensors_and_specs(layout: Layout) -> None:
    lazy = Sharded(SPEC, layout, whole=defer_leaf(X))
    hollow = Sharded(SPEC, layout, whole=SPEC)
    for rank in layout.mesh.ranks:
        want = place(X, layout).shard(rank)
        assert isinstance(lazy.shard(rank), Lazy)
        assert torch.equal(materialize({"x": lazy.shard(rank)})["x"], want)
        assert hollow.shard(rank) == spec_of(want)
    assert hollow.whole() == SPEC
    shards = {rank: lazy.shard(rank) for rank in layout.mesh.ranks}
    again = Sharded(SPEC, layout, shards=shards)
    assert isinstance(again.whole(), Lazy)
    assert torch.equal(materialize({"x": again.whole()})["x"], X)
    specs_of = {rank: hollow.shard(rank) for rank in layout.mesh.ranks}
    assert Sharded(SPEC, layout, shards=specs_of).whole() == SPEC


def test_a_structural_shard_is_read_from_its_own_part_only() -> None:
    read: list[Region] = []

    class Watching(MemorySource):
        def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
            read.append(region)
            super().read(fqn, region, out)

    source: Source = Watching({"x": X})
    lazy = Lazy(Origin(source, "x", SPEC), (), [SPEC])
    materialize({"x": Sharded(SPEC, BOTH, whole=lazy).shard(3)})
    assert read == [Region.box((3, 2), (2, 1))]


@pytest.mark.parametrize("layout", [ROWS, BOTH, FUSED], ids=str)
def test_real_pieces_make_the_whole(layout: Layout) -> None:
    x = pieces(layout, *layout.mesh.ranks)
    assert torch.equal(x.whole(), X)
    assert torch.equal(materialize({"x": lazy_sharded(x)})["x"], X)
    assert torch.equal(whole_of(x), X)


def test_one_replica_suffices() -> None:
    layout = Layout(Mesh({"dp": 2, "tp": 2}), {"tp": Shard(0)})
    assert torch.equal(pieces(layout, 2, 1).whole(), X)
    same = pieces(Layout(Mesh({"dp": 3}), [Replicate()]), 2)
    assert same.whole() is same.shards[2]


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0)], ids=str)
def test_tensors_without_elements_and_without_dims(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=torch.bfloat16)
    spec = TensorSpec(shape, torch.bfloat16)
    layout = Layout(Mesh({"dp": 3}), [Shard(-1) if shape else Replicate()])
    x = Sharded(spec, layout, shards={r: place(tensor, layout).shard(r) for r in range(3)})
    assert spec_of(x.whole()) == spec
    assert spec_of(materialize({"x": lazy_sharded(x)})["x"]) == spec
    none = Sharded(spec, layout, shards={})
    if not torch.Size(shape).numel():
        assert spec_of(materialize({"x": lazy_sharded(none)})["x"]) == spec


# -- what is refused -----------------------------------------------------------------------------------


USES: list[Callable[[Any], Any]] = [
    bool,
    len,
    list,
    float,
    operator.neg,
    lambda x: x + 1,
    lambda x: 2 * x,
    lambda x: x @ x,
    lambda x: x[0],
    lambda x: 1 in x,
    lambda x: x < 3,
    lambda x: x.to("cpu"),
    torch.relu,
    lambda x: torch.cat([x, x]),
]


@pytest.mark.parametrize("use", USES)
def test_no_value_of_its_own(use: Callable[[Any], Any]) -> None:
    with pytest.raises(LazyError, match=r"sharded.*gather\(\) in a pipeline, or local_shards\(state, rank\)\."):
        use(Sharded(SPEC, ROWS, whole=X))


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: Sharded(SPEC, ROWS), Unsupported, "the whole tensor or the shards"),
        (lambda: Sharded(SPEC, ROWS, whole=X, shards={}), Unsupported, "not both"),
        (lambda: Sharded(SPEC, "rows", whole=X), SpecMismatch, "the layout is a Layout, not str"),  # type: ignore[arg-type]
        (lambda: Sharded(SPEC, ROWS, whole=3), Unsupported, "the whole is of class int"),
        (lambda: Sharded(SPEC, ROWS, whole=X.float()), SpecMismatch, r"the whole is float32\[5, 3\].*int64\[5, 3\]"),
        (lambda: Sharded(SPEC, ROWS, whole=place(X, ROWS)), Unsupported, "itself sharded"),
        (lambda: Sharded(SPEC, ROWS, shards={4: X[:3], 0: X[:2]}), SpecMismatch, "shards of ranks 0, which are not in"),
        (
            lambda: Sharded(SPEC, ROWS, shards={4: X[:2], 1: X[:2].short()}),
            SpecMismatch,
            r"rank 4 is int64\[2, 3\] and should be int64\[3, 3\]; rank 1 is int16\[2, 3\] and should be int64\[2, 3\]",
        ),
        (
            lambda: Sharded(TensorSpec((5,), torch.int64), BOTH, whole=X[:, 0]),
            SpecMismatch,
            "the axis 'tp' shards dim 1 of a tensor of shape .5,.",
        ),
        (lambda: Sharded(SPEC, ROWS, whole=X).shard(0), SpecMismatch, "rank 0 is not in Mesh"),
        (lambda: Sharded(SPEC, ROWS, whole=X).shard({"tp": 0}), SpecMismatch, "names the axes 'dp'"),
        (lambda: pieces(ROWS, 1).shard(4), FdsdError, "the shard of rank 4 is not here.*group="),
        (lambda: pieces(ROWS, 1).whole(), FdsdError, "the shard of rank 4 is not here.*group="),
        (lambda: pieces(BOTH, 0, 3).whole(), FdsdError, "the shards of ranks 1, 2 are not here.*group="),
        (lambda: lazy_sharded(pieces(BOTH, 0, 3)), FdsdError, "the shards of ranks 1, 2 are not here.*group="),
    ],
)
def test_errors(make: Callable[[], Any], error: type[FdsdError], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


# -- as a leaf -----------------------------------------------------------------------------------------


def test_identity_is_equality() -> None:
    x, y = place(X, ROWS), place(X, ROWS)
    assert x == x and x != y and len({x, y}) == 2
    assert tie_key(x) == tie_key(x) != tie_key(y)
    assert ties({"a": x, "b": y, "c": x}) == [("a", "c")]
    assert specs({"a": x})["a"] == SPEC


def test_repr_is_short() -> None:
    assert repr(place(X, ROWS)) == "Sharded(int64[5, 3], {'dp': Shard(0)} over 2 ranks)"
    layout = Layout(Mesh({"dp": 2, "tp": 2}), [Shard(0), Shard(0)], order=["tp", "dp"])
    assert repr(place(X, layout)).endswith("{'dp': Shard(0), 'tp': Shard(0)}, order=('tp', 'dp') over 4 ranks)")


@pytest.mark.parametrize("make", [lambda: place(X, FUSED), lambda: pieces(ROWS, 1, 4), lambda: pieces(ROWS, 1)])
def test_it_pickles_and_copies(make: Callable[[], Sharded]) -> None:
    x = make()
    for again in (pickle.loads(pickle.dumps(x)), copy.copy(x), copy.deepcopy(x)):
        assert (again.spec, again.layout, set(again.shards)) == (x.spec, x.layout, set(x.shards))
        assert torch.equal(again.shard(1), x.shard(1))


def test_place_keeps_what_it_can() -> None:
    x = place(X, ROWS)
    assert place(x, ROWS) is x
    assert place(x, BOTH).kept is X
    assert place(SPEC, ROWS) is SPEC
    assert place("extra", ROWS) == "extra"
    with pytest.raises(SpecMismatch, match="shards dim 1"):
        place(TensorSpec((5,), torch.int64), BOTH)
    moved = place(pieces(ROWS, 1, 4), BOTH)
    assert torch.equal(moved.shard(2), X[3:, :2])


# -- operations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: place(X, ROWS), lambda: pieces(ROWS, 1, 4)], ids=["whole", "pieces"])
@pytest.mark.parametrize("op", [Cast(torch.int8), AddScalar(3), Distinct("t")], ids=str)
def test_pointwise_operations_keep_it_sharded(op: Any, make: Callable[[], Sharded]) -> None:
    made = apply(op, make())
    assert isinstance(made, Sharded) and made.layout == ROWS
    want = op.eager(X)
    assert torch.equal(made.whole(), want) and made.dtype == want.dtype
    assert torch.equal(made.shard(1), want[3:])


def test_a_lazy_whole_stays_lazy() -> None:
    made = apply(Cast(torch.int8), place(defer_leaf(X), ROWS))
    assert isinstance(made, Sharded) and isinstance(made.kept, Lazy) and made.dtype is torch.int8


def test_other_operations_make_it_lazy() -> None:
    for x in (place(X, ROWS), pieces(ROWS, 1, 4), place(defer_leaf(X), ROWS)):
        made = apply(Permute((1, 0)), x)
        assert isinstance(made, Lazy)
        assert torch.equal(materialize({"x": made})["x"], X.t())


def test_several_inputs_that_lie_alike() -> None:
    x, real = place(X.float(), ROWS), apply(Cast(torch.float32), pieces(ROWS, 1, 4))
    for others in ([x, x], [x, real], [real, X.float()], [X.float(), x]):
        made = apply(Average(), *others)
        assert isinstance(made, Sharded) and torch.equal(made.whole(), X.float())
    apart = apply(Average(), x, place(X.float(), Layout(Mesh({"dp": 2}, ranks=[4, 1]), [Shard(1)])))
    assert isinstance(apart, Lazy)
    assert apply(Average(), x, TensorSpec((5, 3), torch.float32)) == TensorSpec((5, 3), torch.float32)


def test_the_few_shards_that_all_have() -> None:
    real = Sharded(TensorSpec((5, 3), torch.float32), ROWS, shards={1: X[3:].float()})
    made = apply(Average(), real, place(X.float() + 2, ROWS))
    assert isinstance(made, Sharded) and set(made.shards) == {1}
    assert torch.equal(made.shard(1), X[3:].float() + 1)


# -- one rank among others -----------------------------------------------------------------------------


def test_one_shard_is_a_placed_source() -> None:
    lazy = lazy_sharded(pieces(ROWS, 1))
    assert isinstance(lazy.op, Origin) and isinstance(lazy.op.source, PlacedSource)
    source = lazy.op.source
    assert source.placement(lazy.op.fqn) == ROWS
    local = source.local(lazy.op.fqn)
    assert local is not None and torch.equal(local, X[3:])
    assert source.specs() == {"tensor": SPEC}
    assert [(piece.region, piece.owner) for piece in source.pieces("tensor")] == [
        (Region.box((0, 0), (3, 3)), 4),
        (Region.box((3, 0), (2, 3)), 1),
    ]
    nothing = lazy_sharded(Sharded(SPEC, ROWS, shards={})).op
    assert isinstance(nothing, Origin) and isinstance(nothing.source, ShardSource)
    assert nothing.source.local("tensor") is None
    whole = whole_of(Sharded(SPEC, Layout(Mesh({"rank": 1}), [Replicate()]), shards={0: X}))
    assert isinstance(whole, Lazy)  # it is whole here, but on other ranks it is not
    assert torch.equal(materialize({"x": whole})["x"], X)


def test_a_rank_reads_what_it_holds_and_no_more() -> None:
    for layout in (ROWS, BOTH, FUSED):
        for rank in layout.mesh.ranks:
            lazy = lazy_sharded(pieces(layout, rank))
            for region in layout.regions((5, 3), rank):
                out = torch.empty(region.shape, dtype=torch.float32)
                assert isinstance(lazy.op, Origin)
                lazy.op.source.read("tensor", region, out)
                (rows, columns) = region.spans
                assert torch.equal(out, X[rows.indices()][:, columns.indices()].float())
    source = ShardSource(SPEC, FUSED, {0: place(X, FUSED).shard(0)})
    steps = Region((Span(1, ((2, 2),)), Span(2)))  # rows 1 and 3: the last of one part, the first of the other
    out = torch.empty(2, dtype=torch.int64)
    source.read("tensor", steps, out)
    assert out.tolist() == [5, 11]
    with pytest.raises(FdsdError, match=r"int64\[5, 3\] is held by rank 1, and not here; give group="):
        source.read("tensor", Region.whole((5, 3)), torch.empty(5, 3))
    with pytest.raises(SpecMismatch, match="does not lie within"):
        source.read("tensor", Region.box((4, 0), (2, 3)), torch.empty(2, 3))


def test_reading_what_others_hold_names_the_tensor_and_group() -> None:
    state = {"w": pieces(Layout(Mesh({"dp": 3}), [Shard(0)]), 1)}
    with pytest.raises(FdsdError, match="group=") as caught:
        materialize(gather()(state))
    assert "while reading 'w'" in "".join(caught.value.__notes__)  # type: ignore[attr-defined]


def test_materialize_and_defer() -> None:
    lazy = place(defer_leaf(X), ROWS)
    made = materialize({"a": lazy, "b": lazy, "c": place(X, ROWS), "d": pieces(ROWS, 1)})
    assert torch.equal(made["a"].kept, X) and made["a"] is made["b"] and made["a"].layout == ROWS
    assert made["c"].kept is X
    assert torch.equal(made["d"].shards[1], X[3:])
    parts = Sharded(SPEC, ROWS, shards={1: defer_leaf(X[3:]), 4: defer_leaf(X[:3])})
    assert torch.equal(materialize({"a": parts})["a"].shards[4], X[:3])
    assert isinstance(defer({"a": place(X, ROWS)})["a"], Lazy)
    with pytest.raises(SpecMismatch, match="'h' are specs"):
        materialize({"h": Sharded(SPEC, ROWS, whole=SPEC)})
    assert materialize({"a": place(X, ROWS)}, device="meta")["a"].kept.is_meta


def test_item_is_not_pointwise() -> None:
    assert not Item(0).pointwise and not Permute((0,)).pointwise and Cast(torch.int8).pointwise
