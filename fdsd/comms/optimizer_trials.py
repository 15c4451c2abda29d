"""What an optimizer's class does to a state that was loaded, tried on a twin, so that it can be refused before.

``Optimizer.__setstate__`` is where classes add what files of older versions lack, and where they fail on the state
of another class. The live optimizer is not touched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from fdsd.comms.live_optimizers import LiveOptimizer, LiveParam
from fdsd.data.spec import TensorSpec, VirtualTensor, is_exact, spec_of
from fdsd.data.values import is_dict, is_mapping, is_sequence

__all__ = ["refusals", "runs_code_of_others", "supplied"]


def runs_code_of_others(live: LiveOptimizer) -> bool:
    """Tell whether code from outside torch runs when a state is loaded: it may raise, whatever was checked.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> runs_code_of_others(LiveOptimizer(torch.optim.Adam([weight]), "Adam", ()))
    False
    """
    return live.loads_its_own_way or not _settles_as_torch(live.optimizer)


def _settles_as_torch(optimizer: Optimizer) -> bool:
    owner = next(cls for cls in type(optimizer).__mro__ if "__setstate__" in vars(cls))
    return owner.__module__.partition(".")[0] == "torch"


def refusals(
    live: LiveOptimizer, rows: Mapping[LiveParam, Any], options: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Say for which parameters the class would fail on their state, and with what.

    Args:
        live: The optimizer.
        rows: The state of each parameter that is to have some; specs stand for what is not here yet.
        options: The options of each group.
    """
    if live.loads_its_own_way or not _settles_as_torch(live.optimizer):
        return  # it may look at values, which need not be here
    kinds: dict[Hashable, LiveParam] = {}  # thousands of rows are of few kinds
    for param, row in rows.items():
        kinds.setdefault(_kind(row), param)
    if _fault(live, {param: _stand_in(rows[param]) for param in kinds.values()}, options) is None:
        return
    for param, row in rows.items():
        if (fault := _fault(live, {param: _stand_in(row)}, options)) is not None:
            cls = type(live.optimizer).__name__
            yield param.fqn, f"{cls} cannot use the state of {param.fqn!r}: {type(fault).__name__}: {fault}"


def supplied(live: LiveOptimizer, options: Sequence[Mapping[str, Any]]) -> list[set[str]]:
    """Tell the options that groups will have once the class has added those that older files lack."""
    try:
        return [set(group) for group in _settled(live, {}, options)]
    except Exception:  # whatever a class outside this library raises
        return [set(own) for own in options]


def _fault(
    live: LiveOptimizer, rows: Mapping[LiveParam, Any], options: Sequence[Mapping[str, Any]]
) -> Exception | None:
    try:
        _settled(live, rows, options)
    except Exception as error:  # torch's own checks are lookups and casts
        return error
    return None


def _settled(
    live: LiveOptimizer, rows: Mapping[LiveParam, Any], options: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Let a twin of the optimizer take a state, and give its groups then."""
    cls = type(live.optimizer)
    twin: Any = cls.__new__(cls)
    for name, value in vars(live.optimizer).items():
        vars(twin)[name] = value.copy() if is_dict(value) else value
    groups = [
        {**own, "params": [param.tensor for param in group.params]}
        for group, own in zip(live.groups, options, strict=True)
    ]
    state = defaultdict[Any, Any](dict, {param.tensor: row for param, row in rows.items()})
    twin.__setstate__({"state": state, "param_groups": groups})
    made: list[dict[str, Any]] = twin.param_groups
    return made


def _kind(value: object) -> Hashable:
    """Give what is equal for states that a class would treat alike: it looks at numbers, and not into tensors."""
    if is_mapping(value):
        return tuple([(key, _kind(item)) for key, item in value.items()])
    if is_sequence(value):
        return "several", tuple(map(_kind, value))
    cls = str(type(value))
    if is_exact(value) or isinstance(value, TensorSpec | VirtualTensor):
        return cls, tuple(getattr(value, "shape", ()))
    return cls, "a tensor" if isinstance(value, torch.Tensor) else repr(value)


def _stand_in(value: Any) -> Any:
    """Copy the dicts of a row, with tensors without memory for those that only have to be told from numbers."""
    if is_mapping(value):
        return {key: _stand_in(item) for key, item in value.items()}
    if is_sequence(value):
        return [_stand_in(item) for item in value]
    if isinstance(value, TensorSpec | VirtualTensor):
        spec = value if isinstance(value, TensorSpec) else spec_of(value)
        assert spec is not None
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    return value
