"""Who has to hear that a live model, or its optimizers, cannot be read: found without any code of modules' own.

A rank on which such code raises has to find the same meetings as the others, which wait for it there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

from fdsd.comms.hooks import pre_hooks
from fdsd.comms.live import LiveTensor, Modules
from fdsd.comms.modules import is_dtensor
from fdsd.comms.tabling import Table
from fdsd.comms.worlds import has_group
from fdsd.comms.wrappers import FSDP1_WRAPPED, wrapped_as
from fdsd.compat._errors import NoMapping
from fdsd.compat._flats import has_flats
from fdsd.compat._model import read_model
from fdsd.compat._options import StateDictOptions
from fdsd.compat._verdict import NOTHING_READ, Findings, agreed
from fdsd.data.errors import RanksLost, add_note
from fdsd.engine.meetings import meetings_of

if TYPE_CHECKING:
    from fdsd.comms.fsdp1 import FlatView

__all__ = ["heard", "skeleton_of", "tables_of"]

_WHOLE = (nn.Parameter, torch.Tensor, type(None))


class _Reading(Protocol):
    """What was read; without tables, there are no flat parameters."""

    @property
    def modules(self) -> Modules | None: ...


_R = TypeVar("_R", bound=_Reading)


def skeleton_of(model: nn.Module) -> Modules:
    """Give the tables of a model as far as others know them too: one tensor of each mesh, under any name.

    >>> skeleton_of(nn.Linear(1, 1)).tensors
    {}
    """
    return _skeleton(model, lambda _, view: True)


def _skeleton(
    model: nn.Module, counts: Callable[[Any, FlatView | None], bool], below: Iterable[nn.Module] | None = None
) -> Modules:
    """Give such tables of the tensors that count; of DTensors those below some modules, if any are given."""
    table = Table((model,))
    places = list(_inside(model))
    chosen = places if below is None else [one for top in below for one in _inside(top)]
    flattening = {kind for kind in set(map(type, places)) if wrapped_as(kind) == FSDP1_WRAPPED}
    if flattening:
        from fdsd.comms.fsdp1 import find_flats

        find_flats([module for module in places if type(module) in flattening], table.flats)
    views = [view for flat in table.flats.values() for view in flat.views]
    known = {id(view.live) for view in views}
    views = [view for view in views if counts(view.live, view)]
    found: dict[int, tuple[torch.Tensor, FlatView | None]] = {id(v.layout.mesh): (v.live, v) for v in views}
    for module in places:
        _put_shards_back(module)
    for module in chosen:
        for tensor in _own(module):
            if is_dtensor(tensor) and id(tensor) not in known and counts(tensor, None):
                found.setdefault(id(tensor.device_mesh), (tensor, None))
    rows = [(str(i), *row) for i, row in enumerate(found.values())]
    table.extend([LiveTensor(name, "parameter", True, False, one, model, name, None, view) for name, one, view in rows])
    return table.finished()


def _own(module: Any) -> list[Any]:
    """Give the tensors of one module that may lie over ranks."""
    own = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in own if type(tensor) not in _WHOLE]


def _inside(model: nn.Module) -> Iterator[nn.Module]:
    """List all modules, each once; torch's own generators take longer than reading what is in them."""
    seen = {id(model)}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        yield module
        inside: Any = module
        for child in inside._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def _put_shards_back(module: nn.Module) -> None:
    """Let FSDP2 put its shards back in place, as it does whenever a state dict is taken: they say how they lie."""
    inside: Any = module
    if inside._state_dict_pre_hooks:
        for hook in pre_hooks(module):
            if getattr(hook, "__module__", "").startswith("torch.distributed."):
                hook(module, "", False)


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
        return skeleton_of(model), error


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
    read: _R | None = None
    try:
        if fault is None:
            read = reading()
    except Exception as error:  # others would wait for this rank
        fault = error
    if fault is not None and not isinstance(model, nn.Module):
        raise fault  # nobody knows who would have to hear of it
    if (read is None or _gathers(read.modules, options)) and has_group():
        _hear(_travelling(model, options, submodules, optimizers), fault, asked)
    if read is None:
        assert fault is not None
        raise fault
    return read


def _parts_of(model: nn.Module, submodules: Any) -> Collection[nn.Module] | None:
    """Give submodules; ``None`` if there are none, or what was given is no part of the model."""
    try:
        chosen = list(submodules or ())
    except TypeError:
        return None
    inside = set(map(id, _inside(model)))
    return chosen if chosen and all(id(one) in inside for one in chosen) else None


def _gathers(modules: Modules | None, options: StateDictOptions) -> bool:
    return options.full_state_dict or (modules is not None and has_flats(modules))


def _travelling(
    model: nn.Module, options: StateDictOptions, submodules: Any, optimizers: Sequence[torch.optim.Optimizer]
) -> Modules:
    """Give the tables of what has to travel: who else calls is there for that, and maybe for nothing else."""
    params = {id(param) for one in optimizers for group in one.param_groups for param in group["params"]}

    def travels(tensor: Any, view: FlatView | None) -> bool:
        if view is not None:
            return view.flat.is_sharded
        if not options.full_state_dict or (params and id(tensor) not in params):
            return False
        return not all(placement.is_replicate() for placement in tensor.placements)

    return _skeleton(model, travels, _parts_of(model, submodules))


def _hear(travelling: Modules, fault: Exception | None, asked: str) -> None:
    meetings = meetings_of(travelling, ())
    try:
        agreed(Findings(), fault, meetings, f"{asked}: whether it can be read", NOTHING_READ)
    except RanksLost as error:
        add_note(
            error,
            f"This rank asked for {asked}. Ranks that read only their own shards (full_state_dict=False) ask nobody, "
            "and do not come: give the same options on all ranks.",
        )
        raise
