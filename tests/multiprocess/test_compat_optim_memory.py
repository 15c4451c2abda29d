"""Optimizers whose parameters FSDP1 has flattened, but not cut; and sharded memory that was made to be loaded into."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fdsd.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tests.helpers.audit_optimizers import FORMS, FULL, adam, given, goes_on, reading, writing
from tests.helpers.audit_values import case, same
from tests.helpers.audited import Frozen, build, kinds_of, plain, train
from tests.helpers.optimizers import told_optimizer
from tests.helpers.ranks import run_ranks


def whole_flats(rank: int, uses_originals: bool, strategy: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def make(salt: int) -> tuple[Any, Any]:
        options: dict[str, Any] = {"use_orig_params": uses_originals, "device_id": torch.device("cpu")}
        options["auto_wrap_policy"] = ModuleWrapPolicy({Frozen})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 is deprecated, and one rank has nothing to shard
            model = FullyShardedDataParallel(plain(salt), sharding_strategy=ShardingStrategy[strategy], **options)
        return model, adam(model.parameters())

    for way, flat in FORMS:
        with case(way, flat):
            model, optimizer = make(1)
            other, new = make(1)
            train(model, optimizer)
            train(other, new, 2)
            state: Any = get_optimizer_state_dict(model, optimizer, options=reading(way, flat))
            set_model_state_dict(other, get_model_state_dict(model, options=FULL), options=FULL)
            set_optimizer_state_dict(other, new, given(state, way, rank), options=writing(way, flat))
            assert told_optimizer(new) == told_optimizer(optimizer)
            same(get_optimizer_state_dict(other, new, options=reading(way, flat)), state)
            goes_on((model, optimizer), (other, new))


@pytest.mark.parametrize("n, strategy", [(1, "FULL_SHARD"), (2, "NO_SHARD")])
@pytest.mark.parametrize("uses_originals", [False, True])
def test_flat_parameters_that_are_whole(uses_originals: bool, n: int, strategy: str) -> None:
    run_ranks(whole_flats, n, uses_originals, strategy, timeout=60)


def memory_of(optimizer: Any) -> list[int]:
    found = [value for row in optimizer.state.values() for value in row.values()]
    return [getattr(value, "_local_tensor", value).data_ptr() for value in found]


def adopted(rank: int, n: int) -> None:
    """Torch's own way with a file: what is got is filled, and set again; no second state is needed."""
    for kind in kinds_of(n):
        with case(kind):
            model, other = build(kind, 1), build(kind, 1)
            optimizer, second = adam(model.parameters()), adam(other.parameters())
            state: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions())
            values = [value for row in state["state"].values() for value in row.values()]
            if any(hasattr(value, "local_shards") for value in values) or kind.is_fsdp1:
                continue  # FSDP1 has it flattened, and shows it otherwise
            set_optimizer_state_dict(model, optimizer, state)
            set_optimizer_state_dict(other, second, state)
            shown = [getattr(value, "_local_tensor", value).data_ptr() for value in values]
            assert memory_of(optimizer) == shown
            assert not {ptr for ptr in memory_of(second) if ptr} & set(shown)
            before = told_optimizer(optimizer)
            train(other, second)
            assert told_optimizer(optimizer) == before


@pytest.mark.parametrize("n", [2, 3, 4])
def test_memory_to_load_into_is_adopted(n: int) -> None:
    torch.compile(nn.Identity(), backend="eager")  # its imports, once for all ranks
    run_ranks(adopted, n, n, timeout=60)
