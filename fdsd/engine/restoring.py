"""`restore`: a state into live modules and optimizers, checked before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fdsd.comms.alone import world_for
from fdsd.data.devices import parse_device
from fdsd.data.errors import Unsupported
from fdsd.data.optim import OptimState
from fdsd.data.train import TrainState
from fdsd.data.values import is_mapping
from fdsd.engine.load_rules import Init, Rules
from fdsd.engine.loading import Asked, LoadReport, Restoring
from fdsd.engine.matching import DtypeRule
from fdsd.engine.unions import together
from fdsd.pipeline.pipeline import Pipeline, identity
from fdsd.transforms.which import Which, choice

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["LoadReport", "restore"]


def restore(
    state: Mapping[str, Any] | TrainState | OptimState,
    model: nn.Module | Iterable[nn.Module],
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    filter: Pipeline = identity,
    allow_missing: Which = (),
    allow_unexpected: Which = (),
    init: Init | None = None,
    dtype: DtypeRule = "same",
    device: torch.device | str | None = None,
    staged: bool = False,
    group: Any = None,
) -> LoadReport:
    """Load a state into a live model, and the optimizers' state into live optimizers.

    Args:
        state: A mapping of names to leaves of any kind: tensors, lazy tensors of files, of other models; a
            ``TrainState``, whose ``extra`` is the caller's business; or an ``OptimState`` alone. With ``group``, what
            only other ranks have comes from them: rank 0 may have all of it, and the others an empty mapping.
        model: The module, or the parts of one model; wrapped and sharded in any way. None at all on a rank that only
            gives.
        optimizers: Those whose state is loaded too.
        filter: Leaves names out of what the model expects: what was saved with ``filter_frozen(spec)`` loads with it.
        allow_missing: Names, as ``select`` takes them, that the state may lack; what is live stays.
        allow_unexpected: Names that it may have beyond.
        init: Makes what is missing, or is a buffer that no state holds, and has no memory yet: ``init(fqn, spec)``
            gives the whole tensor, the same on every rank; floats are cast to the model's dtype.
        dtype: ``"same"``: other dtypes are an error. ``"target"``: cast to the model's. ``"source"``: the model takes
            those of the state.
        device: Where tensors go that have no memory yet and lie on no mesh; by default where their values are, and
            those of files on the CPU.
        staged: All or nothing, on all ranks, also if reading fails half way, or code of a module's own raises: one
            more copy of the local shards.
        group: The process group that works together, where the state lies over ranks. Each rank reads files by
            itself, without a group too.

    Returns:
        What was loaded, and what was not.

    Raises:
        SpecMismatch: Shapes or dtypes differ; nothing was written.
        UnknownName: Names are missing or unexpected; nothing was written.
        RankDisagreement: Ranks differ in what they load; the same on all.
        RanksLost: A rank is gone.

    A name that is tied in the model may have a tensor of its own in the state; both are read first then, and have to be
    equal, since one of them would be lost.

    Law: ``restore(capture(m, o), m, o)`` changes nothing.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> restore({"weight": torch.tensor([[1.0, 2.0]])}, model)
    <LoadReport: 1 name loaded>
    >>> model.weight.tolist()
    [[1.0, 2.0]]
    """
    world = world_for(group)

    def asked() -> Asked:
        _check_state(state)
        _check_live(model, optimizers)
        rules = Rules(
            filter,
            choice("restore: allow_missing", *_several(allow_missing)),
            choice("restore: allow_unexpected", *_several(allow_unexpected)),
            _init(init),
            _dtype_rule(dtype),
            parse_device("restore", device),
            staged,
        )
        return Asked.of(state, model, optimizers, rules)

    return Restoring.planned(together(world, "restore", asked), world).run()


def _several(which: Which) -> tuple[Which, ...]:
    """Give what ``choice`` takes: names that are none at all are no slip here."""
    return () if which in ((), []) else (which,)


def _init(init: Any) -> Init | None:
    found: Init | None = init
    if init is not None and not callable(init):
        raise Unsupported(f"restore: init is a function, init(fqn, spec), that gives a tensor, not {init!r}.")
    return found


def _dtype_rule(dtype: Any) -> DtypeRule:
    if dtype not in ("same", "target", "source"):
        raise Unsupported(f'restore: dtype is "same", "target" or "source", not {dtype!r}.')
    found: DtypeRule = dtype
    return found


def _check_state(state: Any) -> None:
    """Refuse what is no state, and say how to make one of it."""
    if isinstance(state, TrainState | OptimState):
        return
    if is_mapping(state):
        if isinstance(state.get("param_groups"), list) and is_mapping(state.get("state")):
            raise Unsupported(
                "restore: the state is a dict of torch's optimizers. Give fdsd.OptimState.from_torch(dict, names), "
                "with the names of the optimizer's parameters in their order (none where the dict has names for ids)."
            )
        return
    if isinstance(state, str | os.PathLike):
        made = f"a path. Give fdsd.open({os.fspath(state)!r})"
    elif isinstance(state, torch.nn.Module):
        made = f"{type(state).__name__}: the state comes first, restore(state, model); of a model, fdsd.capture(model)"
    elif isinstance(state, torch.optim.Optimizer):
        made = f"{type(state).__name__}. Give fdsd.capture(model, optimizer).optim"
    else:
        made = (
            f"{type(state).__name__}. Give one mapping, or a TrainState for model and optimizers together; with group= "
            "a rank that has nothing to give gives {}"
        )
    raise Unsupported(f"restore: a state is a mapping of names to leaves, not {made}.")


def _check_live(model: Any, optimizers: Any) -> None:
    """Refuse states, and whatever else is not live, in the place of models and optimizers."""
    kind: str = type(optimizers).__name__
    odd: Any = (Mapping, TrainState, OptimState, str, os.PathLike, torch.optim.Optimizer)
    if isinstance(model, odd) and not isinstance(model, torch.nn.Module):
        raise Unsupported(
            f"restore: the model is a torch.nn.Module, or several of them, not {type(model).__name__}. The order is "
            "restore(state, model, optimizers)."
        )
    several = isinstance(optimizers, Iterable) and not isinstance(optimizers, odd)
    if not several and not isinstance(optimizers, torch.optim.Optimizer):
        raise Unsupported(
            f"restore: optimizers are torch.optim.Optimizer, one or several, not {kind}. Their "
            "state comes first, with that of the model: restore(TrainState(state, optim), model, optimizers)."
        )
