"""Copies of live states that stay when training goes on: on the CPU, pinned on request, or on any other device."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar, overload

import torch

from fdsd.algebra.apply import defer_leaf
from fdsd.algebra.dtypes import copy_elements
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.memory import MemorySource
from fdsd.algebra.ops.leaves import Origin
from fdsd.data.devices import parse_device
from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.data.groups import ParamGroup
from fdsd.data.optim import OptimState
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec, is_exact
from fdsd.data.statedict import StateDict, require_mapping
from fdsd.data.ties import tie_key
from fdsd.data.train import TrainState
from fdsd.data.values import is_dict, is_sequence
from fdsd.layout.placed import PlacedSource
from fdsd.layout.sharded import Sharded

__all__ = ["snapshot"]

S = TypeVar("S", OptimState, TrainState)


@overload
def snapshot(state: S, *, device: torch.device | str = "cpu", pin: bool = False) -> S: ...
@overload
def snapshot(state: Mapping[str, Any], *, device: torch.device | str = "cpu", pin: bool = False) -> StateDict[Any]: ...
def snapshot(state: Any, *, device: torch.device | str = "cpu", pin: bool = False) -> Any:
    """Copy a state, so that it stays what it is while training goes on. Each rank copies its own; nothing travels.

    Args:
        state: A mapping of names to leaves, an ``OptimState`` or a ``TrainState``.
        device: Where the copies lie.
        pin: Whether they lie in pinned memory, from which an accelerator loads faster.

    Returns:
        The same kind of state. Tied names share a copy. A DTensor keeps its mesh and placements, and its local tensor
        lies on ``device``. A lazy tensor stays the expression that it is, over copies of what it reads in memory; what
        it reads in files is read when it is materialized. Extra states are deep copies.

    Raises:
        SpecMismatch: Some tensors are on the meta device, or specs, and have no data; all are named.
        Unsupported: There is no pinned memory without an accelerator, an object cannot be copied, or the device is the
            meta device or none of this machine.

    Law: ``materialize(snapshot(x))`` equals ``materialize(x)``, whatever is written to the tensors of ``x`` in between.

    >>> live = torch.zeros(2)
    >>> kept = snapshot({"w": live})
    >>> _ = live.fill_(1)
    >>> kept["w"]
    tensor([0., 0.])
    """
    copier = _Copier(parse_device("snapshot", device) or torch.device("cpu"), pin)
    made = copier.state(state)
    copier.finish()
    return made


class _Copier:
    """Copies leaves, tied ones once."""

    def __init__(self, device: torch.device, pin: bool) -> None:
        self._device = device
        self._pin = pin
        self._made: dict[Hashable, Any] = {}
        self._alive: list[Any] = []  # keys hold ids, which must not be used again
        self._waiting: set[torch.device] = set()
        self._memo: dict[int, Any] = {}
        self._hollow: list[str] = []
        if pin and device.type != "cpu":
            raise Unsupported(f"snapshot: pinned memory is the CPU's; with device={str(device)!r} leave pin out.")
        if device.type == "meta":
            raise Unsupported("snapshot: the meta device holds no data. Give another one, or take the specs().")
        if pin:
            _check_pinning()

    def finish(self) -> None:
        """Wait until all copies are there."""
        if self._hollow:
            raise SpecMismatch(
                f"snapshot: {listing(self._hollow)} have no data (they are specs, or on the meta device). Materialize "
                "the module first (to_empty, then load)."
            )
        for device in self._waiting:
            getattr(torch, device.type).synchronize(device)

    def state(self, state: Any) -> Any:
        """Copy a state of any kind."""
        if isinstance(state, TrainState):
            optim = None if state.optim is None else self.state(state.optim)
            extra = {key: self._value(value, key) for key, value in state.extra.items()}
            return TrainState(self.state(state.model), optim, extra)
        if isinstance(state, OptimState):
            slots = {slot: self.state(column) for slot, column in state.slots.items()}
            extra = {key: self._value(value, key) for key, value in state.extra.items()}
            return state.replace(slots=slots, groups=[self._group(group) for group in state.groups], extra=extra)
        given = require_mapping(state, "snapshot")
        made = {name: self._value(leaf, name) for name, leaf in given.items()}
        metadata, history = getattr(given, "_metadata", None), getattr(given, "_history", ())
        return StateDict.trusted(made, metadata, history, getattr(given, "_kind", "exact"))

    def _group(self, group: ParamGroup) -> ParamGroup:
        options = {key: self._value(value, key) for key, value in group.options.items()}
        return ParamGroup(group.fqns, options, named=group.named)

    def _value(self, value: Any, name: Any) -> Any:
        """Copy a leaf, or a container with tensors in it."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, Lazy):
            return self._lazy(value, name)
        if isinstance(value, TensorSpec):
            self._hollow.append(str(name))
            return value
        if isinstance(value, Sharded):
            return self._sharded(value, name)
        if is_dict(value) and type(value) is dict:
            return {key: self._value(item, name) for key, item in value.items()}
        if is_sequence(value) and type(value) in (list, tuple):
            return type(value)([self._value(item, name) for item in value])
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:
            raise Unsupported(
                f"snapshot: {name!r} holds an object of type {type(value).__name__} that cannot be copied: {error}"
            ) from error

    def _sharded(self, leaf: Sharded, name: Any) -> Sharded:
        """Copy what a leaf over ranks is made of; names that share the leaf share its copy."""
        key: Hashable = "sharded", id(leaf)
        if key not in self._made:
            self._alive.append(leaf)
            self._made[key] = leaf.with_parts([self._value(part, name) for part in leaf.parts])
        made: Sharded = self._made[key]
        return made

    def _tensor(self, tensor: torch.Tensor, name: Any) -> Any:
        key = tie_key(tensor)
        if key is not None and key in self._made:
            return self._made[key]
        with torch.no_grad():
            made = self._copied(tensor.detach(), name)
        if key is not None:
            self._made[key] = made
            self._alive.append(tensor)
        return made

    def _copied(self, tensor: torch.Tensor, name: Any) -> Any:
        from fdsd.comms.modules import is_dtensor

        if is_dtensor(tensor):
            from fdsd.comms.dtensors import local_of_dtensor, make_like

            return make_like(tensor, self._copied(local_of_dtensor(tensor), name))
        if tensor.is_meta:
            self._hollow.append(str(name))
            return tensor
        if not is_exact(tensor):
            return self._odd(tensor, name)
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return tensor.to(self._device, copy=True)
        made = torch.empty_like(tensor, device=self._device, pin_memory=self._pin)
        self._move(tensor, made)
        return made

    def _odd(self, tensor: torch.Tensor, name: Any) -> Any:
        """Copy a tensor of another class: as a lazy one over ranks where its layout is known, else by its own code."""
        try:
            node = defer_leaf(tensor)
        except Unsupported:
            return tensor.to(self._device, copy=True)
        return self._lazy(node, name)

    def _move(self, source: torch.Tensor, out: torch.Tensor) -> None:
        devices = {source.device, out.device} - {torch.device("cpu")}
        if source.device == out.device or not devices or source.is_conj() or source.is_neg():
            copy_elements(source, out)
            return
        out.copy_(source, non_blocking=True)
        self._waiting.update(devices)

    # -- expressions -----------------------------------------------------------------------------------------------

    def _lazy(self, node: Lazy, name: Any) -> Lazy:
        """Rebuild an expression over copies of what it reads in memory."""
        stack: list[Lazy] = [node]
        while stack:  # without recursion: chains may be long
            top = stack[-1]
            if ("lazy", id(top)) in self._made:
                stack.pop()
                continue
            waiting = [x for x in top.inputs if ("lazy", id(x)) not in self._made]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            self._alive.append(top)
            inputs = [self._made["lazy", id(x)] for x in top.inputs]
            if isinstance(top.op, Origin):
                made = self._origin(top, top.op, name)
            elif all(new is old for new, old in zip(inputs, top.inputs, strict=True)):
                made = top
            else:
                made = Lazy(top.op, inputs, top.outputs)
            self._made["lazy", id(top)] = made
        found: Lazy = self._made["lazy", id(node)]
        return found

    def _origin(self, node: Lazy, origin: Origin, name: Any) -> Lazy:
        source: Any = origin.source
        if isinstance(source, PlacedSource):
            key: Hashable = "source", id(source)
            if key not in self._made:
                self._alive.append(source)
                self._made[key] = self._source(source, name)
            return Lazy(Origin(self._made[key], origin.fqn, origin.spec), (), node.outputs)
        if isinstance(source, MemorySource):
            made = torch.empty(origin.spec.shape, dtype=origin.spec.dtype, device=self._device, pin_memory=self._pin)
            try:
                source.read(origin.fqn, Region.whole(origin.spec.shape), made)
            except SpecMismatch:  # it is on the meta device
                self._hollow.append(str(name))
            return Lazy(Origin(MemorySource({origin.fqn: made}), origin.fqn, origin.spec), (), node.outputs)
        return node

    def _source(self, source: Any, name: Any) -> Any:
        if not hasattr(source, "copied"):
            raise Unsupported(
                f"snapshot: {name!r} is read from a {type(source).__name__}, which cannot copy what it holds. Give it "
                "a method copied(copy), or materialize the state."
            )

        def copied(local: torch.Tensor) -> Any:
            return self._tensor(local, name)

        return source.copied(copied)


def _check_pinning() -> None:
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        raise Unsupported(
            f"snapshot: there is no pinned memory here ({error}). Leave pin out; it helps accelerators only."
        ) from error
