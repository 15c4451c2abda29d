"""Optimizer state over FSDP1's flat parameters: per original parameter when read, flat again when written.

Nothing is gathered. What a flat parameter is, and who holds what of it, ``fsdp1`` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fdsd.algebra.dtypes import copy_elements
from fdsd.comms.live_optimizers import LiveOptimizer, LiveParam
from fdsd.data.columns import Path, Slot
from fdsd.data.errors import Unsupported
from fdsd.data.groups import ParamGroup
from fdsd.data.optim import OptimState
from fdsd.data.spec import TensorSpec, VirtualTensor, spec_of
from fdsd.data.statedict import StateDict
from fdsd.data.values import is_dict, same_option

if TYPE_CHECKING:
    from fdsd.comms.fsdp1 import Flat
    from fdsd.comms.optimizer_values import Arrivals, Policy

Columns = Mapping[Path, Mapping[int, Any]]
"""The values at each path of a state, by the number of the parameter in the flat one."""

__all__ = ["Columns", "flat_problems", "is_flat_slot", "joined_row", "place_in", "spread"]


def spread(state: OptimState, live: LiveOptimizer) -> OptimState:
    """Give each original parameter the state of its own: expressions over flat slots; scalars as they are.

    What this rank holds nothing of has none: an optimizer may make some for it, but does not step it.

    Args:
        state: The state by parameter objects, each under its first name.
        live: The optimizer.

    Raises:
        Unsupported: A flat parameter has state that is neither like it nor a single value.
    """
    flats = {param.fqn: param for param in live.params if param.views}
    if not flats:
        return state
    slots: dict[Slot, StateDict[Any]] = {}
    for slot, column in state.slots.items():
        made: dict[str, Any] = {}
        for fqn, value in column.items():
            if fqn not in flats:
                made[fqn] = value
            elif not flats[fqn].is_elsewhere:  # other ranks step it, and know its state
                made.update(_spread(flats[fqn], slot, value))
        slots[slot] = StateDict(made)
    names = {param.fqn: param.fqns for param in live.params}
    groups = [
        ParamGroup([one for fqn in group.fqns for one in names[fqn]], group.options, named=group.named)
        for group in state.groups
    ]
    return state.replace(slots=slots, groups=groups)


def _spread(param: LiveParam, slot: Slot, value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return dict.fromkeys(param.fqns, value)
    flat = param.flat
    like = (param.here(0),) if flat is None else tuple(flat.local().shape)
    if tuple(value.shape) != like:
        raise Unsupported(
            f"{slot!r} of {param.fqns[0]!r} has the shape {tuple(value.shape)}; the state of a parameter that FSDP has "
            f"flattened is single values, or like its shard of shape {like}. Use an optimizer that works element by "
            "element."
        )
    if flat is None:
        return {param.fqn: param.views[0].of_piece(value)}
    views = zip(param.fqns, param.views, strict=True)
    if flat.is_across:
        return {fqn: view.of_piece(view.place_in(value)) for fqn, view in views}
    whole: Any = flat.over(value) if flat.is_sharded else value.detach()
    return {fqn: view.of(whole) for fqn, view in views}


def place_in(param: LiveParam, i: int, local: torch.Tensor) -> torch.Tensor:
    """View what this rank holds of one parameter in a tensor laid out as the optimizer's own."""
    return local if param.flat is None else param.views[i].place_in(local)


def is_flat_slot(live: object, values: Sequence[Any]) -> bool:
    """Tell whether a slot is like the flat parameter: it is now, or its values are no single ones."""
    if isinstance(live, torch.Tensor):
        return live.ndim > 0
    return any((_shape(value) or ()) != () for value in values)


def joined_row(arrivals: Arrivals, policy: Policy, param: LiveParam, columns: Columns, live: object) -> dict[Any, Any]:
    """Make the state of a flat parameter from those of the parameters in it, or of the piece that is here.

    Args:
        arrivals: Where values are made.
        policy: How they are cast.
        param: The parameter.
        columns: The state of the parameters in it: where one has none, what is there stays, or is zero.
        live: The state that it has.
    """
    made: dict[Any, Any] = {}
    for path, values in columns.items():
        there = _at(live, path)
        if is_flat_slot(there, list(values.values())):
            value = _joined(arrivals, policy, param, path, values, there)
        else:
            value = arrivals.value(policy, path, next(iter(values.values())), there)
        _put(made, path, value)
    return made


def _at(row: object, path: Path) -> Any:
    for key in path:
        row = row.get(key) if is_dict(row) else None
    return row


def _put(row: dict[Any, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        row = row.setdefault(key, {})
    row[path[-1]] = value


def _joined(
    arrivals: Arrivals, policy: Policy, param: LiveParam, path: Path, values: Mapping[int, Any], live: object
) -> torch.Tensor:
    """Fill one flat slot: the live one, the memory that the values lie in already, or a fresh one."""
    flat: Any = param.flat
    first = next(iter(values.values()))
    if isinstance(live, torch.Tensor) and (arrivals.dtype == "target" or live.dtype == first.dtype):
        for i, value in values.items():
            arrivals.fill(place_in(param, i, live), value.detach())
        return live
    dtype = policy.dtype_of(path, first.dtype)
    base = _base_of(flat, values, param, dtype) if arrivals.adopt(first) else None
    if base is not None:
        return base
    made = torch.zeros(flat.local().shape, dtype=dtype, device=param.tensor.device)
    if isinstance(live, torch.Tensor):
        copy_elements(live.detach(), made)
    for i, value in values.items():
        copy_elements(value.detach(), place_in(param, i, made))
    return made


def _base_of(flat: Flat, values: Mapping[int, Any], param: LiveParam, dtype: torch.dtype) -> torch.Tensor | None:
    """Find the flat tensor of which all values are the very places; it was made by ``slot_targets``."""
    base = next((value._base for value in values.values() if value.numel()), None)
    if base is None or base.shape != flat.local().shape or (base.dtype, base.device) != (dtype, param.tensor.device):
        return None
    fine = all(
        value._base is base and value.storage_offset() == place_in(param, i, base).storage_offset()
        for i, value in values.items()
        if value.numel()
    )
    return base if fine else None


def flat_problems(param: LiveParam, columns: Columns, live: object, *, values: bool) -> Iterator[tuple[str, str]]:
    """Say what is wrong with the state of parameters that FSDP1 has flattened, by name.

    Args:
        param: The parameter.
        columns: The state of the parameters in it.
        live: The state that it has.
        values: Whether tensors are here as they will be written, or may be wholes that are delivered later.
    """
    for path, found in columns.items():
        slot = ".".join(map(str, path))
        is_flat = is_flat_slot(_at(live, path), list(found.values()))
        single: dict[int, Any] = {}
        for i, value in found.items():
            shape = _shape(value)
            fqn, view = param.fqns[i], param.views[i]
            if shape is None or (shape == () and not is_flat):
                single[i] = value
                if is_flat:
                    yield fqn, f"{slot!r} of {fqn!r} is no tensor, and FSDP's flat parameter has a tensor"
            elif not values and shape != view.shape:
                yield fqn, f"{slot!r} of {fqn!r} has the shape {shape} and should have {view.shape}"
            elif values and shape != (param.here(i),):
                told = f"{slot!r} of {fqn!r} has the shape {shape} and should be this rank's piece, of {param.here(i)} "
                yield fqn, told + f"elements, of the flattened shape {view.shape} (restore with group=)"
        ours = [(i, value) for i, value in single.items() if not isinstance(value, VirtualTensor | TensorSpec)]
        for i, value in ours[1:]:
            if not same_option(ours[0][1], value):
                a, b = param.fqns[ours[0][0]], param.fqns[i]
                told = f"{slot!r} is {ours[0][1]!r} for {a!r} and {value!r} for {b!r}"
                yield b, f"{told}, which are one parameter to FSDP"


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, torch.Tensor | VirtualTensor):
        value = spec_of(value)
    return value.shape if isinstance(value, TensorSpec) else None
