"""Live states over ranks as values: described, captured and kept, of DTensors and FSDP1's flat parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fdsd import ModelSpec, TrainState, capture, concat, describe, materialize, snapshot, specs
from fdsd.algebra.lazy import Lazy
from fdsd.comms.modules import is_dtensor, memory_of, read_modules
from fdsd.layout.layout import Layout
from tests.helpers.models import make
from tests.helpers.ranks import run_ranks
from tests.multiprocess.test_fsdp1 import fsdp, trainable
from tests.multiprocess.test_modules import NUM_RANKS, WAYS

NAME = "net" if torch.__version__ >= (2, 7) else "wide"  # uneven shards in two dims came later

MODELS: dict[str, Callable[[], Any]] = {
    **{way: lambda way=way: WAYS[way](trainable(make(NAME))) for way in ("ddp", "fsdp2", "fsdp2 and tp", "hsdp")},
    "fsdp1": lambda: fsdp(trainable(make(NAME))),
    "fsdp1, flat": lambda: fsdp(trainable(make(NAME)), orig=False),
    "fsdp1, whole": lambda: fsdp(trainable(make(NAME)), "NO_SHARD"),
}


def ranks_of(way: str) -> int:
    return NUM_RANKS.get(way, 2)


def stepped(model: Any) -> torch.optim.Optimizer:
    """An optimizer whose state is there; gradients are set by hand."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def whole(state: TrainState) -> TrainState:
    made: TrainState = materialize(state, group=dist.group.WORLD)
    return made


def columns(state: TrainState) -> dict[Any, dict[str, Any]]:
    """Copies of all values: those of the model, and of each slot."""
    assert state.optim is not None
    found = {"model": state.model, **state.optim.slots}
    return {
        key: {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in column.items()}
        for key, column in found.items()
    }


def assert_same(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name


@pytest.mark.parametrize("way", MODELS)
def test_a_captured_model_is_the_unwrapped_one(way: str) -> None:
    def body(rank: int) -> None:
        state = capture(MODELS[way]())
        assert state.optim is None and not state.extra
        assert_same(whole(state).model, make(NAME).state_dict())
        assert state.model["head.weight"] is state.model["embed.weight"]

    run_ranks(body, ranks_of(way))


@pytest.mark.parametrize("way", MODELS)
def test_a_captured_optimizer_is_that_of_the_unwrapped_model(way: str) -> None:
    def body(rank: int) -> None:
        model = MODELS[way]()
        state = whole(capture(model, stepped(model)))
        plain = trainable(make(NAME))
        expected = capture(plain, stepped(plain))
        assert_same(state.model, expected.model)
        assert state.optim is not None and expected.optim is not None
        assert {*state.optim.slots} == {*expected.optim.slots}
        for slot, column in expected.optim.slots.items():
            found = {name: state.optim.slots[slot][name] for name in column}
            assert_same(found, column)

    run_ranks(body, ranks_of(way))


@pytest.mark.parametrize("way", MODELS)
def test_a_snapshot_stays_while_training_goes_on(way: str) -> None:
    def body(rank: int) -> None:
        model = MODELS[way]()
        optimizer = stepped(model)
        live = capture(model, optimizer)
        kept = snapshot(live)
        before = columns(whole(live))
        with torch.no_grad():
            for one in read_modules(model).tensors.values():
                memory_of(one).fill_(7)
        stepped(model)
        for state in optimizer.state.values():
            for value in state.values():
                value.fill_(9) if isinstance(value, torch.Tensor) else None
        after, now = columns(whole(kept)), columns(whole(live))
        assert {*after} == {*before} == {"model", "step", "exp_avg", "exp_avg_sq"}
        for key, column in before.items():
            assert_same(after[key], column)
            assert all(
                not torch.equal(now[key][name], value)
                for name, value in column.items()
                if isinstance(value, torch.Tensor)
            )
        assert kept.model["head.weight"] is kept.model["embed.weight"]
        for name, leaf in kept.model.items():
            assert type(leaf) is type(live.model[name]), name
            if is_dtensor(leaf):
                assert (leaf.device_mesh, leaf.placements) == (
                    live.model[name].device_mesh,
                    live.model[name].placements,
                )

    run_ranks(body, ranks_of(way))


@pytest.mark.parametrize("way", MODELS)
def test_a_description_is_that_of_the_unwrapped_model_with_layouts(way: str) -> None:
    def body(rank: int) -> tuple[str, bool]:
        model = MODELS[way]()
        spec = describe(model, stepped(model))
        plain = trainable(make(NAME))
        expected = describe(plain, stepped(plain))
        assert list(spec.entries) == list(expected.entries)
        for name, entry in spec.entries.items():
            other = expected.entries[name]
            assert (entry.spec, entry.kind, entry.persistent, entry.trainable, entry.tied_to) == (
                other.spec,
                other.kind,
                other.persistent,
                other.trainable,
                other.tied_to,
            )
        (groups,), (others,) = spec.optimizers, expected.optimizers
        assert [set(group.fqns) for group in groups] == [set(group.fqns) for group in others]
        shapes = {name: value for name, value in specs(capture(model).model).items() if name in spec.specs()}
        assert shapes == dict(spec.specs())
        assert ModelSpec.from_json(spec.to_json()).entries == spec.entries
        return spec.to_json(), any(entry.layout for entry in spec.entries.values())

    results = run_ranks(body, ranks_of(way))
    assert all(has_layouts == (way != "ddp") for _, has_layouts in results)
    if way in ("fsdp2", "hsdp", "fsdp1"):
        assert len({text for text, _ in results}) == 1


def test_layouts_of_a_description() -> None:
    def body(rank: int) -> None:
        entry = describe(MODELS["fsdp2"]()).entries["blocks.0.up.weight"]
        assert Layout.from_data(entry.layout).holders(entry.spec.shape).ranks == ((0,), (1,), (2,))
        flat = describe(fsdp(make("mlp"), nested=False)).entries["0.weight"].layout
        assert [size for _, size, _ in flat["flattened"]] and flat["flattened"][0][0] == 0
        assert sum(size for _, size, _ in flat["flattened"]) == 35

    run_ranks(body, 3)


def test_states_of_meta_models_over_ranks() -> None:
    def body(rank: int) -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        assert describe(model).entries["0.weight"].spec.shape == (6, 4)
        state = capture(model)
        assert is_dtensor(state.model["0.weight"]) and state.model["0.weight"].is_meta
        with pytest.raises(ValueError, match=r"snapshot: '0.bias', '0.weight', '1.bias', '1.weight' have no data"):
            snapshot(state)

    run_ranks(body, 2)


def test_expressions_over_ranks_are_kept_too() -> None:
    """What a pipeline has made of live tensors is an expression over them; its snapshot reads the copies."""

    def body(rank: int, way: str) -> None:
        model = MODELS[way]()
        fused = concat(["blocks.0.up.weight", "blocks.1.up.weight"], "up", dim=0)(capture(model).model)
        kept = snapshot(fused)
        with torch.no_grad():
            for one in read_modules(model).tensors.values():
                memory_of(one).fill_(7)
        plain = make(NAME).state_dict()
        expected = torch.cat([plain["blocks.0.up.weight"], plain["blocks.1.up.weight"]])
        assert torch.equal(materialize(kept, group=dist.group.WORLD)["up"], expected)
        assert (materialize(fused, group=dist.group.WORLD)["up"] == 7).all()

    for way in ("fsdp2", "fsdp1"):
        run_ranks(body, ranks_of(way), way)


def test_lazy_leaves_are_lazy() -> None:
    def body(rank: int) -> None:
        state = capture(MODELS["fsdp1"]())
        assert isinstance(state.model["blocks.0.up.weight"], Lazy)
        assert isinstance(snapshot(state).model["blocks.0.up.weight"], Lazy)

    run_ranks(body, 2)
