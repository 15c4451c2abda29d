"""`restore`: a state into live modules and optimizers, checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from fdsd.comms.alone import world_for
from fdsd.data.errors import Unsupported, add_note, listing, plural
from fdsd.data.optim import OptimState
from fdsd.data.protocols import World
from fdsd.data.train import TrainState
from fdsd.data.values import is_mapping
from fdsd.engine.delivery import plan_delivery
from fdsd.engine.matching import DtypeRule
from fdsd.engine.model_load import Init, ModelLoad, Rules, plan_model
from fdsd.engine.optim_load import OptimLoad, plan_optim
from fdsd.pipeline.pipeline import Pipeline, identity
from fdsd.transforms.which import Which, choice

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["LoadReport", "load", "restore"]


@frozen(repr=False)
class LoadReport:
    """What a load did, by the names of the model.

    Attributes:
        loaded: The names that were loaded.
        missing: The names that were expected and were not there.
        unexpected: The names that were there and not expected.
        untied: The names that are tied in the model and were not in the state; they hold the value of the first.
        initialised: The names that ``init`` made.
        left_on_meta: Non-persistent buffers that have no memory still: no state holds them. Give ``init``.
        without_state: The parameters for which the optimizer's state had nothing.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    untied: tuple[str, ...] = ()
    initialised: tuple[str, ...] = ()
    left_on_meta: tuple[str, ...] = ()
    without_state: tuple[str, ...] = ()

    def __repr__(self) -> str:
        told = [f"{plural(len(self.loaded), 'name')} loaded"]
        for what in ("missing", "unexpected", "untied", "initialised", "left_on_meta", "without_state"):
            if names := getattr(self, what):
                told.append(f"{what.replace('_', ' ')}: {listing(names, sort=False)}")
        return f"<LoadReport: {'; '.join(told)}>"


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
            ``TrainState``; or an ``OptimState`` alone.
        model: The module, or the parts of one model; wrapped and sharded in any way.
        optimizers: Those whose state is loaded too.
        filter: Leaves names out of what the model expects: what was saved with ``filter_frozen(spec)`` loads with it.
        allow_missing: Names, as ``select`` takes them, that the state may lack.
        allow_unexpected: Names that it may have beyond.
        init: Makes what is missing, or is a buffer that no state holds, and has no memory yet: ``init(fqn, spec)``
            gives a tensor of that shape.
        dtype: ``"same"``: other dtypes are an error. ``"target"``: cast to the model's. ``"source"``: the model takes
            those of the state.
        device: Where tensors go that have no memory yet.
        staged: Whether nothing is written before all is here, on all ranks: one more copy of the local shards, and
            all or nothing.
        group: The process group that works together, where the state lies over ranks. Each rank reads files by
            itself, without a group too.

    Returns:
        What was loaded, and what was not.

    Raises:
        SpecMismatch: Shapes or dtypes differ; nothing was written.
        UnknownName: Names are missing or unexpected; nothing was written.
        RankDisagreement: Ranks differ in what they load; the same on all.

    Law: ``restore(capture(m, o), m, o)`` changes nothing.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> restore({"weight": torch.tensor([[1.0, 2.0]])}, model)
    <LoadReport: 1 name loaded>
    >>> model.weight.tolist()
    [[1.0, 2.0]]
    """
    world = world_for(group)
    error: Exception | None = None
    loads: tuple[ModelLoad | None, OptimLoad | None] = None, None
    try:
        rules = Rules(
            filter,
            choice("restore: allow_missing", *_several(allow_missing)),
            choice("restore: allow_unexpected", *_several(allow_unexpected)),
            init,
            _dtype_rule(dtype),
            None if device is None else torch.device(device),
            staged,
        )
        loads = plan_loads(state, model, optimizers, rules)
    except Exception as found:  # the other ranks have to hear of it
        error = found
    return load(*loads, world, error)


def _several(which: Which) -> tuple[Which, ...]:
    return () if isinstance(which, tuple | list) and not which else (which,)


def _dtype_rule(dtype: Any) -> DtypeRule:
    if dtype not in ("same", "target", "source"):
        raise Unsupported(f'restore: dtype is "same", "target" or "source", not {dtype!r}.')
    found: DtypeRule = dtype
    return found


def plan_loads(
    state: Any, model: Any, optimizers: Any, rules: Rules, *, verb: str = "restore"
) -> tuple[ModelLoad | None, OptimLoad | None]:
    """Compare a state with a model and optimizers, and ask for what they need; nothing is written.

    Raises:
        FdsdError: Everything that does not fit.
    """
    from fdsd.comms.modules import read_modules

    modules = read_modules(model)
    given = state.optim if isinstance(state, TrainState) else state if isinstance(state, OptimState) else None
    weights: Any = state.model if isinstance(state, TrainState) else None if isinstance(state, OptimState) else state
    if weights is not None and not is_mapping(weights):
        raise Unsupported(f"{verb}: a state is a mapping of names to leaves, not {type(weights).__name__}.")
    several = _optimizers(optimizers)
    if given is None and several and (isinstance(state, TrainState) or weights is not None):
        raise Unsupported(f"{verb}: optimizers were given, and the state holds none. Give a TrainState.")
    if given is not None and not several and isinstance(state, OptimState):
        raise Unsupported(f"{verb}: the state is an optimizer's, and no optimizers were given.")
    optim = plan_optim(given, modules, several, rules, verb=verb) if given is not None and several else None
    return None if weights is None else plan_model(weights, modules, rules, verb=verb), optim


def _optimizers(optimizers: Any) -> tuple[Optimizer, ...]:
    return tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)


def load(model: ModelLoad | None, optim: OptimLoad | None, world: World, error: Exception | None = None) -> LoadReport:
    """Deliver what was planned, and put it in its place; collective over the world.

    Args:
        model: The plan for the model.
        optim: The plan for the optimizers.
        world: Who works together.
        error: What went wrong on this rank before; all ranks raise then.
    """
    parts = [part for part in (optim, model) if part is not None]
    requests = {name: request for part in parts for name, request in part.requests.items()}
    delivery = plan_delivery(requests, world, error=error)
    try:
        for name, value in delivery.run():
            next(part for part in parts if name in part.requests).take(name, value)
        for part in parts:
            part.finish()
    except Exception as failed:
        if not (model is not None and model.rules.staged):
            add_note(failed, "The model may hold a part of the state now. restore(staged=True) is all or nothing.")
        raise
    return _report(model, optim)


def _report(model: ModelLoad | None, optim: OptimLoad | None) -> LoadReport:
    without = () if optim is None else optim.without_state
    if model is None:
        return LoadReport(without_state=without)
    match = model.match
    groups = [(name, *model.modules.aliases_of(name)) for name in match.loads]
    return LoadReport(
        tuple([name for group in groups for name in group]),
        match.missing,
        match.unexpected,
        match.untied,
        tuple(model.initialised),
        model.left_on_meta,
        without,
    )
