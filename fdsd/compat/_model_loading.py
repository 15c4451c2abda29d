"""The whole way of a state dict into a model: by name, compared, agreed on by all ranks, written."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import torch
from attrs import define
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys  # pyright: ignore[reportPrivateUsage]  # what torch returns

from fdsd.comms.live import Modules
from fdsd.compat._errors import LoadError, NoMapping, OptionError
from fdsd.compat._fitting import fit_model, told
from fdsd.compat._fqns import FLAT_PARAM, prefix_of
from fdsd.compat._group import default_world
from fdsd.compat._loading import Load
from fdsd.compat._meetings import Meeting, meetings_of
from fdsd.compat._model import expected_names, refuse_empty
from fdsd.compat._options import StateDictOptions
from fdsd.compat._rank0 import RankZero, announced, outline_of_model
from fdsd.compat._verdict import Findings, agreed
from fdsd.data.errors import listing, plural
from fdsd.data.protocols import World
from fdsd.data.statedict import as_mapping

__all__ = ["ModelLoading", "by_name"]


def by_name(model: nn.Module, state: Any, options: StateDictOptions) -> Mapping[str, Any]:
    """Give a state dict by the names in the model; it may have been given by submodule.

    Raises:
        NoMapping: It is no mapping.
        LoadError: A submodule is no part of the model, or a name is that of a flat parameter.
    """
    if as_mapping(state) is None:
        raise NoMapping(f"Expected state_dict to be dict-like, got {type(state)}.")
    if state and isinstance(next(iter(state)), nn.Module):
        state = _by_submodule(model, state, options)
    if flat := [name for name in state if FLAT_PARAM in str(name)]:
        raise LoadError(
            f"{flat[0]} contains {FLAT_PARAM}. This can happen if the model is not the root module, or if the "
            "state dict "
            f"was not taken by get_model_state_dict; {plural(len(flat), 'name')} in all."
        )
    found: Mapping[str, Any] = state
    return found


def _by_submodule(model: nn.Module, state: Mapping[nn.Module, Any], options: StateDictOptions) -> dict[str, Any]:
    warnings.warn(
        "Passing model_state_dict as a ``Dict[nn.Module, Dict[str, Any]]`` is deprecated and will be removed in "
        "2.5. If "
        "you need this feature, please preprocess the model_state_dict to achieve the same functionality.",
        FutureWarning,
        stacklevel=4,
    )
    named: Iterable[tuple[str, nn.Module]] = cast("Any", model).named_modules()
    paths = {module: path for path, module in named}
    if strays := [type(module).__name__ for module in state if module not in paths]:
        raise LoadError(
            f"The state dict is given by submodule, with {plural(len(strays), 'module')} that is no part of this "
            f"{type(model).__name__}: {listing(strays)}."
        )
    made: dict[str, Any] = {}
    for module, values in state.items():
        prefix = prefix_of(model, paths[module], options.dsd_fqn_modifiers)
        made.update({prefix + name: value for name, value in values.items()})
    return made


@define(eq=False)
class ModelLoading:
    """A state dict on its way into a model: all has been checked, on all ranks, and nothing has been written.

    Attributes:
        load: What is to be done; ``None`` for nothing.
        verdict: What all ranks found.
        names: The names that the model expects.
        may_be_empty: Whether nothing at all was fine.
    """

    model: nn.Module
    options: StateDictOptions
    meetings: list[Meeting]
    load: Load | None
    verdict: Findings
    names: Collection[str]
    may_be_empty: bool

    @classmethod
    def prepared(
        cls,
        model: nn.Module,
        modules: Modules,
        state: Any,
        options: StateDictOptions,
        *,
        may_be_empty: bool = False,
    ) -> ModelLoading:
        """Compare a state dict with a model. Collective, if the model lies over ranks or rank 0 gives for all.

        Args:
            model: The model.
            modules: Its tables.
            state: Values by name, or by submodule.
            options: How strict, how whole, and from whom.
            may_be_empty: Whether nothing at all is fine, and nothing is done then.

        Raises:
            LoadError: It does not fit.
        """
        names = expected_names(modules, options)
        mine, load, fault = Findings(), None, None
        try:
            state = by_name(model, state, options)
            refuse_empty(state, options, excused=may_be_empty)
        except Exception as error:  # the other ranks have to hear of it
            fault = error
        meetings = meetings_of(modules, () if fault else state.values(), options)
        if options.broadcast_from_rank0 and (world := default_world()) is not None:
            state = announced(state, world, outline_of_model, fault)
        if fault is None:
            try:
                load = Load(modules, fit_model(modules, names, state, whole=options.full_state_dict), state, meetings)
                mine = _planned(load, options)
            except Exception as error:
                fault = error
        verdict = agreed(mine, fault, meetings)
        is_nothing = verdict.is_empty and (may_be_empty or not options.broadcast_from_rank0)
        if not is_nothing:
            _refuse(verdict, options, model)
        return cls(model, options, meetings, None if is_nothing else load, verdict, names, may_be_empty)

    def write(self) -> _IncompatibleKeys:
        """Write it.

        Raises:
            LoadError: A module that loads by code of its own refuses; all is as it was.
        """
        if self.load is None:
            return _IncompatibleKeys([], []) if self.may_be_empty else _IncompatibleKeys(list(self.names), [])
        verdict, fit = self.verdict, self.load.fit
        if verdict.has_machines:
            verdict = self._run_machines(self.load)
        self.load.write(self.verdict.collective)
        everywhere = self.options.broadcast_from_rank0  # all got one state dict, of which others may want more
        return _IncompatibleKeys(fit.missing, verdict.common if everywhere else fit.unexpected)

    def _run_machines(self, load: Load) -> Findings:
        """Let modules load that do so themselves; if anything is wrong then, all is put back on all ranks."""
        ran, backup = load.run_machines(self.verdict.collective)
        fit = load.fit
        fit.missing += ran.missing
        fit.unexpected += ran.unexpected
        try:
            mine = Findings(fit.missing, fit.unexpected, fit.unexpected, ran.errors)
            found = agreed(mine, None, self.meetings)
            _refuse(found, self.options, self.model)
        except BaseException:
            backup.put_back()
            raise
        return found


def _planned(load: Load, options: StateDictOptions) -> Findings:
    world = default_world() if options.full_state_dict else None
    if options.full_state_dict:
        load.device = _device(load.modules, world)
    if options.broadcast_from_rank0 and world is not None:
        load.from_zero = RankZero({name: value for name, value in load.state.items() if hasattr(value, "dtype")})
    load.plan()
    fit = load.fit
    return Findings(
        fit.missing,
        fit.unexpected,
        fit.unexpected,
        fit.errors,
        [],
        load.collective,
        not load.state,
        bool(fit.machines),
    )


def _device(modules: Modules, world: World | None) -> torch.device | None:
    """Give the one device of a model's tensors; where no tensor has one, that of the group.

    Raises:
        OptionError: There are several.
    """
    devices = {
        getattr(live.tensor, "_local_tensor", live.tensor).device
        for live in modules.tensors.values()
        if live.persistent and live.tensor.ndim > 0
    }
    devices.discard(torch.device("meta"))
    if len(devices) > 1:
        raise OptionError(
            f"Multiple devices found: {listing(map(str, devices))}. Whole state dicts are loaded into models on one."
        )
    return devices.pop() if devices else None if world is None else world.device


def _refuse(verdict: Findings, options: StateDictOptions, model: nn.Module) -> None:
    missing, unexpected = verdict.missing, verdict.unexpected
    if options.broadcast_from_rank0:
        unexpected = verdict.common
    if not options.strict:
        missing, unexpected = [], []
    if missing or unexpected or verdict.errors:
        raise LoadError(told(missing, unexpected, verdict.errors, type(model).__name__))
