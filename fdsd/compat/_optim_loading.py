"""The whole way of a state dict into optimizers: by name, compared, agreed on by all ranks, written.

Where values lie in live optimizers, and how they are put there, ``comms`` knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import define
from torch.optim import Optimizer

from fdsd.comms.alone import this_rank
from fdsd.comms.backups import OptimizerBackup
from fdsd.comms.live import Modules
from fdsd.comms.modules import is_dtensor
from fdsd.comms.optimizer_checks import Loaded, Require, faults_of
from fdsd.comms.optimizer_targets import slot_targets
from fdsd.comms.optimizer_trials import runs_code_of_others
from fdsd.comms.optimizer_writing import write_optimizers
from fdsd.comms.worlds import Meeting, default_world, has_group
from fdsd.compat._errors import LoadError
from fdsd.compat._loans import is_lent, take
from fdsd.compat._optim import as_state, is_by_id, own_methods, unused_momentum, used_momentum, without_momentum
from fdsd.compat._optim_plan import OptimPlan, joint_targets, offered, stray_targets
from fdsd.compat._options import StateDictOptions, told
from fdsd.compat._rank0 import RankZero, announced, outline_of_tree
from fdsd.compat._sharded import deferred_slots
from fdsd.compat._subclasses import is_whole, plain_tree
from fdsd.compat._verdict import Findings, agreed
from fdsd.data.errors import listing
from fdsd.data.optim import OptimState
from fdsd.data.spec import VirtualTensor, is_exact
from fdsd.engine.meetings import meetings_of

__all__ = ["OptimLoading"]


@define(eq=False)
class OptimLoading:
    """A state dict on its way into optimizers: all has been checked, on all ranks, and nothing has been written.

    Attributes:
        meetings: Who meets.
        collective: The meetings in which values come from other ranks.
        state: What is written; ``None`` for nothing.
        plan: What has to be done with its values first; ``None`` if they are all here, as they are wanted.
        runs_code: Whether code of an optimizer's own runs, on any rank, which may raise.
    """

    modules: Modules
    optimizers: Sequence[Optimizer]
    options: StateDictOptions
    meetings: Sequence[Meeting]
    collective: Collection[Meeting] = ()
    state: OptimState | None = None
    plan: OptimPlan | None = None
    runs_code: bool = False

    @classmethod
    def prepared(
        cls,
        modules: Modules,
        optimizers: Sequence[Optimizer],
        osd: Any,
        options: StateDictOptions,
        *,
        fault: Exception | None = None,
    ) -> OptimLoading:
        """Compare a state dict with optimizers. Collective, if the model lies over ranks or rank 0 gives for all.

        Args:
            modules: The model.
            optimizers: The optimizers.
            osd: Nested by name or id, or flat.
            options: How strict, how whole, and from whom.
            fault: What went wrong on this rank before: the others have to hear of it.

        Raises:
            LoadError: It does not fit.
        """
        how, everywhere = told(options), options.broadcast_from_rank0
        if everywhere and (world := default_world()) is not None:
            if world.rank == 0 and fault is None:
                osd, fault = plain_tree(osd)
            osd = announced(osd, world, outline_of_tree, fault, f"what rank 0 gives the optimizers, with {how}")
        made = cls(modules, optimizers, options, meetings_of(modules, (), everywhere=everywhere))
        mine = Findings()
        if fault is None:
            try:
                mine = made._compared(osd) if osd else _nothing(osd, options)
            except Exception as error:  # the other ranks have to hear of it
                fault = error
        made._settle(agreed(mine, fault, made.meetings, f"whether it fits the optimizers, with {how}"))
        return made

    def _compared(self, osd: Any) -> Findings:
        """Read a state dict, and plan what has to be done with it."""
        options, optimizers = self.options, self.optimizers
        with own_methods(optimizers):
            state = as_state(osd, self.modules, optimizers, options)
            loaded = Loaded.of(state, self.modules, optimizers)
            found = _checked(loaded, options, by_id=is_by_id(osd))
            found.optim.used = used_momentum(state)
            self.state = state = deferred_slots(state if options.strict else _without(state, loaded.homeless()))
            given = [item for column in state.slots.values() for item in column.items()]
            if self.meetings or _is_cut(self.modules) or not all(_is_here(value) for _, value in given):
                self.meetings = meetings_of(self.modules, given, everywhere=options.broadcast_from_rank0)
                self._plan(state, offered(osd, loaded.state), loaded.strays(), found)
        return found

    def _plan(self, state: OptimState, given: Mapping[str, Any], strays: Collection[str], found: Findings) -> None:
        targets = joint_targets(slot_targets(self.modules, self.optimizers, state), self.modules, self.optimizers)
        whole = dict.fromkeys(
            [fqn for (slot, fqn), target in targets.items() if target.is_cut and is_whole(state.slots[slot][fqn])]
        )
        if whole and not self.options.full_state_dict:
            found.errors.append(
                f"The optimizer state of {listing(whole)} is whole tensors, and the parameters are sharded. Whole "
                "tensors are loaded with StateDictOptions(full_state_dict=True)."
            )
        from_zero = None
        if self.options.broadcast_from_rank0 and has_group():
            from_zero = RankZero(given)
            targets |= stray_targets(state, strays, self.optimizers)
        self.plan = OptimPlan.of(state, targets, from_zero, self.meetings, self.optimizers)
        found.collective = self.plan.meetings({}).collective

    def _settle(self, verdict: Findings) -> None:
        """Take what all ranks have found.

        Raises:
            LoadError: It does not fit.
        """
        if verdict.is_empty:
            self.state = self.plan = None
            return
        if errors := [*[problem.message for problem in verdict.optim.problems()], *verdict.errors]:
            lax = "StateDictOptions(strict=False) loads what there is, and keeps the optimizer's own options."
            raise LoadError("\n".join([*errors, *([lax] if verdict.optim.lacking else [])]))
        self.collective, self.runs_code = verdict.collective, verdict.has_machines
        if self.state is not None and (unused := unused_momentum(self.state, verdict.optim.used)):
            self.state = without_momentum(self.state, unused)
            if self.plan is not None:
                self.plan.drop("momentum_buffer", unused)

    def write(self) -> None:
        """Write it. Collective, if values come from other ranks.

        Raises:
            LoadError: Code of an optimizer's own refuses; all is as it was, on all ranks.
        """
        if not self.runs_code:
            self._write()
            return
        undo, fault = OptimizerBackup.of(self.optimizers).put_back, None
        try:
            self._write()
        except Exception as error:  # the other ranks have to hear of it
            fault = error
        try:
            agreed(Findings(), fault, self.meetings, "whether optimizers have taken it")
        except BaseException:
            undo()
            raise

    def _write(self) -> None:
        if self.state is None:
            return
        state = self.state if self.plan is None else self.plan.carried_out(self.state, self.collective)
        with own_methods(self.optimizers):
            write_optimizers(
                state,
                self.modules,
                self.optimizers,
                require="nothing",  # what is required was checked
                allow_unexpected=True,
                adopt=self.plan is not None or partial(is_lent, optimizers=self.optimizers),
                dtype="target" if self.plan is None else "source",
            )
        take(self.state, self.optimizers)


def _nothing(osd: Any, options: StateDictOptions) -> Findings:
    if not (options.cpu_offload and options.full_state_dict):
        raise LoadError(
            "The option indicates that model state_dict is required to save, or load but optim state_dict is empty. "
            f"{osd}"
        )
    text = f"The optimizer state dict is empty on rank {this_rank()}, and not on all"
    return Findings(errors=[f"{text}. broadcast_from_rank0=True loads what rank 0 has."], is_empty=True)


def _is_cut(modules: Modules) -> bool:
    """Tell whether a model has tensors that are laid out over ranks, be it over a single one."""
    return any(live.flat is not None or is_dtensor(live.tensor) for live in modules.tensors.values())


def _is_here(value: Any) -> bool:
    """Tell whether a value is no tensor, or one that is whole and in memory."""
    return is_exact(value) or is_whole(value) or not isinstance(value, torch.Tensor | VirtualTensor)


def _checked(loaded: Loaded, options: StateDictOptions, *, by_id: bool) -> Findings:
    require: Require = "nothing" if not options.strict else "listed" if by_id else "state"
    how: dict[str, Any] = {"allow_unexpected": True, "values": False, "is_joint": True, "options": True}
    found = faults_of(loaded, require, (), **how)
    if not options.strict:
        found.homeless.clear()
    return Findings(optim=found, has_machines=any(map(runs_code_of_others, loaded.optimizers)))


def _without(state: OptimState, names: Collection[str]) -> OptimState:
    """Leave names out of the slots."""
    if not names:
        return state
    slots = {
        slot: {fqn: value for fqn, value in column.items() if fqn not in names} for slot, column in state.slots.items()
    }
    return state.replace(slots=slots)
