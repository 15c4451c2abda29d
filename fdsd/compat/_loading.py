"""Writing a state dict into a model: each rank gets its own part, and what can be copied here is copied here.

What fits, and where, was found before; modules that load by code of their own are ``_machines``' business.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import SplitDim
from fdsd.comms.alone import this_rank
from fdsd.comms.installing import install, is_meta, like_live, new_memory
from fdsd.comms.live import LiveTensor, Modules
from fdsd.comms.modules import is_dtensor, layout_of, memory_of
from fdsd.compat._copying import copy_pairs, prepared
from fdsd.compat._fitting import Fit
from fdsd.compat._kinds import is_sharded_tensor
from fdsd.compat._machines import Backup, Ran, run_machine
from fdsd.compat._meetings import Meeting, Meetings
from fdsd.compat._rank0 import RankZero
from fdsd.data.errors import listing
from fdsd.data.spec import is_exact
from fdsd.engine.request import Request
from fdsd.layout.wants import local_shape_of

__all__ = ["Load"]


@define(eq=False)
class Load:
    """The loading of a model: copies that this rank makes by itself, and requests for the rest.

    Args:
        modules: The model.
        fit: What goes where.
        state: The values.
        meetings: Who may meet for values that come from other ranks.
        from_zero: The tensors that rank 0 has for all, if it has.
        device: Where plain tensors go that have no memory yet; by default where the value is.
    """

    modules: Modules
    fit: Fit
    state: Mapping[str, Any]
    meetings: Sequence[Meeting] = ()
    from_zero: RankZero | None = None
    device: torch.device | None = None
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = field(factory=list)
    requests: Meetings = field(init=False)
    for_machines: Meetings = field(init=False)
    fresh: dict[str, torch.Tensor] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.requests, self.for_machines = Meetings(self.meetings), Meetings(self.meetings)

    def plan(self) -> None:
        """Find out what has to be done; nothing is written."""
        tensors = self.modules.tensors
        for name, source in self.fit.loads.items():
            live = tensors[name]
            if not self._is_direct(live, self.state[source]):
                self._ask(self.requests, name, self._request(live, source, fresh=is_meta(live)))
        for names in self.fit.machines.values():
            for name in names:
                if self._is_wanted(name):
                    known = tensors.get(name)
                    whole = Request(self._node(name), None, everyone=False)
                    request = whole if known is None else self._request(known, name, fresh=True)
                    self._ask(self.for_machines, name, request)

    def _ask(self, meetings: Meetings, name: str, request: Request) -> None:
        meetings.add(name, request, everywhere=self.from_zero is not None)

    @property
    def collective(self) -> set[Meeting]:
        """The meetings in which values come from other ranks."""
        return self.requests.collective | self.for_machines.collective

    def _is_direct(self, live: LiveTensor, value: Any) -> bool:
        """Note a copy that needs no plan and nobody else; tell whether this is one."""
        target: Any = live.tensor
        if self.from_zero is not None or live.flat is not None or not isinstance(value, torch.Tensor):
            return False
        if not is_sharded_tensor(value) and value.is_meta:
            return True  # a meta model that is given its own tensors
        if is_exact(target) and is_exact(value):
            if target.is_meta:
                target = self.fresh[live.fqn] = torch.empty_like(target, device=self.device or value.device)
            self.pairs.append((value if value.ndim == target.ndim else value.reshape(target.shape), target))
            return True
        theirs: Any = value
        both = is_dtensor(target) and is_dtensor(value) and not is_meta(live)
        if both and target.device_mesh == theirs.device_mesh and target.placements == theirs.placements:
            self.pairs.append((theirs._local_tensor, target._local_tensor))
            return True
        return False

    def _node(self, source: str) -> Lazy | None:
        """Give a value as an expression."""
        node = defer_leaf(self.state[source], source) if self.from_zero is None else self.from_zero.node(source)
        return node if isinstance(node, Lazy) else None

    def _request(self, live: LiveTensor, source: str, *, fresh: bool) -> Request:
        node, target = self._node(source), layout_of(live)
        if not fresh and live.flat is None and (node is None or node.shape == live.tensor.shape):
            return Request(node, target, False, memory_of(live))
        spec = live.spec
        if node is not None and node.shape != spec.shape:
            node = apply(SplitDim(0, ()), node)  # one element, in one dim
        if live.flat is not None:
            spec = spec.with_shape((spec.numel,))
            node = None if node is None else live.flat.flatten(node)
        if not fresh:
            return Request(node, target, False, memory_of(live))
        shape = local_shape_of(target, spec.shape, this_rank())
        device = self.device if target is None else None
        out = None if shape is None else new_memory(live, shape, spec.dtype, device)
        return Request(node, target, False, out, spec.dtype)

    def _is_wanted(self, name: str) -> bool:
        """Tell whether a value for a module's own code has to be brought into another form."""
        value, live = self.state[name], self.modules.tensors.get(name)
        if self.from_zero is not None:
            return name in self.from_zero
        return live is not None and is_dtensor(live.tensor) and is_exact(value)

    def run_machines(self, agreed: Collection[Meeting]) -> tuple[Ran, Backup]:
        """Let modules with code of their own load. Collective in the meetings that were agreed on.

        Returns:
            What they found, and a way back.
        """
        made = self.for_machines.run(agreed)
        backup = Backup([machine.module for machine in self.fit.machines])
        ran = Ran([], [], [])
        metadata = getattr(self.state, "_metadata", None)
        through = self.modules.through
        for machine, names in self.fit.machines.items():
            values = {name: self._value_for_machine(name, made) for name in names}
            found = run_machine(machine, values, metadata, [name for name in through if through[name] is machine])
            for into, some in zip(ran, found, strict=True):
                into.extend(some)
        return ran, backup

    def _value_for_machine(self, name: str, made: Mapping[str, torch.Tensor]) -> Any:
        if name not in made:
            return self.state[name]
        live = self.modules.tensors.get(name)
        return made[name] if live is None else like_live(live, made[name])

    def write(self, agreed: Collection[Meeting]) -> None:
        """Write the values into the model, install new memory, hand on extra states. Collective likewise."""
        pairs = prepared(self.pairs, self.requests.outs)
        made = self.requests.run(agreed)
        copy_pairs(pairs)
        self._finish(made)

    def _finish(self, made: Mapping[str, torch.Tensor]) -> None:
        """Install new memory, and hand on extra states."""
        installed: list[LiveTensor] = []
        for name in self.fit.loads:
            live = self.modules.tensors[name]
            value = self.fresh.get(name, made.get(name))
            if value is not None and is_meta(live):
                install(self.modules, live, value)
                installed.append(live)
        for live in installed:
            _tell_fsdp(live)
        for name in self.fit.extra:
            owner: Any = self.modules.extra[name].owner
            owner.set_extra_state(self.state[name])
        if installed or self.fit.machines:
            _warn_of_meta(self.modules)


def _tell_fsdp(live: LiveTensor) -> None:
    """Let FSDP2 find the new tensor, as it does after ``load_state_dict(assign=True)``."""
    from torch.nn.modules.module import _IncompatibleKeys  # pyright: ignore[reportPrivateUsage]  # what its hook takes

    owner: Any = live.owner
    for hook in owner._load_state_dict_post_hooks.values():
        if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp."):
            hook(owner, _IncompatibleKeys([], []))


def _warn_of_meta(modules: Modules) -> None:
    tensors = (*[live for live in modules.tensors.values() if live.tied_to is None], *modules.others)
    names = [live.fqn for live in tensors if getattr(live.owner, live.name, None) is not None and _is_still_meta(live)]
    if names:
        warnings.warn(
            f"After the load, still on the meta device: {listing(names, sort=False)}. The state dict has nothing for "
            "them (non-persistent buffers are never in one). Give them memory and values before the model is used.",
            UserWarning,
            stacklevel=4,
        )


def _is_still_meta(live: LiveTensor) -> bool:
    now: Any = getattr(live.owner, live.name)
    return isinstance(now, torch.Tensor) and bool(getattr(now, "_local_tensor", now).is_meta)
