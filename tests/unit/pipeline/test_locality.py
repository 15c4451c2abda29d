"""``locality``: what is local, what travels to whom, which step is named, and what cannot be told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd import (
    Locality,
    ModelSpec,
    OptimState,
    Pipeline,
    Sharded,
    StateDict,
    TensorEntry,
    TensorSpec,
    TrainState,
    cast,
    concat,
    defer,
    flatten_optim,
    gather,
    identity,
    map_tensors,
    permute_rope,
    pipe,
    rename_fqns,
    reshape,
    reshard,
    shard_with,
    specs,
    split,
    stack,
    tie,
    transpose,
)
from fdsd.data.errors import FdsdError, SpecMismatch, UnknownName, Unsupported
from fdsd.layout import Layout, Mesh, Replicate, Shard

TP = Mesh({"tp": 2})
ROWS, COLUMNS, ALL = (Layout(TP, [placement]) for placement in (Shard(0), Shard(1), Replicate()))


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype)


QKV = {f"layers.{i}.{x}": spec(8 if x == "q" else 4, 6) for i in range(3) for x in "qkv"}
FUSED = Layout(TP, [Shard(0, parts=[8, 4, 4])])
fuse = concat([f"layers.{{i}}.{x}" for x in "qkv"], "layers.{i}.qkv", dim=0)
interleave = concat([f"layers.{{i}}.{x}" for x in "qkv"], "layers.{i}.qkv", dim=0, groups=2)


@pytest.mark.parametrize(
    "p, source, target",
    [
        (identity, QKV, None),
        (rename_fqns({"layers.{i}.{x}": "blocks.{i}.{x}"}), QKV, None),
        (cast(torch.bfloat16), QKV, None),
        (permute_rope("q", heads=4, to="halves"), {"q": spec(16, 4)}, None),
        (permute_rope("q", heads=2, to="pairs"), {"q": spec(16, 4)}, ROWS),
        (interleave, QKV, None),
        (fuse, QKV, FUSED),
        (split("qkv", ["q", "k", "v"], dim=0, sizes=[8, 4, 4], groups=2), {"qkv": spec(16, 3)}, None),
        (transpose("{_...}"), QKV, None),
        (transpose("{_...}"), QKV, COLUMNS),
        (transpose("{_...}") >> transpose("{_...}"), QKV, ROWS),
        (stack("layers.{i}.q", "q") >> cast(torch.float64), {n: s for n, s in QKV.items() if n.endswith("q")}, None),
        (reshape("w", (2, 2, 6), from_shape=(4, 6)), {"w": spec(4, 6)}, None),
        (tie({"b": "a"}), {"a": spec(4)}, None),
        (transpose("{_...}") >> reshard(COLUMNS), QKV, None),
    ],
)
def test_local(p: Pipeline, source: Any, target: Layout | None) -> None:
    found = p.locality(ROWS, source, target=target)
    assert found.ok, found
    assert found.received == {} and found.moves == () and found.ranks == (0, 1)


def one(found: Locality) -> tuple[str, int, dict[int, int]]:
    (move,) = found.moves
    return move.fqn, move.step, dict(move.nbytes)


def test_what_travels_and_which_step_is_named() -> None:
    source = {"w": spec(4, 6)}
    flip = transpose("w")
    assert one(flip.locality(ROWS, source, target=ROWS)) == ("w", 0, {0: 24, 1: 24})
    assert one((flip >> reshard(ROWS)).locality(ROWS, source)) == ("w", 2, {0: 24, 1: 24})
    assert one((flip >> gather()).locality(ROWS, source)) == ("w", 2, {0: 48, 1: 48})
    assert one((gather() >> flip).locality(ROWS, source)) == ("w", 1, {0: 48, 1: 48})
    assert one((flip >> gather(1)).locality(ROWS, source)) == ("w", 2, {1: 48})
    assert one((flip >> gather(5)).locality(ROWS, source)) == ("w", 2, {5: 96})
    half = permute_rope("w", heads=1, to="halves")
    assert one(half.locality(ROWS, {"w": spec(8, 2, dtype=torch.bfloat16)}, target=ROWS))[2] == {0: 8, 1: 8}
    relu = rename_fqns({"w": "x"}) >> map_tensors(torch.relu, "x") >> cast(torch.bfloat16)
    assert one(relu.locality(ROWS, source)) == ("x", 2, {0: 48, 1: 48})


def test_fusing_without_groups() -> None:
    found = fuse.locality(ROWS, QKV)
    assert [(move.fqn, move.step) for move in found.moves] == [(f"layers.{i}.qkv", 1) for i in range(3)]
    assert found.received == {0: 3 * 4 * 24, 1: 3 * 4 * 24}  # rank 0 wants the lower half of q, rank 1 k's first half
    assert str(found) == (
        "not local: 3 of 3 tensors on 2 ranks; 576 bytes travel\n"
        "step 1, concat(...):\n"
        "  layers.{0..2}.qkv: 3 x 96 bytes to each of ranks 0, 1"
    )
    assert repr(found) == str(found)
    assert str(interleave.locality(ROWS, QKV)) == "local: 3 tensors on 2 ranks, and nothing travels"


def test_an_element_counts_once_for_each_result() -> None:
    twice = concat(["w", "w2"], "ww", dim=0)
    source = specs({"w": (w := torch.ones(4, 2)), "w2": w})
    found = twice.locality(ROWS, source, target=ALL)
    assert one(found) == ("ww", 1, {0: 16, 1: 16})


def test_no_layout_is_everywhere() -> None:
    source = {"a": spec(4, 2), "b": spec(4, 2)}
    p = concat(["a", "b"], "ab", dim=1)
    assert p.locality({"a": ROWS}, source).ok
    assert p.locality({"b": ROWS}, source, target=COLUMNS).received == {1: 16}
    assert gather().locality({"a": ALL, "b": ALL}, source).ok


def test_meshes_of_other_ranks() -> None:
    four, six = (Layout(Mesh({"dp": n}), [Shard(0)]) for n in (4, 6))
    found = reshard(six).locality(four, {"w": spec(12, 1)})
    assert found.ranks == (0, 1, 2, 3, 4, 5)
    # 3 rows on each of 4, then 2 on each of 6: ranks 0 has its two, 1 lacks row 2 (it holds 3, 4, 5), and so on
    assert found.received == {1: 4, 2: 8, 3: 8, 4: 8, 5: 8}
    moved = Layout(Mesh({"dp": 4}, ranks=[3, 2, 1, 0]), [Shard(0)])
    assert reshard(moved).locality(four, {"w": spec(12, 1)}).received == dict.fromkeys(range(4), 12)
    assert str(found).splitlines()[2] == "  w: (4 bytes to rank 1; 8 bytes to each of ranks 2, 3, 4, 5)"


def test_layouts_with_shapes_of_their_own() -> None:
    state = shard_with({"w": ROWS})({"w": torch.ones(4, 2), "n": torch.ones(3), "x": None})
    p = transpose("w")
    want = p.locality({"w": ROWS}, state, target={"w": ROWS})
    assert p.locality(state, target={"w": ROWS}) == want
    assert p.locality(TrainState(state), target={"w": ROWS}) == want
    assert p.locality({"w": ROWS}, TrainState(state), target={"w": ROWS}) == want
    assert p.locality(state, specs(state), target={"w": ROWS}) == want
    entries = {"w": TensorEntry(spec(4, 2), layout=ROWS.to_data()), "n": TensorEntry(spec(3))}
    assert p.locality(ModelSpec(entries), target={"w": ROWS}) == want
    assert p.locality(ModelSpec(entries), state, target=ModelSpec(entries)) == want
    assert not want.ok and want.num == 2


def test_leaves_that_lie_over_ranks_say_so_themselves() -> None:
    """On a real rank there is one shard, which is a source laid out over ranks once it is lazy."""
    mine = Sharded(spec(4, 2), ROWS, shards={1: torch.ones(2, 2)})
    flip = transpose("w")
    want = flip.locality(ROWS, {"w": spec(4, 2)}, target=ROWS)
    for state in ({"w": mine}, defer({"w": mine})):
        assert flip.locality(state, target=ROWS) == want
        assert flip.locality({"n": ROWS}, {**state, "n": spec(2)}, target={"w": ROWS}).moves == want.moves
    with pytest.raises(SpecMismatch, match=r"'w' are made of parts that lie over ranks\. Say how"):
        flip.locality(flip(defer({"w": mine})))
    assert flip.locality(COLUMNS, flip(defer({"w": mine}))).ok


def test_tied_names_count_once() -> None:
    w = torch.ones(4, 2)
    found = reshard(COLUMNS).locality(ROWS, {"a": w, "b": w})
    assert [move.fqn for move in found.moves] == ["a"] and found.num == 1


def test_it_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match=r"ask locality\.ok"):
        bool(identity.locality(ROWS, QKV))


def test_many_ranks_and_layers_are_counted_by_structure() -> None:
    grid = Mesh({"dp": 16, "tp": 16})
    layout = Layout(grid, [Shard(0), Shard(1)])
    source = {f"layers.{i}.w": spec(4096, 4096) for i in range(300)}
    p = pipe(rename_fqns({"layers.{i}.w": "l.{i}.w"}), transpose("{_...}.w"))
    assert p.locality(layout, source).ok
    other = p.locality(layout, source, target=layout)
    assert len(other.moves) == 300
    assert set(other.received) == {rank for rank in range(256) if rank % 17}  # the diagonal has its own
    assert str(other).count("\n") == 2


@pytest.mark.parametrize(
    "ask, error, text",
    [
        (lambda: identity.locality(ROWS), Unsupported, "have no shapes. Give the source"),
        (lambda: identity.locality({"a": ROWS}), Unsupported, "have no shapes"),
        (lambda: identity.locality(ROWS, 3), Unsupported, "not int"),
        (lambda: identity.locality(ROWS, OptimState()), Unsupported, "not OptimState"),
        (lambda: identity.locality(3, QKV), Unsupported, "locality: layouts are given as"),  # type: ignore[arg-type]
        (lambda: identity.locality({"z": ROWS}, QKV), UnknownName, "locality: no name matches 'z'"),
        (lambda: identity.locality(COLUMNS, {"b": spec(4)}), SpecMismatch, "locality: 'b': .*shards dim 1"),
        (lambda: identity.locality(ROWS, {"b": spec(4)}, target=COLUMNS), SpecMismatch, "do not fit: 'b' of shape"),
        (lambda: identity.locality(ROWS, {"b": spec(4)}, target={"c": ROWS}), UnknownName, "no name matches 'c'"),
        (
            lambda: reshape("w", (24,), from_shape=(4, 6)).locality(COLUMNS, {"w": spec(4, 6)}),
            SpecMismatch,
            "not known how 'w' should lie. Say it with target=",
        ),
        (
            lambda: concat(["a", "b"], "ab", dim=0).locality(
                {"a": ROWS, "b": COLUMNS}, {"a": spec(2, 2), "b": spec(2, 2)}
            ),
            SpecMismatch,
            "not known how 'ab' should lie",
        ),
        (lambda: transpose("z").locality(ROWS, QKV), UnknownName, "no name matches 'z'"),
        (lambda: shard_with(ROWS).locality(ROWS, QKV), Unsupported, "laid out over ranks already"),
        (lambda: flatten_optim().locality(ROWS, OptimState()), Unsupported, "OptimState"),
    ],
)
def test_what_cannot_be_told(ask: Any, error: type[FdsdError], text: str) -> None:
    with pytest.raises(error, match=text):
        ask()


def test_values_of_reports() -> None:
    assert Locality((), 1, (0,)) == Locality((), 1, (0,))
    assert isinstance(identity.locality(ROWS, StateDict(QKV)), Locality)
