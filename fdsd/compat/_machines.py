"""Modules that load by code of their own: it runs first, on what was delivered, and is undone if something is wrong.

Which modules these are, and what they get, was found before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fdsd.comms.hooks import Machine
from fdsd.comms.wrappers import FSDP1_WRAPPED, wrapped_as
from fdsd.compat._errors import LoadError

__all__ = ["Backup", "Ran", "run_machine"]


class Ran(NamedTuple):
    """What a module's own code found missing and unexpected, and what it complained of."""

    missing: list[str]
    unexpected: list[str]
    errors: list[str]


def run_machine(
    machine: Machine, values: Mapping[str, Any], metadata: Mapping[str, Any] | None, known: Sequence[str]
) -> Ran:
    """Let a module load by its own code, as ``load_state_dict`` would.

    Args:
        machine: The module.
        values: What it gets, by canonical names.
        metadata: The versions that were saved.
        known: The names that the module has, to read its answer.
    """
    if any(wrapped_as(type(one)) == FSDP1_WRAPPED for one in machine.module.modules()):
        raise LoadError(
            f"{machine}: flat parameters of FSDP below it cannot be written through code that knows nothing of "
            "them. Load "
            "before wrapping, or use fully_shard()."
        )
    given: OrderedDict[str, Any] = OrderedDict([(machine.spell(name), value) for name, value in values.items()])
    if metadata is not None:
        versions = {spelled[:-1]: metadata.get(prefix[:-1]) for prefix, spelled in machine.paths.items()}
        given._metadata = OrderedDict(  # type: ignore[attr-defined]  # torch's own convention
            [(path, dict(version)) for path, version in versions.items() if version is not None]
        )
    names = {machine.spell(name): name for name in (*values, *known)}
    assign = any(tensor.is_meta for tensor in (*machine.module.parameters(), *machine.module.buffers()))
    try:
        found = _loader(machine.module)(given, strict=False, **({"assign": True} if assign else {}))
    except Exception as error:  # whatever a method of the user's raises
        return Ran([], [], [f"{machine}: {error}"])
    told: Any = cast("Any", found) if isinstance(found, tuple) else ((), ())
    missing: list[str] = list(told[0])
    unexpected: list[str] = list(told[1])
    return Ran(
        [names.get(key, machine.prefix + key) for key in missing],
        [names.get(key, machine.prefix + key) for key in unexpected],
        [],
    )


def _loader(module: nn.Module) -> Callable[..., Any]:
    own = vars(module).get("load_state_dict")
    if own is not None and not getattr(own, "__qualname__", "").startswith("_patch_model_state_dict."):
        return own  # type: ignore[no-any-return]
    return lambda *args, **kwargs: type(module).load_state_dict(module, *args, **kwargs)


class Backup:
    """The tensors of modules as they were: the objects, and copies of their values on the CPU.

    >>> linear = nn.Linear(1, 1, bias=False)
    >>> backup = Backup([linear])
    >>> _ = linear.weight.data.fill_(7.0)
    >>> backup.put_back()
    >>> bool(linear.weight == 7)
    False
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        every: list[Any] = list({id(one): one for top in modules for one in top.modules()}.values())
        for module in every:
            for table in (module._parameters, module._buffers):
                self._tables.append((table, dict(table)))
                for tensor in table.values():
                    if tensor is not None and id(tensor) not in self._values and not _local(tensor).is_meta:
                        local = _local(tensor).detach()
                        self._values[id(tensor)] = local, local.cpu().clone()

    def put_back(self) -> None:
        """Undo what has happened since."""
        for table, items in self._tables:
            table.clear()
            table.update(items)
        for local, copy in self._values.values():
            local.copy_(copy)


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found
