"""Making the tables of live tensors: names given twice are refused, tied names recognised.

Modules are not walked here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import Parameter

from fdsd.comms.hooks import Machine
from fdsd.comms.live import ExtraState, LiveTensor, Modules
from fdsd.data.errors import NameConflict, listing
from fdsd.data.ties import tie_key

if TYPE_CHECKING:
    from fdsd.comms.fsdp1 import Flat

__all__ = ["Table"]

_PLAIN = {torch.Tensor, Parameter}


class Table:
    """The tables of live tensors while they are made.

    Args:
        parts: The modules that are read.
    """

    def __init__(self, parts: tuple[nn.Module, ...]) -> None:
        self._parts = parts
        self._tensors: dict[str, LiveTensor] = {}
        self._extra: dict[str, ExtraState] = {}
        self._names: list[str] = []
        self._others: list[LiveTensor] = []
        self._fqns: dict[int, str] = {}
        self._aliases: dict[str, list[str]] = {}
        self.metadata: dict[str, Any] = {}
        self.through: dict[str, Machine] = {}
        self.flats: dict[int, Flat] = {}  # by the identity of the flat parameter

    def extend(self, found: Iterable[LiveTensor]) -> None:
        """Add tensors in order.

        Raises:
            NameConflict: Two different tensors have one name.
        """
        self._extend(found)

    def _extend(self, found: Iterable[LiveTensor]) -> None:
        tensors, names, fqns, extra = self._tensors, self._names, self._fqns, self._extra
        for live in found:
            fqn = live.fqn
            if fqn in tensors or fqn in extra:
                self._add_again(live)
                continue
            identity = id(live.tensor) if live.flat is None else id(live.flat)
            first = fqns.setdefault(identity, fqn)
            tensors[fqn] = live if first is fqn else live._replace(tied_to=first)
            if live.flat is not None and live.tensor is not live.flat.flat.parameter:
                fqns.setdefault(id(live.tensor), first)
            if live.persistent:
                names.append(fqn)

    def know(self, tensor: torch.Tensor, fqn: str) -> None:
        """Let a live tensor have a name under which something else is shown for it."""
        self._fqns.setdefault(id(tensor), fqn)

    def add_extra(self, fqn: str, value: Any, owner: nn.Module) -> None:
        """Add what is no tensor of the model.

        Raises:
            NameConflict: Something else has this name.
        """
        known = self._extra.get(fqn)
        if known is not None and known.owner is owner:
            return
        if known is not None or fqn in self._tensors:
            there = self._tensors[fqn].owner if known is None else known.owner
            raise NameConflict(self._conflict(fqn, there, owner, fqn.rpartition(".")[2]))
        self._extra[fqn] = ExtraState(value, owner)
        self._names.append(fqn)

    def _add_again(self, live: LiveTensor) -> None:
        known = self._tensors.get(live.fqn)
        if known is not None:
            if known.tensor is live.tensor and known.owner is live.owner and known.name == live.name:
                return  # a module that stands in two parts
            if not known.persistent and not live.persistent:
                if known.tensor is not live.tensor:
                    self._others.append(live)
                return
        there = self._extra[live.fqn].owner if known is None else known.owner
        raise NameConflict(self._conflict(live.fqn, there, live.owner, live.name))

    def _conflict(self, fqn: str, a: nn.Module, b: nn.Module, name: str) -> str:
        places = [place for owner in dict.fromkeys([a, b]) for place in self._places_of(owner, name)]
        return (
            f"Two tensors of the model would be named {fqn!r}: {listing(places, sort=False)}. A name stands for one "
            "tensor: rename one of the modules; of several parts, give each the prefix of its own."
        )

    def _places_of(self, owner: nn.Module, name: str) -> Iterator[str]:
        """Say where a module stands, with all segments and, of several parts, the number of the part."""
        for i, part in enumerate(self._parts):
            whole: Any = part
            for path, module in whole.named_modules(remove_duplicate=False):
                if module is owner:
                    where = f"{path}.{name}" if path else name
                    yield where if len(self._parts) == 1 else f"{where} (part {i})"

    def _join_same_memory(self) -> None:
        """Tie tensors that are different objects and the same view of the same storage.

        Most pointers are met once, and tell enough; those that are not get a closer look, and null ones too.
        """
        plain = [live for live in self._tensors.values() if type(live[4]) in _PLAIN and live[4].layout is torch.strided]
        pointers = [live[4].data_ptr() for live in plain]
        if len({*pointers}) == len(pointers):
            return
        firsts: dict[int, str] = {}
        suspects: dict[str, None] = {}
        for live, at in zip(plain, pointers, strict=True):
            fqn = live.fqn
            first = firsts.setdefault(at, fqn) if at else fqn
            if (first is not fqn or not at) and live.tied_to is None and live.flat is None:
                suspects[first] = suspects[fqn] = None
        owners: dict[Hashable, str] = {}
        joined: dict[str, str] = {}
        for fqn in suspects:
            tensor = self._tensors[fqn].tensor
            first = owners.setdefault(tie_key(tensor), fqn)
            if first is not fqn:
                joined[fqn] = self._fqns[id(tensor)] = first
        for fqn, live in self._tensors.items() if joined else ():
            if (owner := joined.get(live.tied_to or fqn)) is not None:
                self._tensors[fqn] = live._replace(tied_to=owner)

    def finished(self) -> Modules:
        """Give the tables."""
        self._join_same_memory()
        for fqn, live in self._tensors.items():
            if live.tied_to is not None:
                self._aliases.setdefault(live.tied_to, []).append(fqn)
        return Modules(
            self._parts,
            self._tensors,
            self._extra,
            tuple(self._names),
            self.metadata,
            self.through,
            tuple(self._others),
            self._fqns,
            self._aliases,
            self.flats,
        )
