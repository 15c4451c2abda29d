"""Reading live modules: all tensors of a model by canonical name, in one walk; and their leaves, layouts and memory.

Nothing is copied, gathered or written here, and no hooks run but those that ``state_dict`` itself would run.
Optimizers are unknown here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from fdsd.comms.live import ExtraState, LiveTensor, Modules
from fdsd.comms.tabling import Table
from fdsd.comms.walking import Walk
from fdsd.data.errors import Unsupported, listing
from fdsd.layout.placed import Placement

__all__ = [
    "ExtraState",
    "LiveTensor",
    "Modules",
    "is_dtensor",
    "layout_and_memory_of",
    "layout_of",
    "leaf_of",
    "memory_of",
    "read_modules",
]


def read_modules(model: nn.Module | Iterable[nn.Module], *, fqn_modifiers: str = "_fqn_modifiers") -> Modules:
    """Read all tensors of a model, or of its parts, by canonical name.

    Args:
        model: A module, or several: the parts of one model, such as pipeline stages.
        fqn_modifiers: The method by which a module may say which child it leaves out of the names that it shows.

    Raises:
        NameConflict: Two different tensors would have one name, in one part or in two.
        Unsupported: A module contains itself, something given is no module, or code of a module's own puts into the
            state dict what cannot be understood.

    Law: names, order and values are those of ``state_dict()`` of the unwrapped model.

    >>> modules = read_modules(nn.DataParallel(nn.Sequential(nn.Linear(2, 1), nn.PReLU())))
    >>> modules.names
    ('0.weight', '0.bias', '1.weight')
    """
    parts = _parts(model)
    table = Table(parts)
    for part in parts:
        Walk(part).into(table, fqn_modifiers)
    return table.finished()


def _parts(model: Any) -> tuple[nn.Module, ...]:
    several = isinstance(model, Iterable) and not isinstance(model, nn.Module | str | bytes | Mapping)
    parts: list[Any] = [*model] if several else [model]
    if odd := {type(part).__name__ for part in parts if not isinstance(part, nn.Module)}:
        raise Unsupported(
            f"A model is a torch.nn.Module, or several of them; not of type {listing(odd)}. Give the live modules "
            "first, and their optimizers after them."
        )
    return tuple(parts)


def is_dtensor(value: object) -> bool:
    """Tell whether a value is a DTensor, without importing its class.

    >>> is_dtensor(torch.ones(2))
    False
    """
    kind = type(value)
    found = _KINDS.get(kind)
    return _is_of_dtensors(kind) if found is None else found


_KINDS: dict[type, bool] = {}
_MOST = 1 << 10  # classes that are remembered


def _is_of_dtensors(kind: type) -> bool:
    if len(_KINDS) >= _MOST:
        _KINDS.clear()
    names = [(base.__qualname__, base.__module__.startswith("torch.distributed.")) for base in kind.__mro__]
    found = _KINDS[kind] = ("DTensor", True) in names
    return found


def leaf_of(live: LiveTensor) -> Any:
    """Give a live tensor as a leaf of a state: a tensor or DTensor that shares its memory, or a lazy one over ranks.

    >>> model = nn.Linear(2, 1)
    >>> leaf_of(read_modules(model).tensors["bias"]).data_ptr() == model.bias.data_ptr()
    True
    """
    if live.flat is not None:
        return live.flat.leaf()
    tensor = live.tensor.detach()
    return tensor if live.dtype is None else tensor.to(live.dtype)


def layout_of(live: LiveTensor) -> Placement | None:
    """Say which rank holds what of a tensor: a layout for a DTensor, ``None`` for one that is wholly here.

    What lies in a flat parameter of FSDP1 is given by pieces of the *flattened* tensor (``live.flat.flatten``).
    """
    if live.flat is not None:
        return live.flat.placement()
    if is_dtensor(live.tensor):
        found: Placement = _dtensors().layout_of_dtensor(live.tensor)
        return found
    return None


def memory_of(live: LiveTensor) -> torch.Tensor:
    """Give the memory of this rank in which a tensor lies; writing into it changes the model.

    Returns:
        The tensor, the local tensor of a DTensor, or the piece of a flattened parameter that this rank has of FSDP1's.

    Raises:
        Unsupported: The value is not in the model but made by code of the module's own; see ``Modules.through``.
    """
    if not live.is_memory:
        raise Unsupported(
            f"{live.fqn!r} is made by code of its module ({type(live.owner).__name__}) whenever the state dict is "
            "taken; there is no memory to write into. Load it with the module's own load_state_dict."
        )
    if live.flat is not None:
        return live.flat.memory()
    if is_dtensor(live.tensor):
        found: torch.Tensor = _dtensors().local_of_dtensor(live.tensor)
        return found
    return live.tensor.detach()


def layout_and_memory_of(live: LiveTensor) -> tuple[Placement | None, torch.Tensor]:
    """Give ``layout_of`` and ``memory_of`` at once: of thousands of tensors both are asked.

    >>> layout, memory = layout_and_memory_of(read_modules(nn.Linear(2, 1)).tensors["bias"])
    >>> layout is None, memory.shape
    (True, torch.Size([1]))
    """
    if live.flat is None and live.is_memory and is_dtensor(live.tensor):
        found: tuple[Placement, torch.Tensor] = _dtensors().layout_and_local_of(live.tensor)
        return found
    return layout_of(live), memory_of(live)


@lru_cache(1)
def _dtensors() -> Any:
    """Load what knows DTensors when there is one; even to import it again takes a while, for thousands of tensors."""
    return import_module("fdsd.comms.dtensors")
