"""The walk through a module tree: what stands where, in the order of ``state_dict``, without the segments of wrappers.

Modules that save by code of their own are ``showing``'s business, flat parameters that of ``fsdp1``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fdsd.comms.hooks import Kind, Machine, has_own_code, kind_of, loading_code, run_pre_hooks, saving_code
from fdsd.comms.live import LiveTensor
from fdsd.comms.tabling import Table
from fdsd.comms.wrappers import EXTRA_STATE, FSDP1_WRAPPED
from fdsd.data.errors import Unsupported

if TYPE_CHECKING:
    from fdsd.comms.fsdp1 import FlatView

__all__ = ["Place", "Walk"]

_CHECKPOINT = "_checkpoint_wrapped_module"


_new: Any = vars(tuple)["__new__"]  # what LiveTensor() does, without taking arguments apart, which takes as long


class Place(NamedTuple):
    """A module where it stands.

    Attributes:
        module: The module.
        prefix: Its canonical name with the dot; empty at the top.
        kind: What its class does.
    """

    module: nn.Module
    prefix: str
    kind: Kind


class Walk:
    """One walk through one part of a model.

    The tensors are read afterwards: hooks that have to run before may replace them.

    Args:
        part: The module to walk through.

    Raises:
        Unsupported: A module contains itself.
    """

    def __init__(self, part: nn.Module) -> None:
        self.places: list[Place] = []
        self.machines: list[tuple[range, Machine]] = []  # with the places at and below it; outer ones first
        self._hooked: list[int] = []  # the numbers of places with pre-hooks
        self._flats: dict[int, dict[str, FlatView]] = {}  # by the identity of the module
        self._originals: dict[int, FlatView] = {}  # by the identity of the original parameter
        self._dtypes: dict[int, torch.dtype] = {}  # of buffers before mixed precision, by their identity
        self._kinds: dict[type[nn.Module], Kind] = {}
        self._above: set[int] = set()
        self._visit(part, "")
        self.machines.sort(key=lambda found: (found[0].start, -found[0].stop))

    def _visit(self, module: nn.Module, prefix: str) -> None:
        kind = self._kinds.get(type(module))
        if kind is None:
            kind = self._kinds[type(module)] = kind_of(module)
        first = len(self.places)
        self.places.append(_new(Place, (module, prefix, kind)))
        inside: Any = module
        if inside._state_dict_pre_hooks:
            self._hooked.append(first)
        children: dict[str, nn.Module | None] = inside._modules
        if children:
            if id(module) in self._above:
                raise Unsupported(
                    f"The module {type(module).__name__} at {prefix[:-1]!r} contains itself, so its names have no end. "
                    "Keep the reference out of the module tree, for example in a list."
                )
            self._above.add(id(module))
            for name, child in children.items():
                if child is not None:
                    self._visit(child, prefix if name == kind.wraps else f"{prefix}{name}.")
            self._above.discard(id(module))
        if has_own_code(module, kind):
            self._add_machine(first)

    def _add_machine(self, first: int) -> None:
        module, prefix, kind = self.places[first]
        saving, loading = saving_code(module, kind), loading_code(module, kind)
        if saving or loading:
            paths = dict(self._paths(module, prefix, ""))
            self.machines.append((range(first, len(self.places)), Machine(module, prefix, saving, loading, paths)))

    def _paths(self, module: nn.Module, prefix: str, path: str) -> Iterator[tuple[str, str]]:
        """Give each canonical prefix, and how ``load_state_dict`` spells it; inner modules after wrappers."""
        yield prefix, path
        wraps = self._kinds[type(module)].wraps
        inside: Any = module
        for name, child in inside._modules.items():
            if child is not None:
                below = path if name == wraps == _CHECKPOINT else f"{path}{name}."
                yield from self._paths(child, prefix if name == wraps else f"{prefix}{name}.", below)

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
        self._find_flats(table)
        if any(machine.saving for _, machine in self.machines):
            from fdsd.comms.showing import Showing

            Showing(self, fqn_modifiers).into(table)
            return
        rows, extras = self._read()
        places: Any = self.places
        table.metadata.update(
            {prefix[:-1]: {"version": module._version} for module, prefix, kind in places if kind.wraps is None}
        )
        done = 0
        for end, (module, prefix, _) in extras:
            table.extend(rows[done:end])
            table.add_extra(prefix + EXTRA_STATE, module.get_extra_state(), module)
            done = end
        table.extend(rows[done:] if done else rows)
        for below, machine in reversed(self.machines):  # the outermost one has the last word
            table.through.update(dict.fromkeys(self._names_of(below), machine))

    def _read(self) -> tuple[list[LiveTensor], list[tuple[int, Place]]]:
        """Give all tensors in order, and what has extra state, with the number of tensors before it."""
        rows: list[LiveTensor] = []
        extras: list[tuple[int, Place]] = []
        for place in self.places:
            inside: Any = place.module
            if inside._parameters or inside._buffers or self._flats:
                self.own(place, rows)
            if place.kind.has_extra:
                extras.append((len(rows), place))
        return rows, extras

    def _run_pre_hooks(self) -> None:
        """Run what runs before a state dict is taken; FSDP2 puts its shards back in place so."""
        itself = {i for below, machine in self.machines if "state_dict" in machine.saving for i in below}
        for i in self._hooked:
            if i not in itself:
                run_pre_hooks(self.places[i].module, self.places[i].prefix)

    def _find_flats(self, table: Table) -> None:
        """Find what FSDP1 has flattened."""
        if not any(kind.wraps == FSDP1_WRAPPED for kind in self._kinds.values()):
            return
        from fdsd.comms.fsdp1 import find_flats, original_dtypes

        wrapped = [place.module for place in self.places if place.kind.wraps == FSDP1_WRAPPED]
        self._flats = find_flats(wrapped, table.flats)
        views = [view for flat in table.flats.values() if flat.uses_originals for view in flat.views]
        self._originals = {id(view.live): view for view in views}
        self._dtypes = original_dtypes(wrapped)

    def _names_of(self, below: range) -> Iterator[str]:
        for i in below:
            rows: list[LiveTensor] = []
            self.own(self.places[i], rows)
            yield from [live.fqn for live in rows if live.persistent]
            if self.places[i].kind.has_extra:
                yield self.places[i].prefix + EXTRA_STATE

    def own(self, place: Place, rows: list[LiveTensor]) -> None:
        """Append the tensors of one module, but not of those below it: parameters first, then buffers."""
        if not self._flats and not self._originals and not self._dtypes:
            _append_own(place.module, place.prefix, rows)
            return
        found: list[LiveTensor] = []
        _append_own(place.module, place.prefix, found)
        flats = dict(self._flats.get(id(place.module), {}))
        for live in found:  # tied to one in another unit, which FSDP does not know
            if live.name not in flats and id(live.tensor) in self._originals:
                flats[live.name] = self._originals[id(live.tensor)]
        for name, view in flats.items():
            one, trains = view.live, view.live.requires_grad
            rows.append(LiveTensor(place.prefix + name, "parameter", True, trains, one, place.module, name, None, view))
        rest = [live for live in found if live.name not in flats and not getattr(live.tensor, "_is_flat_param", False)]
        rows.extend([live._replace(dtype=self._dtypes.get(id(live.tensor))) for live in rest])


def _append_own(module: nn.Module, prefix: str, rows: list[LiveTensor]) -> None:
    """Append the tensors that one module has, as they stand there."""
    inside: Any = module
    for name, tensor in inside._parameters.items():
        if tensor is not None:
            row = (prefix + name, "parameter", True, tensor.requires_grad, tensor, module, name, None, None, None, True)
            rows.append(_new(LiveTensor, row))
    if inside._buffers:
        passing: set[str] = inside._non_persistent_buffers_set
        for name, tensor in inside._buffers.items():
            if tensor is not None:
                rows.append(
                    LiveTensor(prefix + name, "buffer", name not in passing, tensor.requires_grad, tensor, module, name)
                )
