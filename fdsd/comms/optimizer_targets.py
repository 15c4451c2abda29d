"""Where the state of live optimizers lies, slot by slot, so that values can be delivered straight into it.

Live optimizers are not changed; memory for flat slots that are not there yet is made aside.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from attrs import field, frozen
from torch.optim import Optimizer

from fdsd.comms.live import Modules
from fdsd.comms.live_optimizers import LiveGroup, LiveOptimizer, LiveParam, live_optimizers
from fdsd.comms.modules import is_dtensor
from fdsd.comms.optimizer_flats import place_in
from fdsd.comms.optimizer_templates import Templates
from fdsd.comms.optimizer_values import Policy, local_part
from fdsd.data.columns import Path, Slot, as_path, at_path
from fdsd.data.memory import is_same_view
from fdsd.data.optim import OptimState
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.layout.placed import Placement

if TYPE_CHECKING:
    from fdsd.comms.fsdp1 import FlatView
    from fdsd.layout.flattening import Flattening

__all__ = ["SlotTarget", "slot_targets"]


@frozen(eq=False)
class SlotTarget:
    """Where one value of an optimizer's state is wanted.

    Args:
        fqn: The name of the parameter in the loaded state.
        slot: The slot.
        spec: The shape of the whole tensor, and the dtype that it is to have.
        placement: Who holds what; ``None``: whole, on every rank that has the parameter. By pieces, of the flattened
            tensor: see ``flatten``.
        memory: This rank's memory, of the local shape; ``None`` if there is none yet.
        device: Where fresh memory has to be.
    """

    fqn: str
    slot: Slot
    spec: TensorSpec
    placement: Placement | None
    memory: torch.Tensor | None = field(repr=False)
    device: torch.device
    _live: Any = field(default=None, repr=False)  # what the optimizer has, or what it is to look like
    _view: FlatView | None = field(default=None, repr=False)

    @property
    def is_flat(self) -> bool:
        """Whether the value is wanted flattened."""
        return self._view is not None

    @property
    def is_cut(self) -> bool:
        """Whether the value is wanted as a tensor that says how it lies over ranks, or as a part of one."""
        return self.placement is not None and (self._view is None or self._view.flat.is_sharded)

    @property
    def flattening(self) -> Flattening | None:
        """How the value is wanted flattened, if it is."""
        return None if self._view is None else self._view.flattening

    def flatten(self, leaf: Any) -> Any:
        """Flatten a value as FSDP1 does, where it is wanted so; give any other one as it is."""
        return leaf if self.flattening is None else self.flattening.flatten(leaf)

    def finished(self, local: torch.Tensor) -> torch.Tensor:
        """Give what ``write_optimizers`` takes for a local tensor that has been delivered.

        Args:
            local: ``memory``, or a fresh tensor in its stead.

        Returns:
            The live tensor, if its memory was filled; a DTensor around the local tensor; or the tensor itself.
        """
        filled = self.memory is not None and is_same_view(local, self.memory)
        if filled and isinstance(self._live, torch.Tensor):
            return self._live
        if not is_dtensor(self._live):
            return local
        from fdsd.comms.dtensors import make_like

        made: torch.Tensor = make_like(self._live, local)
        return made


def slot_targets(
    modules: Modules, optimizers: Optimizer | Iterable[Optimizer], state: OptimState
) -> dict[tuple[Slot, str], SlotTarget]:
    """Say where each tensor of a loaded state is wanted, by slot and name.

    Args:
        modules: The model, or its parts.
        optimizers: One optimizer or several.
        state: The loaded state; of its tensors only shapes and dtypes matter, so they may be lazy, or specs.

    Returns:
        A target for each tensor of a parameter that an optimizer has. Where it has a tensor already, its memory and
        dtype; elsewhere the dtype that ``Optimizer.load_state_dict`` would choose, or the optimizer itself, if a
        first step can tell. Other values, and lists of tensors, are passed to ``write_optimizers`` as they are.

    Raises:
        FdsdError: As ``read_optimizers`` does, for parameters that are not in the model.

    Law: writing what was delivered, with ``adopt=True`` and ``dtype="source"``, needs no memory beside it.

    >>> from fdsd.comms.modules import read_modules
    >>> model = torch.nn.Linear(2, 1)
    >>> adam = torch.optim.Adam(model.parameters())
    >>> loaded = OptimState({"exp_avg": {"bias": torch.ones(1)}, "step": {"bias": torch.tensor(3.0)}})
    >>> targets = slot_targets(read_modules(model), adam, loaded)
    >>> targets["exp_avg", "bias"].spec, targets["exp_avg", "bias"].memory
    (TensorSpec((1,), torch.float32), None)
    """
    templates = Templates()
    known = {
        fqn: _Place(live, group, param, i, templates)
        for live in live_optimizers(modules, optimizers)
        for group in live.groups
        for param in group.params
        for i, fqn in enumerate(param.fqns)
    }
    fresh: dict[tuple[int, Slot], torch.Tensor] = {}
    made: dict[tuple[Slot, str], SlotTarget] = {}
    for slot, column in state.slots.items():
        for fqn, value in column.items():
            tied = modules.tensors[fqn].tied_to if fqn in modules.tensors else None
            place = known.get(fqn if tied is None else tied)
            spec = spec_of(value)
            if place is None or spec is None:
                continue
            if place.param.views and spec.shape == place.param.views[place.i].shape:
                made[slot, fqn] = _flat_target(place, fqn, slot, spec, fresh)
            else:
                made[slot, fqn] = _target(place, fqn, slot, spec, value)
    return made


@frozen(eq=False)
class _Place:
    """A parameter, or one within a flat parameter, where it stands."""

    live: LiveOptimizer
    group: LiveGroup
    param: LiveParam
    i: int
    templates: Templates

    @property
    def policy(self) -> Policy:
        moves_step = any(self.group.options.get(key) for key in ("fused", "capturable"))
        return Policy(self.param.tensor, moves_step, "source" if self.live.loads_its_own_way else "target", self.first)

    def first(self, path: Path) -> Any:
        """Give what a first step would put at a path."""
        return self.templates.at(self.live, self.group, self.param, path)

    def value(self, slot: Slot) -> Any:
        """Give what the optimizer has in a slot."""
        return at_path(self.live.row(self.param), as_path(slot))


def _target(place: _Place, fqn: str, slot: Slot, spec: TensorSpec, given: Any) -> SlotTarget:
    """Find the target of a value that is not flat."""
    param = place.param.tensor
    live = place.value(slot)
    if place.param.is_elsewhere or not _is_like(live, spec):
        return _fresh_target(place, fqn, slot, spec, given)
    memory = None if place.live.loads_its_own_way else local_part(live)
    device = param.device if memory is None and as_path(slot)[-1:] == ("step",) else local_part(live).device
    return SlotTarget(fqn, slot, spec.with_dtype(live.dtype), _placement(live), memory, device, live)


def _is_like(live: Any, spec: TensorSpec) -> TypeGuard[torch.Tensor]:
    return isinstance(live, torch.Tensor) and not live.is_meta and tuple(live.shape) == spec.shape


def _fresh_target(place: _Place, fqn: str, slot: Slot, spec: TensorSpec, given: Any) -> SlotTarget:
    param: Any = place.param.tensor
    policy, path = place.policy, as_path(slot)
    dtype = policy.dtype_of(path, spec.dtype)
    device = torch.device("cpu") if policy.stays(path) else param.device
    like: Any = param if is_dtensor(param) and tuple(param.shape) == spec.shape else None
    if is_dtensor(param) and spec.shape != tuple(param.shape):
        first: Any = place.first(path)
        if first is None and is_dtensor(given) and given.device_mesh == param.device_mesh:
            first = given  # nothing else tells how the optimizer wants it
        like = first if isinstance(first, torch.Tensor) and is_dtensor(first) and first.shape == spec.shape else None
    return SlotTarget(fqn, slot, spec.with_dtype(dtype), _placement(like), None, device, like)


def _placement(tensor: Any) -> Placement | None:
    if not is_dtensor(tensor):
        return None
    from fdsd.comms.dtensors import layout_of_dtensor

    return layout_of_dtensor(tensor)


def _flat_target(
    place: _Place, fqn: str, slot: Slot, spec: TensorSpec, fresh: dict[tuple[int, Slot], torch.Tensor]
) -> SlotTarget:
    """Find the target of a value that is like a parameter within FSDP1's flat one."""
    param, view = place.param, place.param.views[place.i]
    live = place.value(slot)
    dtype = place.policy.dtype_of(as_path(slot), spec.dtype)
    memory: torch.Tensor | None = None
    if place.live.loads_its_own_way:
        pass
    elif isinstance(live, torch.Tensor):
        dtype, memory = live.dtype, place_in(param, place.i, live.detach())
    elif (flat := param.flat) is not None:
        # all parameters of the flat one are delivered into one tensor, which the optimizer then takes over
        key = (id(param), slot)
        if key not in fresh:
            fresh[key] = torch.zeros(flat.local().shape, dtype=dtype, device=param.tensor.device)
        memory = place_in(param, place.i, fresh[key])
    return SlotTarget(fqn, slot, spec.with_dtype(dtype), view.placement(), memory, param.tensor.device, None, view)
