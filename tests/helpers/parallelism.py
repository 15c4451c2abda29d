"""Ways to lay a small model over ranks, alone and nested, for tests that run on real ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["FORWARD", "INNER", "META", "WAYS", "Mlp", "Way", "build", "mesh_of", "num_ranks", "step"]

FORWARD = torch.__version__ >= (2, 7)
"""Whether FSDP2 runs on the CPU: torch 2.6 cannot."""

INNER = 7 if torch.__version__ >= (2, 7) else 8
"""Rows that tensor parallelism cuts, and FSDP2 again: torch 2.6 wants them to be divided by all ranks."""

Way = Callable[[Any], Any]


class Layer(nn.Module):
    """A feed-forward layer of uneven sizes."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Mlp(nn.Module):
    """Two layers and a head, with a buffer."""

    def __init__(self, width: int = 5, inner: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width, inner) for _ in range(2)])
        self.head = nn.Linear(width, 3)
        self.register_buffer("scale", torch.full((2,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        made: torch.Tensor = self.head(x * self.scale.sum())
        return made


def mesh_of(*shape: int, names: tuple[str, ...]) -> Any:
    """Make a mesh of CPU ranks with named axes."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _ddp(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def _shard(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _split(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.6 warns of random numbers on the CPU
        for layer in model.layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _fsdp2(model: Any) -> Any:
    return _shard(model, mesh_of(dist.get_world_size(), names=("dp",)))


def _hsdp(model: Any) -> Any:
    return _shard(model, mesh_of(2, dist.get_world_size() // 2, names=("replicate", "shard")))


def _tp(model: Any) -> Any:
    return _split(model, mesh_of(dist.get_world_size(), names=("tp",)))


def _fsdp_tp(model: Any) -> Any:
    mesh = mesh_of(2, dist.get_world_size() // 2, names=("dp", "tp"))
    return _shard(_split(model, mesh["tp"]), mesh["dp"])


def _fsdp1(model: Any, orig: bool) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=orig,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
        )


def _checkpointed(model: Any) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for i in range(len(model.layers)):
        model.layers[i] = checkpoint_wrapper(model.layers[i])
    return model


WAYS: dict[str, Way] = {
    "plain": lambda model: model,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "tp": _tp,
    "fsdp2 and tp": _fsdp_tp,
    "fsdp1": lambda model: _fsdp1(model, orig=True),
    "fsdp1, flat": lambda model: _fsdp1(model, orig=False),
    "compile of fsdp2 of checkpoint": lambda model: torch.compile(_fsdp2(_checkpointed(model)), backend="eager"),
}


META = ("plain", "fsdp2", "hsdp", "tp", "fsdp2 and tp", "compile of fsdp2 of checkpoint")
"""The ways of models that need no memory."""


def num_ranks(way: str) -> int:
    """Give how many ranks a way is tried with."""
    return 4 if way in ("hsdp", "fsdp2 and tp") else 3 if way in ("fsdp2", "fsdp1") else 2


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Step an optimizer by gradients that depend on the parameters and a seed alone, without running the model."""
    for parameter in model.parameters():
        if parameter.numel():  # FSDP1 gives none where a rank has nothing of a parameter
            parameter.grad = parameter.detach() * seed - 0.25
    optimizer.step()


def build(way: str, seed: int = 0, *, device: str = "cpu") -> tuple[Any, dict[str, torch.Tensor]]:
    """Make the model of a seed, laid out, and what its state dict was before.

    Args:
        way: How it is laid out.
        seed: Of its values.
        device: ``"meta"`` for a model without memory.
    """
    torch.manual_seed(seed)
    plain = Mlp()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    if device == "meta":
        with torch.device("meta"):
            plain = Mlp()
    return WAYS[way](plain), state
