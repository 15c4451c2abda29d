"""The whole way of a state dict into a model: by name, compared, agreed on by all ranks, written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from attrs import define
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys  # pyright: ignore[reportPrivateUsage]  # what torch returns

from fdsd.comms.live import Modules
from fdsd.comms.worlds import Meeting, default_world
from fdsd.compat._errors import LoadError, NoMapping
from fdsd.compat._fitting import told
from fdsd.compat._fqns import FLAT_PARAM, prefix_of
from fdsd.compat._model import expected_names, refuse_empty
from fdsd.compat._model_plan import Plan, warn_of_meta
from fdsd.compat._options import StateDictOptions
from fdsd.compat._options import told as told_options
from fdsd.compat._rank0 import announced, outline_of_model
from fdsd.compat._subclasses import with_plain
from fdsd.compat._verdict import Findings, agreed
from fdsd.data.errors import add_note, listing, plural
from fdsd.data.statedict import as_mapping
from fdsd.engine.meetings import meetings_of

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
            f"state dict was not taken by get_model_state_dict; {plural(len(flat), 'name')} in all."
        )
    found: Mapping[str, Any] = state
    return found


def _by_submodule(model: nn.Module, state: Mapping[nn.Module, Any], options: StateDictOptions) -> dict[str, Any]:
    warnings.warn(
        "Passing model_state_dict as a ``Dict[nn.Module, Dict[str, Any]]`` is deprecated and will be removed in "
        "2.5. If you need this feature, please preprocess the model_state_dict to achieve the same functionality.",
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
        known: Who may meet for values that come from other ranks.
        plan: What is to be done; ``None`` for nothing.
        verdict: What all ranks found.
        nothing: What is answered if nothing is done.
    """

    model: nn.Module
    options: StateDictOptions
    known: Sequence[Meeting]
    plan: Plan | None
    verdict: Findings
    nothing: _IncompatibleKeys

    @classmethod
    def prepared(
        cls,
        model: nn.Module,
        modules: Modules,
        state: Any,
        options: StateDictOptions,
        *,
        may_be_empty: bool = False,
        fault: Exception | None = None,
    ) -> ModelLoading:
        """Compare a state dict with a model. Collective, if the model lies over ranks or rank 0 gives for all.

        Args:
            model: The model.
            modules: Its tables.
            state: Values by name, or by submodule.
            options: How strict, how whole, and from whom.
            may_be_empty: Whether nothing at all is fine, and nothing is done then.
            fault: What went wrong on this rank before: the others have to hear of it.

        Raises:
            LoadError: It does not fit.
        """
        how, world = told_options(options), default_world() if options.broadcast_from_rank0 else None
        if world is not None and world.rank:
            state = {}  # whatever it is, rank 0 gives
        if fault is None:
            state, fault = _attempted(lambda: _given(model, modules, state, options, may_be_empty))
        given = () if as_mapping(state) is None else state.items()  # whatever is wrong, others may come for it
        known = meetings_of(modules, given, everywhere=options.broadcast_from_rank0)
        if world is not None:
            state = announced(state, world, outline_of_model, fault, f"what rank 0 gives the model, with {how}")
        plan = None
        if fault is None:
            plan, fault = _attempted(lambda: Plan.of(modules, state, options, known))
        found = Findings() if plan is None else plan.findings(is_empty=not state)
        verdict = agreed(found, fault, known, f"whether it fits the model, with {how}")
        if verdict.is_empty and (may_be_empty or not options.broadcast_from_rank0):
            plan = None
        else:
            _refuse(verdict, options, model)
        if plan is not None:
            plan.join(verdict)
        lacking = expected_names(modules, options) if plan is None and not may_be_empty else ()
        return cls(model, options, known, plan, verdict, _IncompatibleKeys(list(lacking), []))

    def write(self) -> _IncompatibleKeys:
        """Write it: what may raise goes first.

        Raises:
            LoadError: Code of a module's own refuses; all is as it was, on all ranks.
        """
        if self.plan is None:
            return self.nothing
        load, verdict, match = self.plan.load, self.verdict, self.plan.fit.match
        missing: Sequence[str] = match.missing
        unexpected: Sequence[str] = match.unexpected
        load.keep_sources()
        if verdict.has_machines:
            load.take_all(self.plan.for_code.run(verdict.collective))
            missing, unexpected, verdict = self._run_code(self.plan)
        load.take_all(self.plan.others.run(self.verdict.collective))
        if load.place() or load.modules.through:
            warn_of_meta(load.modules)
        # of one state dict for all, other ranks may want more
        return _IncompatibleKeys(
            list(missing), verdict.common if self.options.broadcast_from_rank0 else list(unexpected)
        )

    def _run_code(self, plan: Plan) -> tuple[Sequence[str], Sequence[str], Findings]:
        """Let modules load that do so themselves; if anything is wrong then, all is put back on all ranks."""
        undo = plan.load.backup()
        try:
            found, fault = plan.run_code()
            verdict = agreed(found, fault, self.known, "whether modules have taken it")
            _refuse(verdict, self.options, self.model)
        except BaseException as error:
            try:
                undo()
            except Exception as another:
                add_note(error, f"Undoing it raised {type(another).__name__}: {another}")
            raise
        return found.missing, found.unexpected, verdict


def _attempted(action: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Do what may fail on some ranks only: the others have to hear of it."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def _given(
    model: nn.Module, modules: Modules, state: Any, options: StateDictOptions, may_be_empty: bool
) -> Mapping[str, Any]:
    named = by_name(model, state, options)
    refuse_empty(named, options, excused=may_be_empty)
    return with_plain(named, modules, everywhere=options.broadcast_from_rank0)


def _refuse(verdict: Findings, options: StateDictOptions, model: nn.Module) -> None:
    missing, unexpected = verdict.missing, verdict.unexpected
    if options.broadcast_from_rank0:
        unexpected = verdict.common
    if not options.strict:
        missing, unexpected = [], []
    if missing or unexpected or verdict.errors:
        raise LoadError(told(missing, unexpected, verdict.errors, type(model).__name__))
