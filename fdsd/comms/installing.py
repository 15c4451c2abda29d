"""Giving live modules new tensors: where there was no memory yet, under all names at once, so that ties stay.

What the values are, and how they came here, is unknown here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from fdsd.comms.live import LiveTensor, Modules
from fdsd.data.errors import Unsupported

__all__ = ["give_memory", "install", "is_meta", "like_live", "new_memory"]


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
    """Make memory for the local tensor of a live one, on its device; of a meta tensor on that of its mesh.

    Args:
        live: The live tensor.
        shape: The shape of its local tensor.
        dtype: The dtype of the memory.
        device: Where a meta tensor goes that lies on no mesh; the CPU if left out.

    >>> from fdsd.comms.modules import read_modules
    >>> new_memory(read_modules(nn.Linear(1, 1)).tensors["bias"], (1,), torch.int8, None).dtype
    torch.int8
    """
    own, mesh = _local(live.tensor).device, getattr(live.tensor, "device_mesh", None)
    if own.type != "meta":
        where = own
    else:
        where = torch.device(mesh.device_type) if mesh is not None else device or torch.device("cpu")
    return torch.empty(shape, dtype=dtype, device=where)


def like_live(live: LiveTensor, local: torch.Tensor) -> torch.Tensor:
    """Give a local tensor the class of a live one: a DTensor for a DTensor.

    >>> from fdsd.comms.modules import read_modules
    >>> like_live(read_modules(nn.Linear(1, 1)).tensors["bias"], torch.ones(1))
    tensor([1.])
    """
    if not hasattr(live.tensor, "_local_tensor"):
        return local
    from fdsd.comms.dtensors import make_like

    made: torch.Tensor = make_like(live.tensor, local)
    return made


def install(modules: Modules, live: LiveTensor, local: torch.Tensor) -> None:
    """Put a new tensor in the place of a live one, under all of its names, with its flags and attributes.

    A plain tensor that has memory stays the same object and gets the new memory, so that optimizers still know it.

    Args:
        modules: The model.
        live: The tensor, by any of its names.
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
    owner = live.tied_to or live.fqn
    known = [modules.tensors[name] for name in (owner, *modules.aliases_of(owner))]
    if not (is_meta(live) or hasattr(live.tensor, "_local_tensor")):
        for one in known:
            one.tensor.data = local
        return
    value = _in_place_of(live.tensor, like_live(live, local))
    for one in known:
        setattr(one.owner, one.name, value)  # as torch does: some modules keep lists of their parameters
    for one in known:
        _tell_fsdp(one.owner)


def _in_place_of(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Make a parameter for a parameter, with the attributes that users have set."""
    if not isinstance(old, nn.Parameter):
        return value
    made = nn.Parameter(value, requires_grad=old.requires_grad)
    for name, attribute in vars(old).items():
        if name not in vars(made):
            setattr(made, name, attribute)
    return made


def _tell_fsdp(owner: nn.Module) -> None:
    """Let FSDP2 find new tensors, as it does after ``load_state_dict(assign=True)``."""
    from torch.nn.modules.module import _IncompatibleKeys  # pyright: ignore[reportPrivateUsage]  # what its hook takes

    inside: Any = owner
    for hook in inside._load_state_dict_post_hooks.values():
        if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp."):
            hook(owner, _IncompatibleKeys([], []))


def give_memory(modules: Modules, top: nn.Module, wanted: Collection[str], device: torch.device | None) -> None:
    """Give memory to what has none in a module that is about to load by code of its own, which copies into it.

    Args:
        modules: The model.
        top: The module.
        wanted: The names that it is about to load. Tensors that the model shows under no name get memory too; others
            stay on the meta device.
        device: Where the memory goes; see ``new_memory``.

    >>> from fdsd.comms.modules import read_modules
    >>> model = nn.Linear(1, 1, device="meta")
    >>> give_memory(read_modules(model), model, ["bias"], None)
    >>> model.weight.is_meta, model.bias.is_meta
    (True, False)
    """
    shown = {id(live.tensor) for live in modules.tensors.values()}
    for name in wanted:
        live = modules.tensors.get(name)
        if live is not None and live.tied_to is None and live.is_memory and live.flat is None and is_meta(live):
            local = _local(live.tensor)
            install(modules, live, new_memory(live, tuple(local.shape), local.dtype, device))
    for module in top.modules():
        inside: Any = module
        for table in (inside._parameters, inside._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None and id(tensor) not in shown and _local(tensor).is_meta:
                    setattr(module, name, _in_place_of(tensor, torch.empty_like(tensor, device=device or "cpu")))
