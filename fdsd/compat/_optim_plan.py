"""What has to be done with each value of a state of optimizers: taken from this process, or asked for.

Whether a state fits, and how ranks come to agree, is unknown here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field
from torch.optim import Optimizer

from fdsd.algebra.apply import defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.comms.alone import this_rank
from fdsd.comms.live import Modules
from fdsd.comms.live_optimizers import live_optimizers
from fdsd.comms.modules import is_dtensor
from fdsd.comms.optimizer_probe import fresh_copy
from fdsd.comms.optimizer_targets import SlotTarget
from fdsd.comms.worlds import Meeting, every_rank
from fdsd.compat._loans import is_lent
from fdsd.compat._rank0 import RankZero
from fdsd.compat._subclasses import is_odd, plain_of
from fdsd.data.columns import Slot, as_path, at_path, walk
from fdsd.data.optim import OptimState
from fdsd.data.spec import TensorSpec, is_exact, spec_of
from fdsd.engine.copying import Pair, copy_pairs, prepared
from fdsd.engine.meetings import Meetings
from fdsd.engine.request import Request
from fdsd.layout.pieces import Pieces
from fdsd.layout.wants import local_shape_of

__all__ = ["OptimPlan", "Place", "joint_targets", "offered", "stray_targets"]

Place = tuple[Slot, str]


def _name(place: Place) -> str:
    """Give the key that a place has in the flat form: the same on ranks that know the parameter and on others."""
    slot, fqn = place
    return ".".join(["state", fqn, *map(str, as_path(slot))])


@define(eq=False)
class OptimPlan:
    """What has to be done with each value.

    Attributes:
        targets: Where values are wanted.
        from_zero: What rank 0 gives, if it gives for all.
        known: Who may meet.
        for_others: What rank 0 has besides: other ranks may want it.
        here: What is taken from this process.
        lent: What of that is memory that was made for an optimizer to load into.
        nodes: What is asked for.
    """

    targets: dict[Place, SlotTarget]
    from_zero: RankZero | None
    known: Sequence[Meeting]
    names: dict[Place, str] = field(init=False)
    for_others: dict[str, Lazy] = field(factory=dict)
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
    ) -> OptimPlan:
        if from_zero is None:  # a class of the user's stays where nothing is cut, and is copied by its own code
            targets = {(k, fqn): t for (k, fqn), t in targets.items() if t.is_cut or not is_odd(state.slots[k][fqn])}
        plan = cls(targets, from_zero, known)
        if from_zero is not None:
            wanted = set(plan.names.values())
            others = {name: from_zero.find(name) for name in from_zero.specs() if name not in wanted}
            plan.for_others = {name: node for name, node in others.items() if node is not None}
        for place, target in targets.items():
            value: Any = state.slots[place[0]][place[1]]
            if from_zero is not None:
                node = from_zero.find(plan.names[place])
                plan.nodes[place] = None if node is None else target.flatten(node)
                continue
            if target.is_cut:
                value = plain_of(value)
            if (local := _local_part(value, target)) is not None:
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
        everywhere = None if self.from_zero is None else every_rank()
        for place, node in self.nodes.items():
            target = self.targets[place]
            out = outs.get(place)
            request = Request(node, target.placement, False, out, target.spec.dtype)
            made.add(self.names[place], request, everywhere)
        for name, node in self.for_others.items():
            made.add(name, Request(node, Pieces.of(len(node.shape), []), False), everywhere)
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


def joint_targets(
    targets: Mapping[Place, SlotTarget], modules: Modules, optimizers: Sequence[Optimizer]
) -> dict[Place, SlotTarget]:
    """Say where LBFGS wants what it keeps for all its parameters together, which says nothing of ranks if it is whole.

    Its steps make it of their gradients: DTensors of the same mesh, with all of it on every rank.

    Args:
        targets: Where values are wanted as far as they, or a fresh state, say it.
        modules: The model.
        optimizers: The optimizers.
    """
    made = dict(targets)
    for live in live_optimizers(modules, [one for one in optimizers if isinstance(one, torch.optim.LBFGS)]):
        mesh, *others = {getattr(param.tensor, "device_mesh", None) for param in live.params} or (None,)
        if mesh is None or others:
            continue
        names = {name for param in live.params for name in modules.names_of(param.tensor)}
        for place, target in targets.items():
            if place[1] in names and target.placement is None and target.memory is None:
                made[place] = _on_every_rank(target, mesh)
    return made


def _on_every_rank(target: SlotTarget, mesh: Any) -> SlotTarget:
    from torch.distributed.tensor import DTensor, Replicate

    from fdsd.comms.dtensors import layout_of_dtensor

    spec = target.spec
    local = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    like = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return SlotTarget(target.fqn, target.slot, spec, layout_of_dtensor(like), None, target.device, like)


def stray_targets(
    state: OptimState, strays: Collection[str], optimizers: Sequence[Optimizer]
) -> dict[Place, SlotTarget]:
    """Say where state that belongs to no parameter is wanted: whole, on every rank, where an optimizer has it now.

    Args:
        state: The state.
        strays: The names under which it stands.
        optimizers: The optimizers.
    """
    made: dict[Place, SlotTarget] = {}
    for slot, column in state.slots.items():
        for fqn in column.keys() & set(strays):
            if (spec := spec_of(column[fqn])) is not None:
                there = [at_path(one.state.get(fqn), as_path(slot)) for one in optimizers]
                devices = [value.device for value in there if isinstance(value, torch.Tensor)]
                made[slot, fqn] = SlotTarget(fqn, slot, spec, None, None, (devices or [torch.device("cpu")])[0])
    return made


def offered(osd: Mapping[str, Any], state: OptimState) -> dict[str, Any]:
    """Give all tensors of a state dict by the names of their places, those of parameters of other ranks too."""
    given = {_name((slot, fqn)): value for slot, column in state.slots.items() for fqn, value in column.items()}
    if "state" not in osd:  # the flat form is read for the parameters of this rank
        for key, value in osd.items():
            if key.startswith("state."):
                given.update({".".join(map(str, path)): leaf for path, leaf in walk(value, (key,))})
    return {name: value for name, value in given.items() if isinstance(value, torch.Tensor | TensorSpec)}
