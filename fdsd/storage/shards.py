"""How a checkpoint is cut into files: sizes as people write them, the plan, and the names of the files.

Sizes, order and names are those of Hugging Face's libraries. Nothing here touches files.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import SupportsIndex

from fdsd.data.errors import SpecMismatch
from fdsd.data.spec import TensorSpec

__all__ = ["INDEX_NAME", "SINGLE_NAME", "parse_size", "plan_shards", "shard_names"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(size: str | SupportsIndex, what: str = "max_shard_size") -> int:
    """Read a number of bytes: a whole number, or text such as ``"5GB"`` or ``"1.5 GiB"``.

    Args:
        size: The size; ``GB`` is 10**9 bytes, ``GiB`` is 2**30.
        what: The argument's name, for messages.

    Raises:
        SpecMismatch: It is no size above 0.

    >>> parse_size("5GB"), parse_size("1.5 KiB"), parse_size(7)
    (5000000000, 1536, 7)
    """
    count = None
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([A-Za-z]*)\s*", size, re.ASCII)
        if match and match[2].upper() in _UNITS:
            whole, _, part = match[1].partition(".")
            unit = _UNITS[match[2].upper()]
            count = int(whole) * unit + (int(part) * unit // 10 ** len(part) if part else 0)
    elif not isinstance(size, bool):
        try:
            count = operator.index(size)
        except TypeError:
            count = None
    if count is None or count <= 0:
        raise SpecMismatch(
            f"{what}={size!r} is no size; write a number of bytes above 0, or text such as '5GB', '1.5GiB'."
        )
    return count


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
    limit = parse_size(max_shard_size)
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
