"""What a live model expects, as pure data: specs, roles, ties, layouts, and the groups of optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fdsd.data.errors import FdsdError, Unsupported, plural
from fdsd.data.groups import ParamGroup
from fdsd.data.model import ModelSpec, TensorEntry
from fdsd.data.values import several
from fdsd.layout.layout import Layout

__all__ = ["describe"]


def describe(
    model: nn.Module | Iterable[nn.Module],
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
) -> ModelSpec:
    """Say what a live model and its optimizers expect, as pure data. Nothing is read, gathered or changed.

    Args:
        model: A module, or several: the parts of one model. Wrappers are dropped from names; meta tensors are fine.
        optimizers: One optimizer, or several.

    Returns:
        For each tensor, in the order of ``state_dict`` and under each of its names, its spec and role; non-persistent
        buffers too. The layout of a DTensor is what ``Layout.to_data`` gives; that of a parameter which FSDP1 has
        flattened is the start, size and ranks of each piece of the flattened parameter (over tensor parallelism, what
        its ranks hold is flattened, one part after the other). It is the same on all ranks,
        unless a tensor's mesh is a slice of a larger one, such as ``mesh["tp"]``: then each rank tells of its own
        slice, and of the ranks in that, since nothing says that what lies over the others is the same tensor.

    Raises:
        NameConflict: Two different tensors have one name.
        UnknownName: Parameters of an optimizer are not in the model.
        Unsupported: Some tensors have no shape yet, or are no grid of elements; all are named.

    Law: ``describe(model).specs()`` equals ``specs(capture(model).model)``, extra states aside.

    >>> spec = describe(nn.Linear(2, 1, bias=False))
    >>> spec.entries["weight"]
    TensorEntry(TensorSpec((1, 2), torch.float32))
    """
    from fdsd.comms.modules import layout_of, read_modules

    modules = read_modules(model)
    known: dict[Any, Any] = {}
    entries: dict[str, TensorEntry] = {}
    problems: list[str] = []
    for fqn, live in modules.tensors.items():
        try:
            layout = layout_of(live)
            data = known[layout] = known.get(layout) or _data(layout)
            trainable = live.trainable or live.kind == "buffer"
            entries[fqn] = TensorEntry(live.spec, live.kind, live.persistent, trainable, live.tied_to, data)
        except FdsdError as error:
            problems.append(str(error) if repr(fqn) in str(error) else f"{fqn!r}: {error}")
    if problems:
        raise Unsupported(f"describe: {plural(len(problems), 'tensor')} cannot be described: {several(problems)}")
    return ModelSpec(entries, _groups(modules, optimizers))


def _data(layout: Any) -> Any:
    if layout is None:
        return None
    if isinstance(layout, Layout):
        return layout.to_data()
    return {"flattened": [[*start, *size, list(ranks)] for (start, size), ranks in layout]}


def _groups(modules: Any, optimizers: Any) -> list[tuple[ParamGroup, ...]]:
    from fdsd.comms.live_optimizers import live_optimizers
    from fdsd.comms.optimizers import state_of

    return [state_of(live, modules).groups for live in live_optimizers(modules, optimizers)]
