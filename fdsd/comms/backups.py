"""Modules and optimizers as they were, so that what code of others has done can be undone, without running any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import define, field
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fdsd.data.memory import is_expanded
from fdsd.data.values import is_dict, is_sequence

__all__ = ["Backup", "OptimizerBackup"]

_Table = dict[str, Any]


@define(eq=False)
class Backup:
    """The tensors of modules, and of all modules below them: the objects, and copies of their values on the CPU.

    >>> linear = nn.Linear(1, 1, bias=False)
    >>> backup = Backup.of([linear])
    >>> _ = linear.weight.data.fill_(7.0)
    >>> backup.put_back()
    >>> bool(linear.weight == 7)
    False
    """

    _tables: list[tuple[_Table, _Table]] = field(factory=list)
    _values: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(factory=dict)
    _lazy: list[tuple[torch.Tensor, type[torch.Tensor]]] = field(factory=list)

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> Backup:
        """Copy what modules have."""
        made = cls()
        for module in {id(one): one for top in modules for one in top.modules()}.values():
            inside: Any = module
            for table in (inside._parameters, inside._buffers):
                made._add(table)
        return made

    def _add(self, table: _Table) -> None:
        self._tables.append((table, dict(table)))
        for tensor in table.values():
            if tensor is None or id(tensor) in self._values:
                continue
            if is_lazy(tensor):
                self._lazy.append((tensor, type(tensor)))
                continue
            local = _local(tensor)
            if not local.is_meta and not (local.layout is torch.strided and is_expanded(local)):
                self._values[id(tensor)] = local, local.to("cpu", copy=True)

    def put_back(self) -> None:
        """Undo what has happened since."""
        for table, items in self._tables:
            table.clear()
            table.update(items)
        with torch.no_grad():
            for local, copy in self._values.values():
                local.copy_(copy)
        for tensor, kind in self._lazy:
            if type(tensor) is not kind:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.__class__ = kind


def _local(tensor: Any) -> torch.Tensor:
    held: Any = getattr(tensor, "_local_tensor", tensor)
    found: torch.Tensor = held.detach()
    return found


@define(eq=False)
class OptimizerBackup:
    """The attributes, the state and the groups of optimizers: the objects, and copies of the tensors on the CPU.

    >>> sgd = torch.optim.SGD([torch.ones(1)], lr=0.5)
    >>> backup = OptimizerBackup.of([sgd])
    >>> sgd.param_groups[0]["lr"] = 7
    >>> backup.put_back()
    >>> sgd.param_groups[0]["lr"]
    0.5
    """

    _dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = field(factory=list)
    _groups: list[tuple[Optimizer, list[dict[str, Any]]]] = field(factory=list)
    _values: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(factory=dict)

    @classmethod
    def of(cls, optimizers: Iterable[Optimizer]) -> OptimizerBackup:
        """Copy what optimizers have."""
        made = cls()
        for optimizer in optimizers:
            made._dicts.append((vars(optimizer), dict(vars(optimizer))))
            made._groups.append((optimizer, list(optimizer.param_groups)))
            made._add(optimizer.state)
            for group in optimizer.param_groups:
                made._add({key: value for key, value in group.items() if key != "params"})
                made._dicts.append((group, dict(group)))
        return made

    def _add(self, value: Any) -> None:
        if is_dict(value):
            self._dicts.append((value, dict(value)))
            for item in value.values():
                self._add(item)
        elif is_sequence(value):
            for item in value:
                self._add(item)
        elif isinstance(value, torch.Tensor) and id(value) not in self._values:
            local = _local(value)
            self._values[id(value)] = local, local.to("cpu", copy=True)

    def put_back(self) -> None:
        """Undo what has happened since."""
        for live, items in self._dicts:  # the attributes of an optimizer come before what is in them
            live.clear()
            live.update(items)
        for optimizer, groups in self._groups:
            optimizer.param_groups[:] = groups
        with torch.no_grad():
            for local, copy in self._values.values():
                local.copy_(copy)
