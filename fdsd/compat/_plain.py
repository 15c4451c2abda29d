"""The state dict of a model that has no code of its own for it: one lean walk, for models of many small modules.

Whatever needs more than a walk is left to ``comms``, which knows hooks, flat parameters and ties.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import torch
from torch import nn

from fdsd.comms.hooks import Kind, kind_of, run_pre_hooks, saving_code
from fdsd.comms.wrappers import EXTRA_STATE, FSDP1_WRAPPED

__all__ = ["plain_values"]

_PLAIN = (nn.Parameter, torch.Tensor)


class _NotPlainError(Exception):
    """The model needs more than a walk."""


def plain_values(model: nn.Module, *, whole: bool) -> OrderedDict[str, Any] | None:
    """Give the live values by canonical name, detached, with the versions of modules.

    Args:
        model: The model.
        whole: Whether DTensors are gathered afterwards; they are not detached then, which takes long.

    Returns:
        The state dict; ``None`` for a model that needs more than a walk.

    >>> list(plain_values(nn.Linear(1, 1), whole=False) or ())
    ['weight', 'bias']
    """
    walk = _Walk(whole)
    try:
        walk.visit(model, "")
    except (_NotPlainError, RecursionError):
        return None
    if len(walk.values) != walk.count:  # a name that stands twice is an error, worded elsewhere
        return None
    walk.values._metadata = walk.versions  # type: ignore[attr-defined]  # torch's own convention
    return walk.values


class _Walk:
    """What has been read so far."""

    def __init__(self, whole: bool) -> None:
        self.values: OrderedDict[str, Any] = OrderedDict()
        self.versions: OrderedDict[str, Any] = OrderedDict()
        self.count = 0
        self._whole = whole
        self._kinds: dict[type[nn.Module], Kind] = {}

    def visit(self, module: Any, prefix: str) -> None:
        kind = self._kinds.get(cast("type[nn.Module]", type(module)))
        if kind is None:
            kind = self._kinds[type(module)] = kind_of(module)
            if kind.saving or kind.wraps == FSDP1_WRAPPED:
                raise _NotPlainError
        own = module.__dict__
        may_differ = module._state_dict_hooks or "state_dict" in own or "_save_to_state_dict" in own
        if may_differ and saving_code(module, kind):
            raise _NotPlainError
        if module._state_dict_pre_hooks:
            run_pre_hooks(module, prefix)
        if kind.wraps is None:
            self.versions[prefix[:-1]] = {"version": module._version}
        if module._parameters:
            self._take(module._parameters, prefix)
        if module._buffers:
            passing = module._non_persistent_buffers_set
            self._take({name: t for name, t in module._buffers.items() if name not in passing}, prefix)
        if kind.has_extra:
            self.values[prefix + EXTRA_STATE] = module.get_extra_state()
            self.count += 1
        for name, child in module._modules.items():
            if child is not None:
                self.visit(child, prefix if name == kind.wraps else f"{prefix}{name}.")

    def _take(self, tensors: dict[str, Any], prefix: str) -> None:
        values = self.values
        for name, tensor in tensors.items():
            if tensor is not None:
                is_kept = self._whole and type(tensor) not in _PLAIN
                values[prefix + name] = tensor if is_kept else tensor.detach()
                self.count += 1
