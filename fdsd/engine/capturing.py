"""The live state of a training run as a value: references, not copies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fdsd.data.errors import Unsupported, listing
from fdsd.data.optim import OptimState
from fdsd.data.statedict import StateDict
from fdsd.data.train import TrainState

__all__ = ["capture"]


def capture(
    model: nn.Module | Iterable[nn.Module],
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
) -> TrainState:
    """Take the live state of a model and its optimizers as a value. Nothing is copied, gathered or changed.

    Leaves share the memory of the model: training on changes them, and a lazy one reads when it is materialized. Take
    a ``snapshot`` for a state that stays. Each rank gets what is its own, without communication.

    Args:
        model: A module, or several: the parts of one model. Wrappers are dropped from names.
        optimizers: One optimizer, or several; none of them is stepped.

    Returns:
        The names and values of ``state_dict()`` of the unwrapped model, extra states included, detached. DTensors
        stay DTensors; parameters that FSDP1 has flattened are lazy over the ranks. Tied names hold one leaf.

    Raises:
        NameConflict: Two different tensors have one name.
        UnknownName: Parameters of an optimizer are not in the model.
        Unsupported: Parameters of lazy modules have no shape yet.

    >>> model = nn.Linear(2, 1)
    >>> state = capture(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> list(state.model), state.optim.groups[0].options["lr"]
    (['weight', 'bias'], 0.1)
    """
    from fdsd.comms.modules import leaf_of, read_modules

    modules = read_modules(model)
    _refuse_lazy(modules)
    leaves: dict[str, Any] = {}
    for fqn in modules.names:
        live = modules.tensors.get(fqn)
        if live is None:
            leaves[fqn] = modules.extra[fqn].value
        elif live.tied_to in leaves:
            leaves[fqn] = leaves[live.tied_to]
        else:
            leaves[fqn] = leaf_of(live)
    return TrainState(StateDict.trusted(leaves, modules.metadata), _optim(modules, optimizers))


def _refuse_lazy(modules: Any) -> None:
    lazy = [fqn for fqn, live in modules.tensors.items() if is_lazy(live.tensor)]
    if lazy:
        raise Unsupported(
            f"capture: {listing(lazy)} are uninitialized parameters of lazy modules, which have no shape yet. Run the "
            "module once, then capture it."
        )


def _optim(modules: Any, optimizers: Any) -> OptimState | None:
    from fdsd.comms.live_optimizers import listed
    from fdsd.comms.optimizers import read_optimizers

    given = listed(optimizers)
    return read_optimizers(modules, given) if given else None
