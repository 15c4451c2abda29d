"""How a checkpoint is cut into files."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd.data.errors import SpecMismatch
from fdsd.data.spec import TensorSpec
from fdsd.storage.shards import plan_shards, shard_names


@pytest.mark.parametrize("size", ["", 0, "0.0001KB", 1.5])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(SpecMismatch, match=r"max_shard_size=.* is no size.*'5GB'"):
        plan_shards({}, size)


sizes = st.lists(st.integers(0, 30), max_size=12)


@given(sizes, st.integers(1, 40))
def test_every_tensor_is_in_one_shard_and_no_shard_is_too_large(numel: list[int], limit: int) -> None:
    specs = {f"t{i}": TensorSpec((n,), torch.int8) for i, n in enumerate(numel)}
    shards = plan_shards(specs, limit)
    assert sorted(name for names in shards for name in names) == sorted(specs)
    assert all(names for names in shards) or shards == [[]]
    for names in shards:
        assert names == [name for name in specs if name in names]
        assert len(names) == 1 or sum(specs[name].nbytes for name in names) <= limit


@given(sizes, st.integers(1, 40))
def test_a_shard_is_closed_only_when_the_next_tensor_would_not_fit(numel: list[int], limit: int) -> None:
    specs = {f"t{i}": TensorSpec((n,), torch.int8) for i, n in enumerate(numel)}
    small = [names for names in plan_shards(specs, limit) if sum(specs[name].nbytes for name in names) <= limit]
    for names, following in itertools.pairwise(small):
        assert sum(specs[name].nbytes for name in [*names, following[0]]) > limit


def test_the_names_of_the_files() -> None:
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(3)[1] == "model-00002-of-00003.safetensors"
