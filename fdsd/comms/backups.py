"""`Backup`: the tensors of modules as they were, so that what code of others has done can be undone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import define, field
from torch import nn

__all__ = ["Backup"]

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
            held: Any = getattr(tensor, "_local_tensor", tensor)
            local: torch.Tensor = held.detach()
            if not local.is_meta:
                self._values[id(tensor)] = local, local.to("cpu", copy=True)

    def put_back(self) -> None:
        """Undo what has happened since."""
        for table, items in self._tables:
            table.clear()
            table.update(items)
        with torch.no_grad():
            for local, copy in self._values.values():
                local.copy_(copy)
