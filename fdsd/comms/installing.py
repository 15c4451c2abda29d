"""Giving live modules new tensors: where there was no memory yet, under all names at once, so that ties stay.

What the values are, and how they came here, is unknown here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fdsd.comms.live import LiveTensor, Modules
from fdsd.data.errors import Unsupported

__all__ = ["install", "is_meta", "like_live", "new_memory"]


def _local(tensor: Any) -> torch.Tensor:
    """Give the memory of this rank: a DTensor on the meta device has a local tensor there."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def is_meta(live: LiveTensor) -> bool:
    """Tell whether a live tensor has no memory yet.

    >>> from fdsd.comms.modules import read_modules
    >>> is_meta(read_modules(nn.Linear(1, 1, device="meta")).tensors["bias"])
    True
    """
    return _local(live.tensor).is_meta


def new_memory(
    live: LiveTensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None
) -> torch.Tensor:
    """Make memory for the local tensor of a live one: on its device, or for a meta tensor on that of its mesh, or the CPU.

    >>> from fdsd.comms.modules import read_modules
    >>> new_memory(read_modules(nn.Linear(1, 1)).tensors["bias"], (1,), torch.int8, None).dtype
    torch.int8
    """
    if device is None:
        own = _local(live.tensor).device
        mesh = getattr(live.tensor, "device_mesh", None)
        device = own if own.type != "meta" else torch.device("cpu" if mesh is None else mesh.device_type)
    return torch.empty(shape, dtype=dtype, device=device)


def like_live(live: LiveTensor, local: torch.Tensor) -> torch.Tensor:
    """Give a local tensor the class of a live one: a DTensor for a DTensor.

    >>> from fdsd.comms.modules import read_modules
    >>> like_live(read_modules(nn.Linear(1, 1)).tensors["bias"], torch.ones(1))
    tensor([1.])
    """
    if not hasattr(live.tensor, "_local_tensor"):
        return local
    from fdsd.comms.dtensors import make_like

    return make_like(live.tensor, local)


def install(modules: Modules, live: LiveTensor, local: torch.Tensor) -> None:
    """Put a new tensor in the place of a live one, under all of its names, with its flags and attributes.

    Args:
        modules: The model.
        live: The tensor, by its first name.
        local: The new local tensor.

    Raises:
        Unsupported: It is part of a flat parameter of FSDP.

    >>> from fdsd.comms.modules import read_modules
    >>> model = nn.Linear(1, 1, device="meta")
    >>> modules = read_modules(model)
    >>> install(modules, modules.tensors["bias"], torch.ones(1)); model.bias
    Parameter containing:
    tensor([1.], requires_grad=True)
    """
    if live.flat is not None:
        raise Unsupported(f"{live.fqn!r} is part of a flat parameter of FSDP, which keeps its own memory and dtype.")
    old, value = live.tensor, like_live(live, local)
    if isinstance(old, nn.Parameter):
        value = nn.Parameter(value, requires_grad=old.requires_grad)
        for name, attribute in vars(old).items():
            if name not in vars(value):  # users tag parameters
                setattr(value, name, attribute)
    for name in (live.fqn, *modules.aliases_of(live.fqn)):
        one = modules.tensors[name]
        table = one.owner._parameters if one.kind == "parameter" else one.owner._buffers
        table[one.name] = value  # type: ignore[assignment]  # a Parameter for a parameter, as above
