"""The walk through a module tree: what stands where, in the order of ``state_dict``, without the segments of wrappers.

Modules that save by code of their own are ``showing``'s business, flat parameters that of ``fsdp1``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fdsd.comms.hooks import Kind, Machine, has_own_code, kind_of, loading_code, pre_hooks, saving_code
from fdsd.comms.live import LiveTensor
from fdsd.comms.tabling import Table
from fdsd.comms.wrappers import EXTRA_STATE, FSDP1_WRAPPED
from fdsd.data.errors import Unsupported

if TYPE_CHECKING:
    from fdsd.comms.fsdp1 import FlatView

__all__ = ["Place", "Walk"]

_CHECKPOINT = "_checkpoint_wrapped_module"


_REST: tuple[Any, ...] = (None, None, None, True)
_new: Any = vars(tuple)["__new__"]  # what LiveTensor() does, without taking arguments apart, which takes as long


class Place(NamedTuple):
    """A module where it stands.

    Attributes:
        module: The module.
        prefix: Its canonical name with the dot; empty at the top.
        path: The same with the segments of wrappers, as ``load_state_dict`` spells it.
        kind: What its class does.
    """

    module: nn.Module
    prefix: str
    path: str
    kind: Kind


class Walk:
    """One walk through one part of a model.

    Args:
        part: The module to walk through.

    Raises:
        Unsupported: A module contains itself.
    """

    def __init__(self, part: nn.Module) -> None:
        self.places: list[Place] = []
        self.machines: list[tuple[range, Machine]] = []  # with the places at and below it; outer ones first
        self._flats: dict[int, dict[str, FlatView]] = {}  # by the identity of the module
        self._originals: dict[int, FlatView] = {}  # by the identity of the original parameter
        self._dtypes: dict[int, torch.dtype] = {}  # of buffers before mixed precision, by their identity
        self._kinds: dict[type[nn.Module], Kind] = {}
        self._above: set[int] = set()
        self._visit(part, "", "")
        self.machines.sort(key=lambda found: (found[0].start, -found[0].stop))

    def _visit(self, module: nn.Module, prefix: str, path: str) -> None:
        if id(module) in self._above:
            raise Unsupported(
                f"The module {type(module).__name__} at {path[:-1]!r} contains itself, so its names have no end. Keep "
                "the reference out of the module tree, for example in a list."
            )
        kind = self._kinds.get(type(module))
        if kind is None:
            kind = self._kinds[type(module)] = kind_of(module)
        first = len(self.places)
        self.places.append(Place(module, prefix, path, kind))
        inside: Any = module
        children: dict[str, nn.Module | None] = inside._modules
        if children:
            self._above.add(id(module))
            for name, child in children.items():
                if child is None:
                    continue
                if name == kind.wraps:
                    self._visit(child, prefix, path if name == _CHECKPOINT else f"{path}{name}.")
                else:
                    self._visit(child, f"{prefix}{name}.", f"{path}{name}.")
            self._above.discard(id(module))
        if has_own_code(module, kind):
            self._add_machine(first)

    def _add_machine(self, first: int) -> None:
        module, prefix, path, kind = self.places[first]
        saving, loading = saving_code(module, kind), loading_code(module, kind)
        if saving or loading:
            paths = {place.prefix: place.path[len(path) :] for place in self.places[first:]}
            below = range(first, len(self.places))
            self.machines.append((below, Machine(module, prefix, saving, loading, paths)))

    def into(self, table: Table, fqn_modifiers: str) -> None:
        """Write what was found into a table.

        Args:
            table: The table.
            fqn_modifiers: The method by which a module says which child is left out of the names it shows.

        Raises:
            NameConflict: Two different tensors would have one name.
            Unsupported: Code of a module's own gives what cannot be understood.
        """
        self._run_pre_hooks()
        wrapped = [place.module for place in self.places if place.kind.wraps == FSDP1_WRAPPED]
        if wrapped:
            from fdsd.comms.fsdp1 import find_flats, original_dtypes

            self._flats = find_flats(wrapped, table.flats)
            views = [view for flat in table.flats.values() if flat.uses_originals for view in flat.views]
            self._originals = {id(view.live): view for view in views}
            self._dtypes = original_dtypes(wrapped)
        if any(machine.saving for _, machine in self.machines):
            from fdsd.comms.showing import Showing

            Showing(self, fqn_modifiers).into(table)
            return
        rows: list[LiveTensor] = []
        metadata = table.metadata
        for place in self.places:
            module, prefix, _, kind = place
            if kind.wraps is None:
                inside: Any = module
                metadata[prefix[:-1]] = {"version": inside._version}
            self.own(place, rows)
            if kind.has_extra:
                table.extend(rows)
                rows.clear()
                table.add_extra(prefix + EXTRA_STATE, module.get_extra_state(), module)
        table.extend(rows)
        for below, machine in reversed(self.machines):  # the outermost one has the last word
            table.through.update(dict.fromkeys(self._names_of(below), machine))

    def _run_pre_hooks(self) -> None:
        """Run what runs before a state dict is taken; FSDP2 puts its shards back in place so."""
        itself = {i for below, machine in self.machines if "state_dict" in machine.saving for i in below}
        for i, place in enumerate(self.places):
            inside: Any = place.module
            if inside._state_dict_pre_hooks and i not in itself:
                for hook in pre_hooks(inside):
                    hook(inside, place.prefix, False)

    def _names_of(self, below: range) -> Iterator[str]:
        for i in below:
            rows: list[LiveTensor] = []
            self.own(self.places[i], rows)
            yield from [live.fqn for live in rows if live.persistent]
            if self.places[i].kind.has_extra:
                yield self.places[i].prefix + EXTRA_STATE

    def own(self, place: Place, rows: list[LiveTensor]) -> None:
        """Append the tensors of one module, but not of those below it: parameters first, then buffers."""
        module, prefix, _, _ = place
        inside: Any = module
        parameters: Mapping[str, torch.Tensor | None] = inside._parameters
        if parameters or self._flats:
            if self._flats:
                parameters = self._flattened(place, rows)
            for name, tensor in parameters.items():
                if tensor is not None:
                    row = (prefix + name, "parameter", True, tensor.requires_grad, tensor, module, name)
                    rows.append(_new(LiveTensor, row + _REST))
        buffers: Mapping[str, torch.Tensor | None] = inside._buffers
        if buffers:
            passing: set[str] = inside._non_persistent_buffers_set
            for name, tensor in buffers.items():
                if tensor is not None:
                    dtype = self._dtypes.get(id(tensor)) if self._dtypes else None
                    is_in = name not in passing
                    trains = tensor.requires_grad
                    rows.append(
                        LiveTensor(prefix + name, "buffer", is_in, trains, tensor, module, name, None, None, dtype)
                    )

    def _flattened(self, place: Place, rows: list[LiveTensor]) -> dict[str, torch.Tensor | None]:
        """Append the parameters of a module that lie in flat parameters of FSDP1, and give the others."""
        module, prefix, _, _ = place
        inside: Any = module
        parameters: Mapping[str, torch.Tensor | None] = inside._parameters
        flats = dict(self._flats.get(id(module), {}))
        for name, tensor in parameters.items():  # tied to one in another unit, which FSDP does not know
            if name not in flats and id(tensor) in self._originals:
                flats[name] = self._originals[id(tensor)]
        for name, view in flats.items():
            live = view.live
            rows.append(
                LiveTensor(prefix + name, "parameter", True, live.requires_grad, live, module, name, None, view)
            )
        return {
            name: tensor
            for name, tensor in parameters.items()
            if name not in flats and not getattr(tensor, "_is_flat_param", False)
        }
