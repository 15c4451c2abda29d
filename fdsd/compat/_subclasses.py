"""Whole tensors of classes of users, as plain ones: where a tensor is cut or sent, its elements count, not its class.

Between two tensors that are whole and here, the class itself copies; that is not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch

from fdsd.comms.live import LiveTensor, Modules
from fdsd.comms.modules import is_dtensor
from fdsd.compat._errors import LoadError
from fdsd.compat._whole_trees import with_tensors
from fdsd.data.spec import is_exact
from fdsd.data.values import is_mapping, is_sequence
from fdsd.engine.wholes import lies_over_ranks

__all__ = ["is_odd", "is_whole", "plain_of", "plain_tree", "with_plain"]

_TENSOR: Any = torch.Tensor
_OPEN: Any = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]  # as torch's docs have it


def is_whole(value: object) -> bool:
    """Tell whether a value is a tensor of which this process has everything.

    >>> is_whole(torch.ones(2)), is_whole(3)
    (True, False)
    """
    return isinstance(value, torch.Tensor) and not lies_over_ranks(value)


def is_odd(value: object) -> bool:
    """Tell whether a value is a whole tensor of a class of the user's.

    >>> class Mine(torch.nn.Parameter): ...
    >>> is_odd(torch.ones(2)), is_odd(Mine(torch.ones(2)))
    (False, True)
    """
    return not is_exact(value) and is_whole(value)


def plain_of(value: Any) -> Any:
    """Give a whole tensor of a class of the user's as a plain one, and anything else as it is.

    Where the class has memory as plain tensors have it, that is shared; else it copies itself into a plain one.

    Raises:
        LoadError: The class does not copy itself.

    >>> class Mine(torch.nn.Parameter): ...
    >>> mine = Mine(torch.ones(2))
    >>> type(plain_of(mine)), plain_of(mine).data_ptr() == mine.data_ptr()
    (<class 'torch.Tensor'>, True)
    """
    if not is_odd(value):
        return value
    kind = cast("Any", type(value))
    with torch.no_grad():
        if kind.__torch_dispatch__ is _TENSOR.__torch_dispatch__:
            with _OPEN():
                return value.detach().as_subclass(torch.Tensor)
        try:
            made = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            copied: Any = made.copy_(value)
        except Exception as error:  # whatever a class raises
            raise LoadError(f"a {kind.__name__} does not copy itself into a plain tensor: {error}") from error
    return copied


def with_plain(state: Mapping[str, Any], modules: Modules, *, everywhere: bool) -> Mapping[str, Any]:
    """Give a state dict with plain tensors for what the model has cut, or on the meta device.

    Args:
        state: Values by name.
        modules: The model.
        everywhere: Whether all are plain: they are sent.

    Raises:
        LoadError: A class does not copy itself.
    """
    odd = [name for name, value in state.items() if is_odd(value)]
    odd = [name for name in odd if everywhere or _takes_plain(modules.tensors.get(name))]
    if not odd:
        return state
    made = OrderedDict(state)
    for name in odd:
        try:
            made[name] = plain_of(state[name])
        except LoadError as error:
            raise LoadError(f"{name!r}: {error}") from error
    made._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]  # torch's own convention
    return made


def _takes_plain(live: LiveTensor | None) -> bool:
    """Tell whether no class of a user's stands where a value goes, that would know how to take it."""
    return live is not None and (live.flat is not None or is_dtensor(live.tensor) or live.tensor.is_meta)


def plain_tree(tree: Any) -> tuple[Any, Exception | None]:
    """Give a nested state dict with plain tensors for all that are whole, and what is wrong with it.

    The error is not raised: other ranks, to which the state dict is about to be sent, have to hear of it.

    >>> plain_tree({"state": {"w": {"step": 3}}})
    ({'state': {'w': {'step': 3}}}, None)
    """
    try:
        return with_tensors(tree, lambda path, leaf: plain_of(leaf)) if _has_odd(tree) else tree, None
    except Exception as error:
        return tree, error


def _has_odd(at: Any) -> bool:
    if is_exact(at):
        return False
    if is_mapping(at):
        return any(map(_has_odd, at.values()))
    return any(map(_has_odd, at)) if is_sequence(at) else is_odd(at)
