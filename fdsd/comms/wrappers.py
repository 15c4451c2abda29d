"""Modules that wrap another one, and whose segment of a name is dropped wherever they stand.

The type of the module decides, told by qualified name so that nothing is imported: a user's own submodule that is
called ``module`` keeps its name.
"""

from __future__ import annotations

from torch import nn

__all__ = ["EXTRA_STATE", "FSDP1_WRAPPED", "is_extra", "wrapped_as"]

EXTRA_STATE = "_extra_state"
FSDP1_WRAPPED = "_fsdp_wrapped_module"
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": FSDP1_WRAPPED,
}


def wrapped_as(kind: type[nn.Module]) -> str | None:
    """Give the name under which a class of wrappers keeps the module that it wraps; ``None`` for other classes.

    >>> wrapped_as(nn.DataParallel), wrapped_as(nn.Linear)
    ('module', None)
    """
    for base in kind.__mro__:
        found = _WRAPPERS.get(f"{base.__module__}.{base.__qualname__}")
        if found is not None:
            return found
    return None


def is_extra(name: object) -> bool:
    """Tell whether a name of a state dict is that of an extra state.

    >>> is_extra("norm._extra_state"), is_extra("my_extra_state"), is_extra(3)
    (True, False, False)
    """
    return isinstance(name, str) and name.endswith(EXTRA_STATE) and name.rpartition(".")[2] == EXTRA_STATE
