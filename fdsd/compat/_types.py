"""The names of types that torch's module exports, for annotations in the code of its users. No behaviour."""

from __future__ import annotations

from typing import Any, Union

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "ValueType",
]

FQNS_T = set[str]
PrimitiveType = Union[DTensor, ShardedTensor, torch.Tensor, int, float, str]  # noqa: UP007  # an alias at run time
ValueType = Union[  # noqa: UP007
    PrimitiveType, list[PrimitiveType], tuple[PrimitiveType, ...], dict[str, Any]
]
DictValueType = dict[str, ValueType]
ListDictValueType = list[DictValueType]
OptimizerStateType = dict[str, Union[DictValueType, ListDictValueType]]  # noqa: UP007
