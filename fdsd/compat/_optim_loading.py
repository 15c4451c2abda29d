"""The whole way of a state dict into optimizers: by name, compared, agreed on by all ranks, written.

Where values lie in live optimizers, and how they are put there, ``comms`` knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, field
from torch.optim import Optimizer

from fdsd.algebra.apply import defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.comms.alone import this_rank
from fdsd.comms.backups import OptimizerBackup
from fdsd.comms.kinds import is_sharded_tensor
from fdsd.comms.live import Modules
from fdsd.comms.modules import is_dtensor
from fdsd.comms.optimizer_checks import Loaded, Require, faults_of
from fdsd.comms.optimizer_probe import fresh_copy
from fdsd.comms.optimizer_targets import SlotTarget, slot_targets
from fdsd.comms.optimizer_trials import runs_code_of_others
from fdsd.comms.optimizer_writing import write_optimizers
from fdsd.comms.worlds import Meeting, default_world, every_rank, has_group
from fdsd.compat._errors import LoadError
from fdsd.compat._loans import is_lent, take
from fdsd.compat._optim import as_state, is_by_id, own_methods, unused_momentum, used_momentum, without_momentum
from fdsd.compat._options import StateDictOptions
from fdsd.compat._rank0 import RankZero, announced, outline_of_tree
from fdsd.compat._verdict import Findings, agreed
from fdsd.data.columns import Slot, as_path, walk
from fdsd.data.errors import listing
from fdsd.data.optim import OptimState
from fdsd.data.spec import TensorSpec, VirtualTensor, is_exact
from fdsd.engine.copying import Pair, copy_pairs, prepared
from fdsd.engine.meetings import Meetings, meetings_of
from fdsd.engine.request import Request
from fdsd.layout.pieces import Pieces
from fdsd.layout.wants import local_shape_of

__all__ = ["OptimLoading"]

Place = tuple[Slot, str]


def _name(place: Place) -> str:
    """Give the key that a place has in the flat form: the same on ranks that know the parameter and on others."""
    slot, fqn = place
    return ".".join(["state", fqn, *map(str, as_path(slot))])


@define(eq=False)
class _Plan:
    """What has to be done with each value: taken from this process, or asked for."""

    targets: dict[Place, SlotTarget]
    from_zero: RankZero | None  # if rank 0 gives for all
    known: Sequence[Meeting]
    names: dict[Place, str] = field(init=False)
    for_others: dict[str, Lazy] = field(factory=dict)  # what rank 0 has besides: other ranks may want it
    here: dict[Place, torch.Tensor] = field(factory=dict)
    lent: set[Place] = field(factory=set)
    nodes: dict[Place, Lazy | None] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.names = {place: _name(place) for place in self.targets}

    @classmethod
    def of(
        cls,
        state: OptimState,
        targets: dict[Place, SlotTarget],
        from_zero: RankZero | None,
        known: Sequence[Meeting],
        optimizers: Sequence[Optimizer],
    ) -> _Plan:
        plan = cls(targets, from_zero, known)
        if from_zero is not None:
            wanted = set(plan.names.values())
            plan.for_others = {name: from_zero.node(name) for name in from_zero.specs() if name not in wanted}
        for place, target in targets.items():
            value: Any = state.slots[place[0]][place[1]]
            if from_zero is not None:
                plan.nodes[place] = target.flatten(from_zero.node(plan.names[place]))
            elif (local := _local_part(value, target)) is not None:
                plan.here[place] = local
                plan.lent.update([place] if is_lent(value, optimizers) else [])
            else:
                plan.nodes[place] = target.flatten(defer_leaf(value, plan.names[place]))
        return plan

    def drop(self, slot: Slot, fqns: Collection[str]) -> None:
        """Leave values out, on all ranks that know them."""
        for fqn in fqns:
            for table in (self.targets, self.here, self.nodes):
                table.pop((slot, fqn), None)

    def meetings(self, outs: Mapping[Place, torch.Tensor | None]) -> Meetings:
        """Sort what is asked for by the ranks that have to meet."""
        made = Meetings(self.known)
        for place, node in self.nodes.items():
            target = self.targets[place]
            out = outs.get(place)
            request = Request(node, target.placement, False, out, target.spec.dtype)
            made.add(self.names[place], request, every_rank() if self.from_zero is not None else None)
        for name, node in self.for_others.items():
            made.add(name, Request(node, Pieces.of(len(node.shape), []), False), every_rank())
        return made

    def carried_out(self, state: OptimState, agreed: Collection[Meeting]) -> OptimState:
        """Bring all values to where they are wanted, and give them as ``write_optimizers`` takes them."""
        made = self._values(agreed)
        slots = {
            slot: {
                fqn: made[slot, fqn] if (slot, fqn) in made else fresh_copy(value)
                for fqn, value in column.items()
                if (slot, fqn) in made or (slot, fqn) not in self.targets
            }
            for slot, column in state.slots.items()
        }
        return state.replace(slots=slots)

    def _values(self, agreed: Collection[Meeting]) -> dict[Place, torch.Tensor]:
        outs = {place: self._memory(place) for place in (*self.here, *self.nodes)}
        pairs: list[Pair] = []
        for place, local in self.here.items():
            out = outs[place]
            assert out is not None  # each rank has a local tensor of what it gave one of
            pairs.append((local, out))
        meetings = self.meetings(outs)
        pairs = prepared(pairs, meetings.outs)
        made = meetings.run(agreed)
        copy_pairs(pairs)
        found: dict[Place, torch.Tensor] = {}
        for place, out in outs.items():
            delivered = made.get(self.names[place])
            memory = out if delivered is None else delivered
            if memory is not None:
                found[place] = self.targets[place].finished(memory)
        return found

    def _memory(self, place: Place) -> torch.Tensor | None:
        """Give the memory for a value: that of the optimizer, or fresh one."""
        target = self.targets[place]
        if target.memory is not None:
            return target.memory
        local = self.here[place] if place in self.lent else None
        if local is not None and (local.dtype, local.device) == (target.spec.dtype, target.device):
            return local
        shape = target.spec.shape if not target.is_flat else (target.spec.numel,)
        part = local_shape_of(target.placement, shape, this_rank())
        if part is None and not target.is_flat:
            return None
        part = (0,) if part is None else part  # of a parameter that lies on other ranks only
        return torch.empty(part, dtype=target.spec.dtype, device=target.device)


def _local_part(value: Any, target: SlotTarget) -> torch.Tensor | None:
    """Give what is here of a value that lies as it is wanted."""
    if target.placement is None:
        return value.detach() if is_exact(value) else None
    if is_dtensor(value) and not target.is_flat:
        from fdsd.comms.dtensors import layout_of_dtensor, local_of_dtensor

        if layout_of_dtensor(value) == target.placement:
            return local_of_dtensor(value)
    return None


@define(eq=False)
class OptimLoading:
    """A state dict on its way into optimizers: all has been checked, on all ranks, and nothing has been written.

    Attributes:
        collective: The meetings in which values come from other ranks.
        state: What is written; ``None`` for nothing.
        plan: What has to be done with its values first; ``None`` if they are all here, as they are wanted.
        meetings: Who meets.
        runs_code: Whether code of an optimizer's own runs, on any rank, which may raise.
    """

    modules: Modules
    optimizers: Sequence[Optimizer]
    options: StateDictOptions
    collective: Collection[Meeting]
    state: OptimState | None
    plan: _Plan | None
    meetings: Sequence[Meeting] = ()
    runs_code: bool = False

    @classmethod
    def prepared(
        cls, modules: Modules, optimizers: Sequence[Optimizer], osd: Any, options: StateDictOptions
    ) -> OptimLoading:
        """Compare a state dict with optimizers. Collective, if the model lies over ranks or rank 0 gives for all.

        Args:
            modules: The model.
            optimizers: The optimizers.
            osd: Nested by name or id, or flat.
            options: How strict, how whole, and from whom.

        Raises:
            LoadError: It does not fit.
        """
        mine, state, plan, fault = Findings(), None, None, None
        meetings = meetings_of(modules, (), everywhere=options.broadcast_from_rank0)
        if options.broadcast_from_rank0 and (world := default_world()) is not None:
            osd = announced(osd, world, outline_of_tree, None, options)
        try:
            if not osd:
                mine = _nothing(osd, options)
            else:
                with own_methods(optimizers):
                    state = as_state(osd, modules, optimizers, options)
                    mine = _checked(state, modules, optimizers, options, by_id=is_by_id(osd))
                    mine.optim.used = used_momentum(state)
                    values = [value for column in state.slots.values() for value in column.values()]
                    if meetings or _is_cut(modules) or not all(map(_is_here, values)):
                        state = _deferred(state)
                        meetings = meetings_of(modules, values, everywhere=options.broadcast_from_rank0)
                        plan = _planned(state, modules, optimizers, options, meetings, mine, _offered(osd, state))
        except Exception as error:  # the other ranks have to hear of it
            fault = error
        verdict = agreed(mine, fault, meetings, options)
        if verdict.is_empty:
            return cls(modules, optimizers, options, (), None, None)
        if errors := [*[problem.message for problem in verdict.optim.problems()], *verdict.errors]:
            lax = "StateDictOptions(strict=False) loads what there is, and keeps the optimizer's own options."
            raise LoadError("\n".join([*errors, *([lax] if verdict.optim.lacking else [])]))
        made = cls(modules, optimizers, options, verdict.collective, state, plan)
        made.meetings, made.runs_code = meetings, verdict.has_machines
        if state is not None and (unused := unused_momentum(state, verdict.optim.used)):
            made.state = without_momentum(state, unused)
            if plan is not None:
                plan.drop("momentum_buffer", unused)
        return made

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
            agreed(Findings(), fault, self.meetings, self.options)
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


def _deferred(state: OptimState) -> OptimState:
    """Give ShardedTensors as expressions: they warn when they are asked like tensors."""
    slots = {
        slot: {fqn: defer_leaf(value) if is_sharded_tensor(value) else value for fqn, value in column.items()}
        for slot, column in state.slots.items()
    }
    return state.replace(slots=slots)


def _nothing(osd: Any, options: StateDictOptions) -> Findings:
    if not (options.cpu_offload and options.full_state_dict):
        raise LoadError(
            "The option indicates that model state_dict is required to save, or load but optim state_dict is empty. "
            f"{osd}"
        )
    told = f"The optimizer state dict is empty on rank {this_rank()}, and not on all"
    return Findings(errors=[f"{told}. broadcast_from_rank0=True loads what rank 0 has."], is_empty=True)


def _is_cut(modules: Modules) -> bool:
    """Tell whether a model has tensors that are laid out over ranks, be it over a single one."""
    return any(live.flat is not None or is_dtensor(live.tensor) for live in modules.tensors.values())


def _offered(osd: Mapping[str, Any], state: OptimState) -> dict[str, Any]:
    """Give all tensors of a state dict by the names of their places, those of parameters of other ranks too."""
    given = {_name((slot, fqn)): value for slot, column in state.slots.items() for fqn, value in column.items()}
    if "state" not in osd:  # the flat form is read for the parameters of this rank
        for key, value in osd.items():
            if key.startswith("state."):
                given.update({".".join(map(str, path)): leaf for path, leaf in walk(value, (key,))})
    return {name: value for name, value in given.items() if isinstance(value, torch.Tensor | TensorSpec)}


def _is_here(value: Any) -> bool:
    """Tell whether a value is a plain tensor, or holds no tensor that is anything else."""
    return is_exact(value) or not isinstance(value, torch.Tensor | VirtualTensor)


def _checked(
    state: OptimState,
    modules: Modules,
    optimizers: Sequence[Optimizer],
    options: StateDictOptions,
    *,
    by_id: bool,
) -> Findings:
    require: Require = "nothing" if not options.strict else "listed" if by_id else "state"
    loaded = Loaded.of(state, modules, optimizers)
    how: dict[str, Any] = {"allow_unexpected": True, "values": False, "is_joint": True, "options": True}
    has_code = any(map(runs_code_of_others, loaded.optimizers))
    return Findings(optim=faults_of(loaded, require, (), **how), has_machines=has_code)


def _planned(
    state: OptimState,
    modules: Modules,
    optimizers: Sequence[Optimizer],
    options: StateDictOptions,
    meetings: Sequence[Meeting],
    findings: Findings,
    offered: Mapping[str, Any],
) -> _Plan:
    targets = slot_targets(modules, optimizers, state)
    whole = dict.fromkeys(
        [fqn for (slot, fqn), target in targets.items() if target.is_cut and is_exact(state.slots[slot][fqn])]
    )
    if whole and not options.full_state_dict:
        findings.errors.append(
            f"The optimizer state of {listing(whole)} is whole tensors, and the parameters are sharded. Whole tensors "
            "are loaded with StateDictOptions(full_state_dict=True)."
        )
    from_zero = None
    if options.broadcast_from_rank0 and has_group():
        from_zero = RankZero(offered)
    plan = _Plan.of(state, targets, from_zero, meetings, optimizers)
    findings.collective = plan.meetings({}).collective
    return plan
