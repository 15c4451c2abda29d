"""The drop-in over real ranks: models and options that differ by rank, and what ranks find out one by one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import fdsd
from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from fdsd.errors import FdsdError
from tests.helpers.ranks import run_ranks

FULL = {"full_state_dict": True}
BROADCAST = {"full_state_dict": True, "broadcast_from_rank0": True}


def refused(action: Any) -> str:
    with pytest.raises(FdsdError) as raised:
        action()
    return f"{type(raised.value).__name__}: {raised.value}"


class Stage(nn.Module):
    """One stage of a pipeline, of its own name."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.add_module(f"stage{number}", nn.Linear(2, 2))
        self.register_buffer(f"scale{number}", torch.tensor(0.0))


class Halving(nn.Linear):
    """Reads its weight by code of its own."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict({**state, prefix + "weight": state[prefix + "weight"] / 2}, prefix, *rest)


def whole() -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for i in (0, 1, 2):
        made |= {f"stage{i}.weight": torch.full((2, 2), i + 1.0), f"stage{i}.bias": torch.full((2,), i + 1.0)}
        made[f"scale{i}"] = torch.full((1,), i + 1.0)  # as old files have what has no dims
    return made


def load_stages(rank: int, strict: bool) -> Any:
    model: Any = Stage(rank)
    options = StateDictOptions(**BROADCAST, strict=strict)
    given = {name: value for name, value in whole().items() if not name.endswith("2")}
    if rank == 2:
        model = nn.ModuleDict({"stage2": Halving(2, 2)})
    told = set_model_state_dict(model, given if rank == 0 else {}, options=options)
    return (
        list(told.missing_keys),
        list(told.unexpected_keys),
        [value.tolist() for value in model.state_dict().values()],
    )


@pytest.mark.parametrize("strict", [True, False])
def test_models_may_differ_by_rank(strict: bool) -> None:
    results = run_ranks(load_stages, 3, strict)
    for rank, (missing, unexpected, values) in enumerate(results):
        one = rank + 1.0
        weight = one / 2 if rank == 2 else one
        assert (missing, unexpected) == ([], [])
        assert values == [[[weight] * 2] * 2, [one] * 2] or values == [one, [[weight] * 2] * 2, [one] * 2]


def load_stages_with_strays(rank: int) -> Any:
    model = Stage(rank)
    given = {**whole(), "stray": torch.ones(1)}
    strict, lax = (StateDictOptions(**BROADCAST, strict=strict) for strict in (True, False))
    text = refused(lambda: set_model_state_dict(model, given if rank == 0 else {}, options=strict))
    return text, list(set_model_state_dict(model, given if rank == 0 else {}, options=lax).unexpected_keys)


def test_only_what_no_rank_expects_is_unexpected() -> None:
    results = run_ranks(load_stages_with_strays, 2)
    stray = ["stage2.weight", "stage2.bias", "scale2", "stray"]
    for text, unexpected in results:
        assert unexpected == stray and all(f'"{name}"' in text for name in stray) and "stage1" not in text


OPTIONS = {
    "broadcast": (BROADCAST, FULL),
    "full": (FULL, {}),
    "strict": ({**FULL, "strict": False}, FULL),
    "bad": (FULL, {"broadcast_from_rank0": True}),
}


def load_with_options(rank: int, name: str) -> Any:
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.weight)
    fully_shard(model)
    options = StateDictOptions(**OPTIONS[name][rank])
    given = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    text = refused(lambda: set_model_state_dict(model, given, options=options))
    return text, model.weight.full_tensor().tolist()  # type: ignore[operator]


@pytest.mark.parametrize("name", list(OPTIONS))
def test_options_that_differ_are_one_error(name: str) -> None:
    (first, weight), (second, other) = run_ranks(load_with_options, 2, name)
    assert first == second and first.startswith("RankDisagreement: ") and "StateDictOptions(" in first
    assert weight == other == [[0.0, 0.0], [0.0, 0.0]]


def load_optimizer_with_options(rank: int) -> str:
    model = nn.Linear(2, 2)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
    options = StateDictOptions(**OPTIONS["broadcast"][rank])
    given: Any = {"state": {}, "param_groups": [{"params": ["weight", "bias"], "lr": 7.0}]}
    text = refused(lambda: set_optimizer_state_dict(model, optimizer, given, options=options))
    assert optimizer.param_groups[0]["lr"] == 0.1 * (rank + 1)
    return text


def test_options_for_optimizers_that_differ_are_one_error() -> None:
    first, second = run_ranks(load_optimizer_with_options, 2)
    assert first == second and first.startswith("RankDisagreement: ")


class Refusing(nn.Linear):
    """Takes no extra state on rank 1, not even its own."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        if dist.get_rank() == 1:
            raise ValueError("not mine")


def load_what_one_rank_refuses(rank: int, kind: str) -> Any:
    model: Any = nn.Sequential(nn.Linear(1, 1, bias=False), Refusing(1, 1) if kind == "extra" else nn.Linear(1, 1))
    if kind == "expanded":
        model.register_buffer("wide", torch.zeros(1).expand(3) if rank == 1 else torch.zeros(3))
    nn.init.zeros_(model[0].weight)
    fully_shard(model)
    given = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in whole_of(kind).items()
    }
    options = StateDictOptions(**BROADCAST)
    text = refused(lambda: set_model_state_dict(model, given if rank == 0 else {}, options=options))
    return text, model[0].weight.full_tensor().item()


def whole_of(kind: str) -> dict[str, Any]:
    made: dict[str, Any] = {"0.weight": torch.ones(1, 1), "1.weight": torch.ones(1, 1), "1.bias": torch.ones(1)}
    return {**made, **({"1._extra_state": 1} if kind == "extra" else {"wide": torch.ones(3)})}


@pytest.mark.parametrize(
    ("kind", "words"), [("extra", "Rank 1: ValueError: not mine"), ("expanded", "'wide' has several")]
)
def test_what_one_rank_refuses_changes_nothing_on_any(kind: str, words: str) -> None:
    (first, weight), (second, other) = run_ranks(load_what_one_rank_refuses, 2, kind)
    assert first == second and words in first and weight == other == 0.0


def round_trip_without_shards(rank: int, strategy: str, originals: bool, full: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a strategy that changes on one rank, or is about to go
        model = FullyShardedDataParallel(
            nn.Linear(3, 3),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=originals,
            device_id=torch.device("cpu"),
        )
    options = StateDictOptions(full_state_dict=full)
    state = {name: value.clone() + 1 for name, value in get_model_state_dict(model, options=options).items()}
    assert all(type(value) is torch.Tensor for value in state.values())
    told = set_model_state_dict(model, state, options=options)
    found = get_model_state_dict(model, options=options)
    return list(told.missing_keys), all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "FULL_SHARD"), (2, "NO_SHARD")])
def test_flat_parameters_that_are_not_cut_give_and_take_plain_tensors(ranks: int, strategy: str) -> None:
    for originals in (True, False):
        for full in (True, False):
            assert run_ranks(round_trip_without_shards, ranks, strategy, originals, full) == [([], True)] * ranks


def restore_without_group(rank: int) -> Any:
    source, target = (nn.Linear(4, 4, bias=False) for _ in range(2))
    nn.init.zeros_(target.weight)
    fully_shard(source)
    state = {**fdsd.capture(source).model, "first": torch.ones(1)}
    model = nn.Module()
    model.register_buffer("first", torch.zeros(1))
    model.register_parameter("weight", target.weight)
    with pytest.raises(FdsdError, match="parts of 'weight' are held by other ranks: give group=") as raised:
        fdsd.restore(state, model)
    return getattr(raised.value, "__notes__", []), [value.sum().item() for value in model.state_dict().values()]


def test_a_group_that_was_forgotten_is_told_before_anything_is_written() -> None:
    assert run_ranks(restore_without_group, 2) == [([], [0.0, 0.0])] * 2
