"""What ``state_dict`` shows of models in which modules save by code of their own: it runs, and what it gives is read.

Each value is looked for among the live tensors, so that a renamed one is known for what it is; a value that the code
has made is marked as such.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fdsd.comms.hooks import Machine, method_of, post_hooks
from fdsd.comms.live import LiveTensor
from fdsd.comms.tabling import Table
from fdsd.comms.wrappers import EXTRA_STATE, FSDP1_WRAPPED
from fdsd.data.errors import Unsupported, add_note
from fdsd.data.ties import tie_key
from fdsd.data.values import is_mapping

if TYPE_CHECKING:
    from fdsd.comms.walking import Place, Walk

__all__ = ["Showing"]


class Showing:
    """The state dict of one part of a model, as its own code makes it, with what is live in it.

    Args:
        walk: The walk through the part.
        fqn_modifiers: The method by which a module says which child is left out of the names it shows.

    Raises:
        Unsupported: The code cannot do with FSDP's flat parameters, or breaks torch's rules.
    """

    def __init__(self, walk: Walk, fqn_modifiers: str) -> None:
        self._walk = walk
        self._fqn_modifiers = fqn_modifiers
        self._shown: OrderedDict[str, Any] = OrderedDict()
        self._versions: OrderedDict[str, Any] = OrderedDict()
        self._shown._metadata = self._versions  # type: ignore[attr-defined]  # torch's own convention
        self._machines = {below.start: (below, machine) for below, machine in walk.machines}
        self._owners = {place.prefix: place.module for place in walk.places}  # of wrappers, what is inside
        self._live = self._all_live()
        self._by_id = {id(live.tensor): live for live in reversed(self._live.values()) if live.flat is None}
        self._stand_ins: dict[str, torch.Tensor] = {}
        self._next = 0
        with torch.no_grad():
            self._show()
        self._by_id.update({id(one): self._live[fqn] for fqn, one in self._stand_ins.items()})
        whole = [live for live in reversed(self._live.values()) if live.flat is None]
        self._by_memory = {_memory_key(live.tensor): live for live in whole}

    def _all_live(self) -> dict[str, LiveTensor]:
        rows: list[LiveTensor] = []
        for place in self._walk.places:
            self._walk.own(place, rows)
        table = Table((self._walk.places[0].module,))
        table.extend(rows)
        return table.finished().tensors

    # -- running the code ------------------------------------------------------------------------------------------

    def _show(self) -> None:
        """Show the next module and what is below it, as ``nn.Module.state_dict`` does."""
        number = self._next
        self._next += 1
        place = self._walk.places[number]
        below, machine = self._machines.get(number, (range(0), None))
        if machine is not None and "state_dict" in machine.saving:
            self._show_itself(place, below, machine)
            self._next = below.stop
            return
        inside: Any = place.module
        versions = {"version": inside._version}
        if place.kind.wraps is None:
            self._versions[place.prefix[:-1]] = versions
        if machine is not None and "_save_to_state_dict" in machine.saving:
            self._save(place, machine)
        else:
            self._show_own(place)
        for child in inside._modules.values():
            if child is not None:
                self._show()
        for hook in post_hooks(place.module) if machine is not None else ():
            self._run(hook, place, machine, versions)

    def _show_own(self, place: Place) -> None:
        rows: list[LiveTensor] = []
        self._walk.own(place, rows)
        for live in rows:
            if live.persistent:
                self._shown[live.fqn] = live.tensor if live.flat is None else self._stand_in(live)
        if place.kind.has_extra:
            self._shown[place.prefix + EXTRA_STATE] = place.module.get_extra_state()

    def _stand_in(self, live: LiveTensor) -> torch.Tensor:
        """Give a tensor without data in the place of one that lies over ranks: hooks may rename it."""
        if live.fqn not in self._stand_ins:
            self._stand_ins[live.fqn] = torch.empty(live.spec.shape, dtype=live.spec.dtype, device="meta")
        return self._stand_ins[live.fqn]

    def _save(self, place: Place, machine: Machine) -> None:
        rows: list[LiveTensor] = []
        self._walk.own(place, rows)
        if flat := [live.fqn for live in rows if live.flat is not None]:
            raise Unsupported(f"{machine}: it cannot save {', '.join(map(repr, flat))}, which FSDP has flattened.")
        with _named(machine):
            method_of(place.module, "_save_to_state_dict")(self._shown, place.prefix, True)

    def _run(self, hook: Callable[..., Any], place: Place, machine: Machine | None, versions: dict[str, Any]) -> None:
        with _named(machine):
            result = hook(place.module, self._shown, place.prefix, versions)
        if result is None or result is self._shown:
            return
        if getattr(hook, "_from_public_api", False):
            raise Unsupported(f"{machine}: a state dict post-hook must return None, and this one does not.")
        if not place.prefix and is_mapping(result):  # torch heeds it at the top only
            self._shown = OrderedDict(result)

    def _show_itself(self, place: Place, below: range, machine: Machine) -> None:
        """Let a module with a ``state_dict`` of its own show itself; drop the segments of wrappers afterwards."""
        if any(self._walk.places[i].kind.wraps == FSDP1_WRAPPED for i in below):
            raise Unsupported(
                f"{machine}: it would have FSDP gather its flat parameters. Wrap with fully_shard() instead, or put "
                "what state_dict does into a hook (register_state_dict_post_hook)."
            )
        method = method_of(place.module, "state_dict")
        with _named(machine):
            if place.prefix:
                found: Any = OrderedDict[str, Any]()
                found._metadata = OrderedDict[str, Any]()
                method(destination=found, prefix=place.prefix, keep_vars=True)
            else:
                found = method()
        if not is_mapping(found):
            raise Unsupported(f"{machine}: it gives {type(found).__name__} and no mapping.")
        for key, value in found.items():
            self._shown[machine.read(key)] = value
        metadata: dict[str, Any] = getattr(found, "_metadata", None) or {}
        for key, versions in metadata.items():
            self._versions[machine.read(key + ".")[:-1] if key else place.prefix[:-1]] = versions

    # -- reading what it gave --------------------------------------------------------------------------------------

    def into(self, table: Table) -> None:
        """Write what is shown into a table, and after it what is live and not shown."""
        table.metadata.update(self._versions)
        used: set[str] = set()
        for key, value in self._shown.items():
            live = self._found(key, value)
            if live is not None:
                used.add(live.fqn)
                table.extend([live._replace(fqn=key, tied_to=None)])
            elif isinstance(value, torch.Tensor) and not key.endswith(EXTRA_STATE):
                self._add_made(table, key, value)
            else:
                table.add_extra(key, value, self._owner(key))
            loader = self._machine(key, "loading")
            if loader is None and live is None and not self._is_own_extra(key):
                loader = self._machine(key, "saving")
            if loader is not None:
                table.through[key] = loader
        for fqn, live in self._live.items():
            if fqn in used:
                continue
            if fqn in self._shown:
                table.know(live.tensor, fqn)
            else:
                table.extend([live._replace(persistent=False, tied_to=None)])

    def _found(self, key: str, value: Any) -> LiveTensor | None:
        """Find the live tensor that a value is, that of the same name before others."""
        if not isinstance(value, torch.Tensor):
            return None
        same = self._live.get(key)
        memory = _memory_key(value)
        if same is not None and (
            value is same.tensor or value is self._stand_ins.get(key) or memory == _memory_key(same.tensor)
        ):
            return same
        return self._by_id.get(id(value)) or self._by_memory.get(memory)

    def _add_made(self, table: Table, key: str, value: torch.Tensor) -> None:
        like = self._live.get(key) or self._modified(key)
        if value.is_meta and self._stand_ins and (like is None or not like.tensor.is_meta):
            raise Unsupported(
                f"{self._machine(key, 'saving')}: it computes {key!r} from a parameter that FSDP has flattened and "
                "that is not here. It may rename such parameters, not change them."
            )
        owner = self._owner(key)
        if like is None:
            made = LiveTensor(key, "buffer", True, False, value, owner, key.rpartition(".")[2], None, None, None, False)
        else:
            made = like._replace(fqn=key, tensor=value, tied_to=None, flat=None, dtype=None, is_memory=False)
        table.extend([made])

    def _modified(self, key: str) -> LiveTensor | None:
        """Find what a name stands for, if a module says which of its children is left out of it."""
        at = -1
        while True:
            prefix, rest = key[: at + 1], key[at + 1 :]
            modifiers = getattr(self._owners.get(prefix), self._fqn_modifiers, None)
            if callable(modifiers):
                given: Any = modifiers()
                child = given.get(rest.partition(".")[0]) if is_mapping(given) else None
                if child is not None and (live := self._live.get(f"{prefix}{child}.{rest}")) is not None:
                    return live
            at = key.find(".", at + 1)
            if at < 0:
                return None

    def _owner(self, key: str) -> nn.Module:
        """Give the module to which a name belongs: the innermost one whose prefix it has."""
        at = key
        while at:
            at = at.rpartition(".")[0]
            prefix = at + "." if at else ""
            if prefix in self._owners:
                return self._owners[prefix]
        return self._owners[""]

    def _is_own_extra(self, key: str) -> bool:
        """Tell whether a name is that of an extra state, which the module itself sets."""
        return key.endswith(EXTRA_STATE) and type(self._owner(key)).get_extra_state is not nn.Module.get_extra_state

    def _machine(self, key: str, what: str) -> Machine | None:
        """Give the outermost module with code of its own that has to do with a name."""
        for _, machine in self._walk.machines:
            if key.startswith(machine.prefix) and getattr(machine, what):
                return machine
        return None


def _memory_key(tensor: torch.Tensor) -> Hashable:
    """Give what tells memory apart: of a DTensor that of the local tensor, since detaching makes a new object."""
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        return "local", tie_key(local), tuple(tensor.shape)
    return tie_key(tensor)


@contextmanager
def _named(machine: Machine | None) -> Generator[None, None, None]:
    """Say in a note which module's own code raised."""
    try:
        yield
    except Exception as error:
        add_note(error, f"Raised by {machine}, while its state dict was taken.")
        raise
