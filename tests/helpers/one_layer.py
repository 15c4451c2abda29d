"""The smallest model over ranks, with an optimizer that has stepped; what a call is refused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fdsd.errors import FdsdError

__all__ = ["BROADCAST", "FULL", "built", "refused", "stepped"]

FULL: dict[str, Any] = {"full_state_dict": True}
BROADCAST: dict[str, Any] = {**FULL, "broadcast_from_rank0": True}


def built(kind: str) -> Any:
    """Make one layer: ``"fsdp2"``, ``"fsdp1"``, ``"fsdp1 flat"``, or plain."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    if kind == "fsdp2":
        return fully_shard(model)
    if kind.startswith("fsdp1"):
        uses_originals = kind == "fsdp1"
        return FullyShardedDataParallel(model, use_orig_params=uses_originals, device_id=torch.device("cpu"))
    return model


def stepped(model: Any, lr: float = 0.1) -> Any:
    """Make an optimizer that has momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def refused(action: Callable[[], Any]) -> str:
    """Give the error that a call raises, with its class."""
    with pytest.raises(FdsdError) as raised:
        action()
    return f"{type(raised.value).__name__}: {raised.value}"
