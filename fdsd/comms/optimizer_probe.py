"""What state an optimizer makes for a parameter: found by stepping a throw-away twin of it on zeros, and only that.

The live optimizer, its parameters and gradients are never touched, no hook is called, and random numbers that a
step draws are put back. Names, models and columns of state are unknown here.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from fdsd.data.columns import is_plain
from fdsd.data.errors import Unsupported
from fdsd.data.values import is_dict

__all__ = ["first_row", "fresh_copy"]

_OWN = frozenset({"state", "param_groups"})
_ABSENT = object()


def first_row(optimizer: Optimizer, options: Mapping[str, Any], param: torch.Tensor) -> dict[Any, Any]:
    """Give the state that a first step would make for a parameter, with the values it has before any update.

    Values are those first stored under a key. A number that is stored after it was counted up starts from 0 all the
    same; a buffer that is stored after its first update is what zero gradients make of it.

    Args:
        optimizer: The live optimizer, of which a twin is made: its class, and copies of its attributes.
        options: The options of the parameter's group.
        param: A parameter; only its shape, dtype, device and class matter.

    Returns:
        The state of one parameter; empty if the optimizer keeps none.

    Raises:
        Unsupported: No twin can be made, or it cannot be stepped without a closure or real gradients.

    >>> param = torch.nn.Parameter(torch.ones(2))
    >>> adam = torch.optim.Adam([param], lr=0.1)
    >>> first_row(adam, {k: v for k, v in adam.param_groups[0].items() if k != "params"}, param)["exp_avg"]
    tensor([0., 0.])
    >>> len(adam.state)
    0
    """
    failures: list[str] = []
    for make in (_clone, _construct):
        for grad_of in (torch.zeros_like, _sparse_zeros):
            try:
                return _stepped(make, grad_of, optimizer, options, param)
            except Exception as error:  # whatever a class outside this library raises
                failures.append(f"{type(error).__name__}: {error}".splitlines()[0])
    raise Unsupported(
        f"The state of a fresh {type(optimizer).__name__} cannot be told without stepping it: a copy of it on zeros of "
        f"shape {tuple(param.shape)} failed with {failures[0]}. Take a step first, or load a state that has been saved."
    )


def _stepped(
    make: Callable[..., Optimizer],
    grad_of: Callable[[torch.Tensor], torch.Tensor],
    optimizer: Optimizer,
    options: Mapping[str, Any],
    param: torch.Tensor,
) -> dict[Any, Any]:
    with _quiet(param.device):
        zeros = torch.nn.Parameter(torch.zeros_like(param.detach()), requires_grad=True)
        zeros.grad = grad_of(zeros.detach())
        twin = make(optimizer, dict(options), param, zeros)
        state = twin.state = _Rows(twin.state)
        step = _bare_step(type(twin))
        step(twin)
        row = state.get(zeros)
        if row is None:
            return {}
        made = {key: _first_value(row, key, value) for key, value in row.items()}
        counted = [key for key, value in made.items() if _is_one(value) and _is_one(row[key])]
        if counted:
            step(twin)
            again = state[zeros]  # some classes put a new dict there
            made.update({key: _zero_like(made[key]) for key in counted if key in again and again[key] == 2})
        return made


def _first_value(row: Mapping[Any, Any], key: Any, value: Any) -> Any:
    first = row.first.get(key, _ABSENT) if isinstance(row, _Row) else _ABSENT
    if first is _ABSENT:
        return fresh_copy(value)
    return _completed(first, value) if is_dict(first) and is_dict(value) else first


def _completed(first: dict[Any, Any], last: dict[Any, Any]) -> dict[Any, Any]:
    """Add what a nested dict got after it was stored."""
    made: dict[Any, Any] = {}
    for key, value in last.items():
        if key not in first:
            made[key] = fresh_copy(value)
        elif is_dict(first[key]) and is_dict(value):
            made[key] = _completed(first[key], value)
        else:
            made[key] = first[key]
    return made


def _is_one(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.ndim == 0 and value.device.type != "meta" and value.item() == 1
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 1


def _zero_like(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)


class _Row(dict[Any, Any]):
    """The state of one parameter, which remembers the value that a key was first given."""

    def __init__(self, items: Mapping[Any, Any] = MappingProxyType({})) -> None:
        super().__init__()
        self.first: dict[Any, Any] = {}
        self.update(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self.first:
            self.first[key] = fresh_copy(value)
        super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None, /) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class _Rows(defaultdict[Any, Any]):
    """The state of a twin; rows that a constructor has made count as first values."""

    def __init__(self, rows: Mapping[Any, Any]) -> None:
        super().__init__(_Row, {key: _Row(row) if is_dict(row) else row for key, row in rows.items()})


def fresh_copy(value: Any) -> Any:
    """Copy a value of an optimizer's state: tensors with new memory, dicts and sequences item by item."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if is_plain(value):
        return {key: fresh_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([fresh_copy(item) for item in value])
    return copy.deepcopy(value)


# -- twins -----------------------------------------------------------------------------------------------------------


def _clone(optimizer: Optimizer, options: dict[str, Any], param: torch.Tensor, zeros: torch.nn.Parameter) -> Optimizer:
    """Copy the attributes instead of calling the constructor, whose arguments are known for torch's classes only."""
    cls = type(optimizer)
    twin: Any = cls.__new__(cls)
    # An attribute that reaches live parameters, a list of all of them for instance, has to reach others instead.
    bystander = torch.nn.Parameter(torch.zeros(0, dtype=zeros.dtype, device=zeros.device), zeros.requires_grad)
    memo: dict[int, Any] = {id(p): bystander for group in optimizer.param_groups for p in group["params"]}
    memo[id(param)] = zeros
    memo[id(optimizer)] = twin
    for name, value in vars(optimizer).items():
        if name in _OWN or callable(getattr(cls, name, None)):  # a scheduler's step() would step the live optimizer
            continue
        vars(twin)[name] = type(value)() if name.endswith("_hooks") else _private(name, value, memo)
    twin.param_groups = [_group(options, zeros)]
    twin.state = defaultdict(dict)
    made: Optimizer = twin
    return made


def _group(options: dict[str, Any], zeros: torch.nn.Parameter) -> dict[str, Any]:
    made = {key: fresh_copy(value) for key, value in options.items() if key != "param_names"}
    if "differentiable" in made:
        made["differentiable"] = False  # it would refuse to write to a leaf
    return {"params": [zeros], **made}


def _private(name: str, value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, torch.Generator):
        made = torch.Generator(value.device)
        made.set_state(value.get_state())
        return made
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # process groups and the like hold no parameters, and are shared
        if isinstance(value, list | tuple | dict | set | torch.nn.Module | Optimizer | torch.Tensor):
            raise Unsupported(f"its attribute {name!r} cannot be copied ({type(error).__name__}: {error})") from error
        return value


def _construct(
    optimizer: Optimizer, options: dict[str, Any], _param: torch.Tensor, zeros: torch.nn.Parameter
) -> Optimizer:
    """Call the constructor with the options that it knows: some classes make their state there."""
    cls: Any = type(optimizer)
    known = inspect.signature(cls.__init__).parameters
    group = _group(options, zeros)
    made: Optimizer = cls([group], **{key: group[key] for key in known if key in group and key != "params"})
    return made


def _sparse_zeros(zeros: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(zeros).to_sparse()


def _bare_step(cls: type[Optimizer]) -> Callable[[Optimizer], Any]:
    step: Any = cls.step
    bare: Callable[[Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return bare


@contextmanager
def _quiet(device: torch.device) -> Generator[None, None, None]:
    """Keep a step from calling the hooks of all optimizers, and from moving on the random numbers."""
    module = sys.modules[Optimizer.__module__]
    hooks: list[dict[Any, Any]] = [
        getattr(module, name, {}) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    ]
    kept = [dict(own) for own in hooks]
    random: Any = torch.random  # torch's types say too little of it
    with random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        for own in hooks:
            own.clear()
        try:
            yield
        finally:
            for own, items in zip(hooks, kept, strict=True):
                own.update(items)
