"""Snapshots in one process: every kind of leaf, ties, containers, and what has no data."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd import OptimState, StateDict, TensorSpec, TrainState, concat, defer, materialize, snapshot
from fdsd.algebra.lazy import Lazy
from fdsd.data.groups import ParamGroup
from fdsd.data.ties import ties
from fdsd.errors import SpecMismatch, Unsupported
from fdsd.layout.layout import Layout
from fdsd.layout.mesh import Mesh
from fdsd.layout.placement import Shard
from fdsd.layout.sharded import Sharded
from fdsd.testing import assert_same, states


def ruin(state: Any) -> None:
    """Write over every tensor of a state, in place."""
    with torch.no_grad():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.untyped_storage().fill_(1)


def copied(state: Any) -> dict[str, Any]:
    """Copies that are tied as the state is."""
    owners = {name: group[0] for group in ties(state) for name in group}
    made = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    return {name: made[owners.get(name, name)] for name in made}


def tensors(state: Any) -> StateDict[Any]:
    """Without the objects, whose copies are other objects."""
    return StateDict({name: leaf for name, leaf in state.items() if isinstance(leaf, torch.Tensor)})


@given(states())
def test_a_snapshot_is_what_the_state_was(state: StateDict[Any]) -> None:
    before = copied(state)
    kept = snapshot(state)
    ruin(state)
    assert_same(tensors(kept), tensors(before))
    assert ties(kept) == ties(state)
    assert [(name, type(leaf)) for name, leaf in kept.items()] == [(name, type(leaf)) for name, leaf in before.items()]
    assert kept.metadata == state.metadata


@given(states())
def test_a_snapshot_of_lazy_tensors_is_what_the_state_was(state: StateDict[Any]) -> None:
    before = copied(state)
    kept = snapshot(defer(state))
    ruin(state)
    assert_same(tensors(materialize(kept)), tensors(before))


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64]))
def test_dtypes_and_strides_are_kept(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype).t()
    made = snapshot({"w": tensor})["w"]
    assert made.stride() == tensor.stride() and made.dtype == dtype
    assert made.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert torch.equal(made.t().view(torch.uint8), tensor.t().view(torch.uint8))


def test_a_view_is_copied_alone() -> None:
    big = torch.arange(1000.0)
    made = snapshot({"w": big[3:7], "wide": big[:1].expand(5)})
    assert made["w"].untyped_storage().nbytes() == 16 and made["w"].tolist() == [3, 4, 5, 6]
    assert made["wide"].tolist() == [0.0] * 5


def test_conjugates_and_negatives_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    made = snapshot({"c": tensor.conj(), "n": tensor.conj().imag})
    assert made["c"].tolist() == [1 - 2j, 3 + 4j] and not made["c"].is_conj()
    assert made["n"].tolist() == [-2.0, 4.0] and not made["n"].is_neg()


def test_parameters_become_tensors_without_gradients() -> None:
    made = snapshot({"w": torch.nn.Parameter(torch.ones(2))})["w"]
    assert type(made) is torch.Tensor and not made.requires_grad


def test_what_is_no_tensor_is_copied_too() -> None:
    live = {"list": [torch.zeros(1), 3], "pair": (1, torch.zeros(1)), "bytes": io.BytesIO(b"abc"), "none": None}
    kept = snapshot({"a._extra_state": live, "b._extra_state": live["list"]})
    live["list"][0].fill_(7)  # type: ignore[index]
    live["list"].append(4)  # type: ignore[union-attr]
    live["bytes"].write(b"xyz")  # type: ignore[union-attr]
    extra = kept["a._extra_state"]
    assert extra["list"] == [torch.zeros(1), 3] and extra["pair"][0] == 1 and extra["none"] is None
    assert extra["bytes"].getvalue() == b"abc"
    assert extra["list"][0] is kept["b._extra_state"][0]  # one tensor in two places is one copy


def test_what_cannot_be_copied_is_named() -> None:
    generator = (i for i in range(3))
    with pytest.raises(Unsupported, match=r"snapshot: 'a._extra_state' holds an object of type generator"):
        snapshot({"a._extra_state": generator})


def test_train_states_keep_their_parts() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    optim = OptimState.from_torch(optimizer.state_dict(), ["weight", "bias"])
    live = TrainState(model.state_dict(), optim.replace(extra={"note": torch.zeros(1)}), {"rng": torch.zeros(2)})
    kept = snapshot(live)
    before = optim.slots["exp_avg"]["bias"].clone()
    ruin(optim.slots["exp_avg"])
    ruin({"lr": optimizer.param_groups[0]["lr"], "rng": live.extra["rng"], "note": live.optim.extra["note"]})  # type: ignore[union-attr]
    assert kept.optim is not None
    assert torch.equal(kept.optim.slots["exp_avg"]["bias"], before)
    assert kept.optim.groups[0].options["lr"].item() == pytest.approx(0.1)
    assert kept.extra["rng"].tolist() == [0, 0] and kept.optim.extra["note"].tolist() == [0]
    assert [group.fqns for group in kept.optim.groups] == [("weight", "bias")]
    assert kept.model.metadata == live.model.metadata


def test_groups_keep_that_they_are_named() -> None:
    group = ParamGroup(["w"], {"lr": 0.1}, named=True)
    assert snapshot(OptimState({}, [group])).groups == (group,)


def test_expressions_are_kept_as_they_are() -> None:
    live = {"a": torch.zeros(2), "b": torch.ones(2)}
    fused = concat(["a", "b"], "c", dim=0)(defer(live))
    kept = snapshot(fused)
    ruin(live)
    assert isinstance(kept["c"], Lazy) and type(kept["c"].op) is type(fused["c"].op)
    assert materialize(kept)["c"].tolist() == [0, 0, 1, 1]


def test_long_chains_are_copied_without_recursion() -> None:
    from fdsd.algebra.ops import Slice

    node = defer({"w": torch.zeros(1)})["w"]
    for _ in range(5000):
        node = Lazy(Slice(0, 0, 1), [node])
    assert snapshot({"w": node})["w"].spec == node.spec


def test_sharded_tensors_stay_sharded() -> None:
    layout = Layout(Mesh({"dp": 2}), [Shard(0)])
    whole, shards = torch.arange(3), {0: torch.tensor([5, 6]), 1: torch.tensor([7])}
    state = {
        "whole": Sharded(TensorSpec((3,), torch.int64), layout, whole=whole),
        "shards": Sharded(TensorSpec((3,), torch.int64), layout, shards=shards),
        "lazy": defer({"x": Sharded(TensorSpec((3,), torch.int64), layout, shards=shards)})["x"],
    }
    kept = snapshot(state)
    ruin({"whole": whole, **{str(rank): shard for rank, shard in shards.items()}})
    assert [type(leaf) for leaf in kept.values()] == [type(leaf) for leaf in state.values()]
    assert kept["whole"].layout == layout and kept["whole"].shard(1).tolist() == [2]
    assert kept["shards"].whole().tolist() == [5, 6, 7]
    assert materialize({"lazy": kept["lazy"]})["lazy"].tolist() == [5, 6, 7]


@pytest.mark.parametrize("of", ["shards", "whole", "lazy"])
def test_tied_sharded_tensors_stay_tied(of: str) -> None:
    layout = Layout(Mesh({"dp": 2}), [Shard(0)])
    spec = TensorSpec((3,), torch.int64)
    whole = torch.tensor([5, 6, 7])
    leaf = {
        "shards": Sharded(spec, layout, shards={0: whole[:2], 1: whole[2:]}),
        "whole": Sharded(spec, layout, whole=whole),
        "lazy": Sharded(spec, layout, whole=defer({"x": whole})["x"]),
    }[of]
    other = Sharded(spec, layout, shards={0: torch.tensor([1, 2]), 1: torch.tensor([3])})
    kept = snapshot({"a": leaf, "b": leaf, "c": other})
    assert kept["a"] is kept["b"] is not leaf and kept["c"] is not kept["a"]
    ruin({"whole": whole})
    read = materialize({name: leaf.whole() for name, leaf in kept.items()})
    assert [read[name].tolist() for name in "ac"] == [[5, 6, 7], [1, 2, 3]]
    assert ties(kept) == ties({"a": leaf, "b": leaf, "c": other}) == [("a", "b")]


def test_the_meta_device_is_no_place_for_a_copy() -> None:
    with pytest.raises(Unsupported, match=r"snapshot: the meta device holds no data.*specs\(\)"):
        snapshot({"w": torch.ones(2)}, device="meta")


def test_what_has_no_data_is_named() -> None:
    state = {
        "spec": TensorSpec((2,), torch.float32),
        "meta": torch.empty(2, device="meta"),
        "lazy": defer({"w": torch.empty(2, device="meta")})["w"],
        "real": torch.ones(1),
    }
    with pytest.raises(SpecMismatch, match=r"snapshot: 'lazy', 'meta', 'spec' have no data .*to_empty"):
        snapshot(state)


def test_other_tensors_are_copied_by_their_own_code() -> None:
    sparse = torch.eye(3).to_sparse()
    made = snapshot({"s": sparse})["s"]
    assert made is not sparse and torch.equal(made.to_dense(), torch.eye(3))

    class Mine(torch.Tensor):
        pass

    mine = torch.ones(2).as_subclass(Mine)
    made = snapshot({"m": mine})["m"]
    mine.fill_(7)
    assert type(made) is Mine and made.tolist() == [1, 1]


def test_pinned_memory_needs_an_accelerator() -> None:
    if torch.cuda.is_available():
        assert snapshot({"w": torch.ones(2)}, pin=True)["w"].is_pinned()
    else:
        with pytest.raises(Unsupported, match=r"no pinned memory here.*Leave pin out"):
            snapshot({"w": torch.ones(2)}, pin=True)
    with pytest.raises(Unsupported, match="pinned memory is the CPU's; with device='meta' leave pin out"):
        snapshot({"w": torch.ones(2)}, device="meta", pin=True)


@pytest.mark.parametrize("wrong", [torch.nn.Linear(1, 1), [torch.ones(1)], None])
def test_what_is_no_state(wrong: Any) -> None:
    with pytest.raises(Unsupported, match="snapshot: it takes a mapping"):
        snapshot(wrong)
