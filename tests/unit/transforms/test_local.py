"""``local_shards`` and ``from_shards``: by examples, with every way in which shards do not fit together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fdsd import (
    OptimState,
    ParamGroup,
    Sharded,
    StateDict,
    TensorSpec,
    TrainState,
    defer,
    from_shards,
    gather,
    local_shards,
    shard_with,
    specs,
)
from fdsd.data.errors import FdsdError, SpecMismatch, UnknownName, Unsupported
from fdsd.layout import Layout, Mesh, Replicate, Shard
from tests.helpers.tensors import same_bytes

GRID = Mesh({"dp": 2, "tp": 2})
ROWS = Layout(GRID, {"dp": Shard(0)})
W = torch.arange(15.0).reshape(5, 3)


def test_places_by_rank_coordinate_and_names() -> None:
    state = shard_with(Layout(Mesh({"dp": 2, "tp": 2}, ranks=[3, 2, 1, 0]), [Shard(0), Shard(1)]))({"w": W})
    for at in (1, (1, 0), [1, 0], {"tp": 0, "dp": 1}, torch.tensor(1)):
        assert local_shards(state, at)["w"].tolist() == W[3:, :2].tolist()  # type: ignore[arg-type]


def test_leaves_on_several_meshes() -> None:
    experts = Layout(Mesh({"ep": 2}, ranks=[2, 3]), [Shard(0)])
    state = shard_with({"dense": ROWS, "expert": experts})({"dense": W, "expert": W + 100, "extra": None})
    assert [list(local_shards(state, rank)) for rank in (0, 2, 4)] == [
        ["dense", "extra"],
        ["dense", "expert", "extra"],
        ["extra"],
    ]
    with pytest.raises(SpecMismatch, match="names the axes"):
        local_shards(state, {"ep": 0})
    other = Layout(Mesh({"dp": 2, "tp": 2}, ranks=[4, 5, 6, 7]), {"dp": Shard(0)})
    both = shard_with({"a": ROWS, "b": other})({"a": W, "b": W + 1})
    with pytest.raises(SpecMismatch, match=r"is rank 1 of the mesh of 'a', rank 5 of the mesh of 'b'\. Give the rank"):
        local_shards(both, (0, 1))


def test_tied_names_share_a_shard_and_plain_leaves_are_themselves() -> None:
    fused = Layout(Mesh({"tp": 2}), [Shard(0, parts=[3, 2])])
    state = shard_with({"w": fused})({"w": W, "tied": W, "b": W + 1, "lazy": defer({"x": W + 2})["x"]})
    local = local_shards(state, 1)
    assert local["w"] is local["tied"] and local["b"] is state["b"] and local["lazy"] is state["lazy"]


def test_names_of_other_ranks_leave_the_optimizer() -> None:
    first, second = (Layout(Mesh({"pp": 1}, [rank]), [Replicate()]) for rank in (0, 1))
    model = {"a": torch.ones(2), "b": torch.ones(3)}
    optim = OptimState(
        {"exp_avg": {"a": torch.zeros(2), "b": torch.zeros(3)}, "step": {"a": 1, "b": 2}},
        (ParamGroup(("a",), {"lr": 0.1}), ParamGroup(("b",), {"lr": 0.2})),
    )
    p = shard_with({"a": first, "b": second})
    local = local_shards(p(TrainState(StateDict(model), optim)), 1)
    assert list(local.model) == ["b"] and local.optim is not None
    assert [group.fqns for group in local.optim.groups] == [(), ("b",)]
    assert {slot: list(column) for slot, column in local.optim.slots.items()} == {"exp_avg": ["b"], "step": ["b"]}
    alone = local_shards(p(optim), 0)
    assert alone.fqns == ("a",) and list(alone.slots["step"]) == ["a"]


@pytest.mark.parametrize(
    "at, text",
    [
        ("0", "a place is a rank"),
        (True, "a place is a rank"),
        (-1, "from 0 on"),
        ((0, 7), "index 7"),
        ((0,), "no coord"),
    ],
)
def test_no_places(at: Any, text: str) -> None:
    with pytest.raises(SpecMismatch, match=text):
        local_shards(shard_with(ROWS)({"w": W}), at)


def test_what_is_not_here_is_named() -> None:
    state = {"w": Sharded(TensorSpec((5, 3), torch.float32), ROWS, shards={0: W[:3]})}
    assert local_shards(state, 0)["w"] is state["w"].shards[0]
    with pytest.raises(FdsdError, match=r"local_shards: 'w': .*the shard of rank 2 is not here.*group="):
        local_shards(state, 2)
    with pytest.raises(Unsupported, match="local_shards: it takes a mapping"):
        local_shards(torch.nn.Linear(1, 1), 0)  # type: ignore[call-overload]


# -- from_shards -------------------------------------------------------------------------------------------------


def cut(layout: Layout, tensor: torch.Tensor = W, name: str = "w") -> dict[int, dict[str, Any]]:
    state = shard_with(layout)({name: tensor})
    return {rank: dict(local_shards(state, rank)) for rank in layout.mesh.ranks}


def test_states_in_order_or_by_rank() -> None:
    states = cut(ROWS)
    for given in (states, list(states.values()), tuple(states.values()), dict(reversed(states.items()))):
        made = from_shards(given, ROWS)
        assert isinstance(made["w"], Sharded) and made["w"].layout == ROWS
        assert same_bytes(made["w"].whole(), W)
        assert made["w"].shards[1] is states[1]["w"]


def test_global_shapes_follow_uneven_and_empty_shards() -> None:
    layout = Layout(Mesh({"dp": 4, "tp": 2}), [Shard(0), Shard(1)])
    made = from_shards(cut(layout), layout)
    assert made["w"].shape == (5, 3) and same_bytes(gather()(made)["w"], W)
    none = torch.ones(0, 3)
    assert from_shards(cut(layout, none), layout)["w"].shape == (0, 3)


def test_names_order_metadata_ties_and_specs() -> None:
    module = torch.nn.BatchNorm1d(3)
    full = StateDict(module.state_dict())
    table = {"{_...}": Layout(Mesh({"dp": 2}), [Replicate()])}
    states = [local_shards(shard_with(table)(full), rank) for rank in (0, 1)]
    made = from_shards(states, table)
    assert made.metadata == full.metadata and list(made) == list(full)
    rows = Layout(Mesh({"dp": 2}), [Shard(0)])
    tied = [{"a": part, "b": part} for part in (W[:3], W[3:])]
    both = from_shards(tied, rows)
    assert both["a"] is both["b"]
    hollow = from_shards([specs(state) for state in tied], rows)
    assert hollow["a"] == TensorSpec((5, 3), torch.float32)
    late = from_shards([{"x": 1}, {"x": 1, "w": W}], {"w?": Layout(Mesh({"dp": 1}, [1]), {})})
    assert list(late) == ["x", "w"]
    lazy = from_shards([defer(state) for state in tied], rows)
    assert torch.equal(torch.cat([W]), __import__("fdsd").materialize(gather()(lazy))["a"])


def test_what_has_no_layout_must_be_the_same_everywhere() -> None:
    rows = Layout(Mesh({"dp": 2}), [Shard(0)])
    states = [{"w": W[:3], "n": torch.ones(2), "x": (1, 2)}, {"w": W[3:], "n": torch.ones(2), "x": (1, 2)}]
    made = from_shards(states, {"w": rows})
    assert made["n"] is states[0]["n"] and made["x"] == (1, 2)
    states[1] |= {"n": torch.tensor([1.0, 2.0]), "x": (1, 3)}
    with pytest.raises(SpecMismatch, match=r"'n': no layout.*that of 1 is another.*'x': no layout") as caught:
        from_shards(states, {"w": rows})
    assert "Replicate() on every axis" in str(caught.value)
    with pytest.raises(SpecMismatch, match="'n': no layout"):
        from_shards([{"w": W[:3], "n": torch.ones(2)}, {"w": W[3:], "n": torch.ones(2).int()}], {"w": rows})
    with pytest.raises(UnknownName, match="'n': no layout says where it lies, and only the ranks 0 have it"):
        from_shards([{"w": W[:3], "n": torch.ones(2)}, {"w": W[3:]}], {"w": rows})


def test_all_faults_are_told_at_once() -> None:
    rows = Layout(Mesh({"dp": 2}), [Shard(0)])
    states = [
        {"shape": W[:2], "dtype": W[:3], "missing": W, "dims": W, "kind": W, "parts": W[:1]},
        {"shape": W[3:], "dtype": W[3:].int(), "dims": W[0], "kind": 3, "parts": W[:1]},
    ]
    fused = Layout(Mesh({"dp": 2}), [Shard(0, parts=[2, 3])])
    with pytest.raises(SpecMismatch) as caught:
        from_shards(states, {"parts": fused, "{_...}": rows})
    text = str(caught.value)
    assert "'shape': shards that" not in text  # 2 and 2 rows are those of 4
    for part in (
        "'dtype': the dtypes of the shards differ: 'torch.float32', 'torch.int32'",
        "'missing': ranks 1 have no shard",
        "'dims': shards of 1, 2 dims",
        "'kind': what ranks 1 hold is no tensor",
        "'parts': ",
    ):
        assert part in text
    with pytest.raises(
        SpecMismatch, match=r"'w': shards that .* does not make of \(4, 3\): rank 0 has \(1, 3\) and should"
    ):
        from_shards([{"w": W[:1]}, {"w": W[:3]}], rows)
    with pytest.raises(UnknownName, match="'w': ranks 2 have a shard and are not in the mesh"):
        from_shards([{"w": W[:3]}, {"w": W[3:]}, {"w": W}], rows)
    with pytest.raises(UnknownName, match="no name matches 'z'"):
        from_shards([{"w": W[:3]}, {"w": W[3:]}], {"w": rows, "z": rows})
    replicas = Layout(Mesh({"dp": 2, "tp": 2}), {"dp": Shard(0)})
    with pytest.raises(SpecMismatch, match=r"rank 3 has \(3, 3\) and should have \(2, 3\)"):
        from_shards([{"w": W[:3]}, {"w": W[:3]}, {"w": W[3:]}, {"w": W[:3]}], replicas)


@pytest.mark.parametrize(
    "states, text",
    [
        (3, "not as int"),
        ([OptimState()], "column by column"),
        ({"0": {}}, "whole numbers from 0 on; not by '0'"),
        ({True: {}}, "whole numbers from 0 on"),
    ],
)
def test_no_states(states: Any, text: str) -> None:
    with pytest.raises((Unsupported, SpecMismatch), match=text):
        from_shards(states, ROWS)
