"""The whole way of a state dict into optimizers: by name, compared, agreed on by all ranks, written.

Where values lie in live optimizers, and how they are put there, ``comms`` knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from attrs import define, field
from torch.optim import Optimizer

from fdsd.algebra.apply import defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.comms.alone import this_rank
from fdsd.comms.live import Modules
from fdsd.comms.modules import is_dtensor
from fdsd.comms.optimizer_checks import Require
from fdsd.comms.optimizer_probe import fresh_copy
from fdsd.comms.optimizer_targets import SlotTarget, slot_targets
from fdsd.comms.optimizer_writing import check_write, write_optimizers
from fdsd.compat._copying import Pair, copy_pairs, prepared
from fdsd.compat._errors import LoadError
from fdsd.compat._group import default_world, has_group
from fdsd.compat._kinds import is_sharded_tensor
from fdsd.compat._meetings import Meeting, Meetings, meetings_of
from fdsd.compat._optim import as_state, is_by_id, own_methods, without_unused
from fdsd.compat._options import StateDictOptions
from fdsd.compat._rank0 import RankZero, announced, outline_of_tree
from fdsd.compat._verdict import Findings, agreed
from fdsd.data.columns import Slot, as_path
from fdsd.data.optim import OptimState
from fdsd.data.spec import VirtualTensor, is_exact
from fdsd.engine.request import Request
from fdsd.layout.wants import local_shape_of

__all__ = ["OptimLoading"]

Place = tuple[Slot, str]


def _name(place: Place) -> str:
    slot, fqn = place
    return "/".join([fqn, *map(str, as_path(slot))])


@define(eq=False)
class _Plan:
    """What has to be done with each value: taken from this process, or asked for."""

    targets: Mapping[Place, SlotTarget]
    everywhere: bool  # rank 0 gives for all
    known: Sequence[Meeting]
    names: dict[Place, str] = field(init=False)
    here: dict[Place, torch.Tensor] = field(factory=dict)
    nodes: dict[Place, Lazy | None] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.names = {place: _name(place) for place in self.targets}

    @classmethod
    def of(
        cls,
        state: OptimState,
        targets: Mapping[Place, SlotTarget],
        from_zero: RankZero | None,
        known: Sequence[Meeting],
    ) -> _Plan:
        plan = cls(targets, from_zero is not None, known)
        for place, target in targets.items():
            value: Any = state.slots[place[0]][place[1]]
            if from_zero is not None:
                plan.nodes[place] = target.flatten(from_zero.node(plan.names[place]))
            elif (local := _local_part(value, target)) is not None:
                plan.here[place] = local
            else:
                plan.nodes[place] = target.flatten(defer_leaf(value, plan.names[place]))
        return plan

    def meetings(self, outs: Mapping[Place, torch.Tensor | None]) -> Meetings:
        """Sort what is asked for by the ranks that have to meet."""
        made = Meetings(self.known)
        for place, node in self.nodes.items():
            target = self.targets[place]
            out = outs.get(place)
            request = Request(node, target.placement, False, out, target.spec.dtype)
            made.add(self.names[place], request, everywhere=self.everywhere)
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
        shape = target.spec.shape if not target.is_flat else (target.spec.numel,)
        local = local_shape_of(target.placement, shape, this_rank())
        if local is None and not target.is_flat:
            return None
        local = (0,) if local is None else local  # of a parameter that lies on other ranks only
        return torch.empty(local, dtype=target.spec.dtype, device=target.device)


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
    """

    modules: Modules
    optimizers: Sequence[Optimizer]
    options: StateDictOptions
    collective: Collection[Meeting]
    state: OptimState | None
    plan: _Plan | None

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
        meetings = meetings_of(modules, (), options)
        if options.broadcast_from_rank0 and (world := default_world()) is not None:
            osd = announced(osd, world, outline_of_tree, None)
        try:
            if not osd:
                mine = _nothing(osd, options)
            else:
                with own_methods(optimizers):
                    state = without_unused(as_state(osd, modules, optimizers, options))
                    mine = _checked(state, modules, optimizers, options, by_id=is_by_id(osd))
                    values = [value for column in state.slots.values() for value in column.values()]
                    if meetings or not all(map(_is_here, values)):
                        state = _deferred(state)
                        meetings = meetings_of(modules, values, options)
                        plan = _planned(state, modules, optimizers, options, meetings, mine)
        except Exception as error:  # the other ranks have to hear of it
            fault = error
        verdict = agreed(mine, fault, meetings)
        if verdict.is_empty:
            return cls(modules, optimizers, options, (), None, None)
        if verdict.errors:
            raise LoadError("\n".join(verdict.errors))
        return cls(modules, optimizers, options, verdict.collective, state, plan)

    def write(self) -> None:
        """Write it. Collective, if values come from other ranks."""
        if self.state is None:
            return
        state = self.state
        dtype: Literal["target", "source"] = "target"
        if self.plan is not None:
            state, dtype = self.plan.carried_out(self.state, self.collective), "source"
        with own_methods(self.optimizers):
            write_optimizers(
                state,
                self.modules,
                self.optimizers,
                require="nothing",  # what is required was checked
                allow_unexpected=True,
                adopt=self.plan is not None,  # by then the tensors are ours
                dtype=dtype,
            )


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
    return Findings(
        errors=[
            (
                f"The optimizer state dict is empty on rank {this_rank()}, and not on all. broadcast_from_rank0=True "
                "loads what "
                "rank 0 has."
            )
        ],
        is_empty=True,
    )


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
    problems = check_write(state, modules, optimizers, require=require, allow_unexpected=True)
    return Findings(errors=[problem.message for problem in problems])


def _planned(
    state: OptimState,
    modules: Modules,
    optimizers: Sequence[Optimizer],
    options: StateDictOptions,
    meetings: Sequence[Meeting],
    findings: Findings,
) -> _Plan:
    targets = slot_targets(modules, optimizers, state)
    if not options.full_state_dict:
        findings.errors += [
            f"The optimizer state {slot!r} of {fqn!r} is a whole tensor, and the parameter is sharded. Whole tensors "
            "are loaded with StateDictOptions(full_state_dict=True)."
            for (slot, fqn), target in targets.items()
            if target.placement is not None and is_exact(state.slots[slot][fqn])
        ]
    from_zero = None
    if options.broadcast_from_rank0 and has_group():
        from_zero = RankZero({_name((slot, fqn)): state.slots[slot][fqn] for slot, fqn in targets})
    plan = _Plan.of(state, targets, from_zero, meetings)
    findings.collective = plan.meetings({}).collective
    return plan
