"""How a checkpoint is cut into files: the plan, and the names of the files.

Sizes, order and names are those of Hugging Face's libraries. Nothing here touches files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsIndex

from fdsd.data.sizes import parse_size
from fdsd.data.spec import TensorSpec

__all__ = ["INDEX_NAME", "SINGLE_NAME", "plan_shards", "shard_names"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def plan_shards(specs: Mapping[str, TensorSpec], max_shard_size: str | SupportsIndex) -> list[list[str]]:
    """Cut a checkpoint into files: names in order, a new file where the next tensor would not fit.

    Args:
        specs: The tensors that are stored, in order.
        max_shard_size: The most bytes of tensors in one file. A larger tensor has a file for itself.

    Returns:
        The names in each file; one empty list for no tensors.

    >>> import torch
    >>> a = TensorSpec((4,), torch.int8)
    >>> plan_shards({"a": a, "b": a, "c": a}, 8)
    [['a', 'b'], ['c']]
    """
    limit = parse_size(max_shard_size, "max_shard_size", least=1)
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, spec in specs.items():
        if spec.nbytes > limit:
            shards.append([name])
            continue
        if filled + spec.nbytes > limit:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += spec.nbytes
    return [*shards, current] if current or not shards else shards


def shard_names(count: int) -> list[str]:
    """Give the names of ``count`` files as Hugging Face's libraries name them.

    >>> shard_names(2)
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    >>> shard_names(1)
    ['model.safetensors']
    """
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
