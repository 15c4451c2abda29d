"""Photographs of all that a function must leave as it is: modules, optimizers, arguments, and the process itself.

A photograph is a flat table of facts, so that a difference is told by its name.
"""

from __future__ import annotations

import contextlib
import copyreg
import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _python_dispatch as modes

from fdsd.algebra.dtypes import as_bytes

__all__ = ["Photo", "differences", "photo_of", "photo_of_process", "photo_of_training", "unchanged"]

Photo = dict[str, Any]


def differences(before: Photo, after: Photo) -> list[str]:
    """List the facts that are not what they were."""
    keys = dict.fromkeys([*before, *after])
    return [key for key in keys if key not in before or key not in after or before[key] != after[key]]


@contextlib.contextmanager
def unchanged(
    *arguments: Any, model: nn.Module | None = None, optimizers: Iterable[Optimizer] = (), label: str = ""
) -> Iterator[None]:
    """Fail if arguments, a model, its optimizers or the process are not what they were; after an error too."""
    optimizers = list(optimizers)

    def take() -> Photo:
        made = photo_of_process()
        for i, argument in enumerate(arguments):
            made.update(photo_of(argument, f"argument {i}"))
        if model is not None:
            made.update(photo_of_training(model, optimizers))
        return made

    before = take()
    try:
        yield
    finally:
        changed = differences(before, take())
        assert not changed, f"{label}: changed: {changed[:10]}"


# -- values ----------------------------------------------------------------------------------------------------------


def _photo_of_tensor(tensor: Any) -> tuple[Any, ...]:
    local = getattr(tensor, "_local_tensor", tensor)
    has_data = isinstance(local, torch.Tensor) and not local.is_meta and local.layout is torch.strided
    has_data = has_data and (not local.numel() or local.untyped_storage().nbytes() > 0)  # FSDP1 frees what it gathered
    return (
        id(tensor),
        type(tensor),
        id(local) if tensor is not local else 0,
        local.data_ptr() if has_data else 0,
        local._version,
        str(local.dtype),
        tuple(tensor.shape),
        local.stride() if has_data else (),
        tensor.requires_grad,
        _is_leaf(tensor),
        str(getattr(tensor, "placements", "")),
        sorted(vars(tensor)),
        as_bytes(local.detach()).tolist() if has_data else None,
    )


def _is_leaf(tensor: torch.Tensor) -> bool | None:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view that FSDP1 has made, of what it has written to
        return None


def photo_of(value: Any, label: str = "value") -> Photo:
    """Photograph a value: containers by their items in order, tensors by bytes and memory, others by identity."""
    made: Photo = {}
    _into(made, value, label, set())
    return made


def _into(made: Photo, value: Any, label: str, above: set[int]) -> None:
    if type(value) in (int, float, bool, str, bytes, complex, type(None)):
        made[label] = (type(value), repr(value))
        return
    if isinstance(value, torch.Tensor) and type(value).__name__ != "ShardedTensor":
        made[label] = _photo_of_tensor(value)
        if _is_leaf(value) and value.grad is not None:
            made[f"{label}.grad"] = _photo_of_tensor(value.grad)
        return
    made[label] = (type(value), id(value))
    if id(value) in above:
        return
    below = above | {id(value)}
    if isinstance(value, Mapping):
        made[f"{label}: keys"] = [(id(key) if isinstance(key, torch.Tensor) else repr(key)) for key in value]
        for i, item in enumerate(value.values()):
            _into(made, item, f"{label}[{made[f'{label}: keys'][i]}]", below)
    elif isinstance(value, list | tuple):
        made[f"{label}: length"] = len(value)
        for i, item in enumerate(value):
            _into(made, item, f"{label}[{i}]", below)


# -- training --------------------------------------------------------------------------------------------------------


def photo_of_training(model: nn.Module, optimizers: Iterable[Optimizer]) -> Photo:
    """Photograph a model and its optimizers: values, gradients, hooks, attributes, and which objects they are."""
    made: Photo = {}
    for path, module in model.named_modules(remove_duplicate=False):
        _into_module(made, module, f"module {path!r}")
    for i, optimizer in enumerate(optimizers):
        label = f"optimizer {i}"
        made[label] = (type(optimizer), id(optimizer))
        made[f"{label}: attributes"] = [(name, id(value)) for name, value in vars(optimizer).items()]
        for name, value in vars(optimizer).items():
            _into(made, value, f"{label}.{name}", set())
        for group in optimizer.param_groups:
            for param in group["params"]:
                made[f"{label}: parameter {id(param)}"] = photo_of(param)
    return made


def _into_module(made: Photo, module: Any, label: str) -> None:
    made[label] = (type(module), id(module), module.training)
    made[f"{label}: attributes"] = [(name, id(value)) for name, value in vars(module).items()]
    for name, value in vars(module).items():
        if isinstance(value, dict | list | tuple | set | int | float | str | torch.Tensor) and name != "_modules":
            _into(made, value, f"{label}.{name}", set())
    state = getattr(module, "_get_fsdp_state", None)
    if callable(state):
        made[f"{label}: FSDP"] = [(name, id(value)) for name, value in vars(state()).items()]


# -- the process -----------------------------------------------------------------------------------------------------

_CLASSES = ("torch:Tensor", "torch.nn:Module", "torch.nn:Parameter", "torch.optim:Optimizer")
_TABLES = (
    "torch.optim.optimizer:_global_optimizer_pre_hooks",
    "torch.optim.optimizer:_global_optimizer_post_hooks",
    "torch.nn.modules.module:_global_forward_hooks",
    "torch.nn.modules.module:_global_forward_pre_hooks",
    "torch.nn.modules.module:_global_parameter_registration_hooks",
    "torch.nn.modules.module:_global_module_registration_hooks",
    "torch.distributed.checkpoint.state_dict:_patched_state_dict",
)


def photo_of_process() -> Photo:
    """Photograph what belongs to the whole process: random numbers, the collector, modes, hooks, handlers, tables."""
    made: Photo = {
        "random numbers of torch": torch.random.get_rng_state().tolist(),
        "random numbers of Python": random.getstate(),
        "the garbage collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0, list(gc.callbacks)),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        "determinism": (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "dispatch modes": list(modes._get_current_dispatch_mode_stack()),
        "function modes": torch._C._len_torch_function_stack(),
        "threads": [thread.name for thread in threading.enumerate()],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "hooks of Python": (sys.excepthook, sys.displayhook, sys.gettrace(), sys.getprofile(), sys.getrecursionlimit()),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "warnings": list(warnings.filters),
        "pickling": dict(copyreg.dispatch_table),
        "safe globals": list(torch.serialization.get_safe_globals()),
        "process groups": _groups(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        made["random numbers of numpy"] = repr(numpy.random.get_state())
    for place in _CLASSES:
        made[f"class {place}"] = {
            name: id(value) for name, value in vars(_at(place)).items() if name not in ("__doc__", "__slotnames__")
        }
    for place in _TABLES:
        table = _at(place)
        made[f"table {place}"] = None if table is None else [id(item) for item in table]
    return made


def _at(place: str) -> Any:
    home, _, name = place.partition(":")
    return getattr(sys.modules.get(home), name, None)


def _groups() -> list[str]:
    home: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return [] if home is None or not torch.distributed.is_initialized() else sorted(home._world.pg_names.values())
