"""Small models that have all that a state dict can meet; their values are all different."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "Block", "Counter", "Net", "filled", "make"]


class Counter(nn.Module):
    """Has an extra state, and nothing else but a parameter."""

    def __init__(self, note: Any = None) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.note = note

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


class Block(nn.Module):
    """Two layers of uneven sizes, and a submodule that is called like the segment of a wrapper."""

    def __init__(self, width: int = 5, inner: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.norm = nn.LayerNorm(inner)
        self.module = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.module(self.norm(self.up(x)).relu())


class Net(nn.Module):
    """Tied embeddings, buffers of both kinds, BatchNorm, an extra state, a frozen part, nesting; a 0-dim parameter.

    Args:
        scalar: Whether there is a 0-dim parameter, which FSDP1 refuses.
    """

    scale: torch.Tensor
    cache: torch.Tensor

    def __init__(self, width: int = 5, rows: int = 6, depth: int = 2, *, inner: int = 7, scalar: bool = False) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(() if scalar else (1,)))
        self.embed = nn.Embedding(rows, width)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(4), persistent=False)
        self.blocks = nn.ModuleList([Block(width, inner) for _ in range(depth)])
        self.batch = nn.BatchNorm1d(width)
        self.counter = Counter({"seen": 3})
        self.adapter = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.temperature
        for block in self.blocks:
            x = block(x)
        x = self.adapter(self.batch(x) * self.counter.gain.sum() * self.scale.sum() + self.cache.sum())
        logits: torch.Tensor = self.head(x)
        return logits


def filled(model: nn.Module, start: int = 1) -> nn.Module:
    """Give each element of a model a number of its own."""
    seen: set[int] = set()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                tensor.copy_(torch.arange(start, start + tensor.numel()).view(tensor.shape))
                start += tensor.numel()
    return model


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False), nn.PReLU())


def _even() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False))


def _transposed() -> nn.Module:
    """A weight that lies in memory in another order than row-major."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    first: Any = model[0]
    first.weight = nn.Parameter(torch.empty(4, 3).t())
    return model


def _scalar() -> nn.Module:
    return Net(scalar=True)


def _wide() -> nn.Module:
    return Net(width=8, inner=16)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "even": _even,
    "net": Net,
    "scalar": _scalar,
    "transposed": _transposed,
    "wide": _wide,
}


def make(name: str = "net") -> nn.Module:
    """Make one of the models, the same one on every rank."""
    return filled(MODELS[name]())
