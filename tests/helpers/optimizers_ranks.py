"""A model with given gradients, trained in one process as the oracle of ranks; and values delivered to ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fdsd import OptimState
from fdsd.comms.modules import read_modules
from fdsd.comms.optimizer_targets import slot_targets
from fdsd.comms.optimizers import read_optimizers
from tests.helpers.optimizers import by_name
from tests.helpers.placed import part_of

__all__ = ["SHAPES", "Small", "delivered", "grads", "reference", "two_groups"]

SHAPES: dict[str, tuple[int, ...]] = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (1, 7), "c": (4, 2, 3)}


class Small(nn.Module):
    """A loss whose gradients are given, since FSDP1 has to make them itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.a, self.b = nn.Linear(3, 5), nn.Linear(7, 1, bias=False)
        self.c = nn.Parameter(torch.randn(4, 2, 3))

    def forward(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        params = {"a.weight": self.a.weight, "a.bias": self.a.bias, "b.weight": self.b.weight, "c": self.c}
        return torch.stack([(params[name] * weight).sum() for name, weight in weights.items()]).sum()


def grads(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def two_groups(case: str, params: dict[str, Any]) -> torch.optim.Optimizer:
    names = list(params)
    rows = [{"params": [params[n] for n in names[:2]]}, {"params": [params[n] for n in names[2:]], "lr": 0.05}]
    return by_name(case).make(rows)


def reference(case: str, steps: int) -> tuple[OptimState, dict[str, torch.Tensor]]:
    """The state and the parameters after training in one process."""
    model = Small()
    optimizer = two_groups(case, dict(model.named_parameters()))
    for step in range(steps):
        for name, p in model.named_parameters():
            p.grad = grads(step)[name]
        optimizer.step()
    return read_optimizers(read_modules(model), optimizer), {n: p.detach() for n, p in model.named_parameters()}


def delivered(state: OptimState, modules: Any, optimizers: Any, rank: int) -> OptimState:
    """Cut whole values for this rank and put them where their targets are."""
    slots: dict[Any, dict[str, Any]] = {}
    targets = slot_targets(modules, optimizers, state)
    for slot, column in state.slots.items():
        for fqn, value in column.items():
            target = targets.get((slot, fqn))
            if target is not None:
                local = part_of(target.flatten(value).to(target.spec.dtype), target.placement, rank)
                if local is None:
                    continue
                if target.memory is not None:
                    assert target.memory.shape == local.shape
                    local = target.memory.copy_(local)
                value = target.finished(local)
            slots.setdefault(slot, {})[fqn] = value
    return state.replace(slots=slots)
