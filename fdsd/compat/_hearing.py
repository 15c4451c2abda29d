"""Who has to hear that a live model, or its optimizers, cannot be read: found without any code of modules' own.

A rank on which such code raises has to find the same meetings as the others, which wait for it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from fdsd.comms.hooks import run_pre_hooks
from fdsd.comms.live import LiveTensor, Modules
from fdsd.comms.modules import is_dtensor
from fdsd.comms.tabling import Table
from fdsd.comms.worlds import Meeting, has_group
from fdsd.comms.wrappers import FSDP1_WRAPPED, wrapped_as
from fdsd.compat._errors import NoMapping
from fdsd.compat._flats import has_flats
from fdsd.compat._model import Read, read_model
from fdsd.compat._optim import OptimRead
from fdsd.compat._options import StateDictOptions
from fdsd.compat._verdict import NOTHING_READ, Findings, agreed
from fdsd.data.errors import RanksLost, add_note
from fdsd.engine.meetings import meetings_of

if TYPE_CHECKING:
    from fdsd.comms.fsdp1 import FlatView

__all__ = ["heard", "tables_of"]

_R = TypeVar("_R", Read, OptimRead)


def tables_of(model: nn.Module, options: StateDictOptions) -> tuple[Modules, Exception | None]:
    """Give the tables of a live model, and what code of modules' own raises, of which other ranks have to hear.

    Raises:
        NoMapping: It is no module: nobody can tell who would have to hear of it.
    """
    try:
        return read_model(model, options), None
    except NoMapping:
        raise
    except Exception as error:
        return _skeleton(model, _over_ranks(model)), error


def _skeleton(model: nn.Module, tensors: Iterable[tuple[Any, FlatView | None]]) -> Modules:
    """Give the tables of a model as far as others know them too: one tensor of each mesh, under any name."""
    table = Table((model,))
    found: dict[int, tuple[Any, FlatView | None]] = {}
    for one, view in tensors:
        found.setdefault(id(one.device_mesh if view is None else view.layout.mesh), (one, view))
    rows = [(str(i), *row) for i, row in enumerate(found.values())]
    table.extend([LiveTensor(name, "parameter", True, False, one, model, name, None, view) for name, one, view in rows])
    return table.finished()


def _over_ranks(model: nn.Module, below: Iterable[Any] = ()) -> Iterator[tuple[Any, FlatView | None]]:
    """List the tensors in flat parameters, and the DTensors: those below some modules, if any are given."""
    places: list[Any] = list(model.modules())
    views: list[FlatView] = []
    flattening = {kind for kind in set(map(type, places)) if wrapped_as(kind) == FSDP1_WRAPPED}
    if flattening:
        from fdsd.comms.fsdp1 import Flat, find_flats

        flats: dict[int, Flat] = {}
        find_flats([module for module in places if type(module) in flattening], flats)
        views = [view for flat in flats.values() for view in flat.views]
    yield from [(view.live, view) for view in views]
    for module in places:  # FSDP2 puts its shards back in place: they say how they lie
        if module._state_dict_pre_hooks:
            run_pre_hooks(module, "", "torch.distributed.")
    known = {id(view.live) for view in views}
    for module in [one for top in below for one in top.modules()] or places:
        tensors = (*module._parameters.values(), *module._buffers.values())
        yield from [(tensor, None) for tensor in tensors if is_dtensor(tensor) and id(tensor) not in known]


def heard(
    model: Any,
    reading: Callable[[], _R],
    asked: str,
    options: StateDictOptions,
    fault: Exception | None,
    *,
    submodules: Any = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> _R:
    """Read something on this rank, and let all that are going to gather hear what goes wrong on any of them.

    Collective over the ranks on which the tensors of the model lie, if they are gathered: whole ones are wanted, or
    they lie in flat parameters of FSDP1.

    Args:
        model: The model.
        reading: Reads, and asks no other rank for anything.
        asked: What is asked for, with what has to be equal on all ranks.
        options: Whether whole tensors are wanted.
        fault: What went wrong on this rank before.
        submodules: The only modules below which something is gathered; all, if there are none.
        optimizers: Those whose parameters alone say how what is gathered lies; all say it, if there are none.

    Raises:
        BaseException: The fault of this rank, which is that of all others.
        LoadError: Some ranks have a fault.
        RankDisagreement: Ranks that gather have other options.
    """
    try:
        if fault is not None:
            raise fault
        read = reading()
    except Exception as error:  # others would wait for this rank
        if has_group() and isinstance(model, nn.Module):  # else nobody knows who would have to hear of it
            _agree(_meetings(model, options, submodules, optimizers), error, asked)
        raise
    gathers = options.full_state_dict or (read.modules is not None and has_flats(read.modules))
    if gathers and has_group():
        _agree(_meetings(model, options, submodules, optimizers), None, asked)
    return read


def _agree(meetings: Sequence[Meeting], fault: Exception | None, asked: str) -> None:
    """Raise, on all ranks that meet, what went wrong on any of them."""
    try:
        agreed(Findings(), fault, meetings, f"{asked}: whether it can be read", NOTHING_READ)
    except RanksLost as error:
        add_note(
            error,
            f"This rank asked for {asked}. Ranks that read only their own shards (full_state_dict=False) ask nobody, "
            "and do not come: give the same options on all ranks.",
        )
        raise


def _meetings(
    model: nn.Module, options: StateDictOptions, submodules: Any, optimizers: Sequence[torch.optim.Optimizer]
) -> list[Meeting]:
    """Say who meets for what has to travel: who else calls is there for that, and maybe for nothing else."""
    params = {id(param) for one in optimizers for group in one.param_groups for param in group["params"]}

    def travels(tensor: Any, view: FlatView | None) -> bool:
        if view is not None:
            return view.flat.is_sharded
        if not options.full_state_dict or (params and id(tensor) not in params):
            return False
        return not all(placement.is_replicate() for placement in tensor.placements)

    found = _over_ranks(model, _parts_of(model, submodules))
    return meetings_of(_skeleton(model, [one for one in found if travels(*one)]), ())


def _parts_of(model: nn.Module, submodules: Any) -> list[nn.Module]:
    """Give submodules; none if what was given is no part of the model."""
    try:
        chosen: list[nn.Module] = list(submodules or ())
    except TypeError:
        return []
    inside = set(map(id, model.modules()))
    return chosen if all(id(one) in inside for one in chosen) else []
