"""What keeps a state from being written into live optimizers, found all at once; and the state sorted for them.

Nothing is written. Groups are matched in ``optimizer_groups``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from attrs import define, field
from torch.optim import Optimizer

from fdsd.comms.dtensors import lie_alike
from fdsd.comms.live import Modules
from fdsd.comms.live_optimizers import LiveGroup, LiveOptimizer, LiveParam, live_optimizers
from fdsd.comms.modules import is_dtensor
from fdsd.comms.optimizer_faults import Faults
from fdsd.comms.optimizer_flats import Columns, flat_problems
from fdsd.comms.optimizer_groups import GroupMatch, match_groups
from fdsd.comms.optimizer_templates import Templates
from fdsd.comms.optimizer_trials import refusals, supplied
from fdsd.data.columns import Path, as_path, is_plain, to_rows
from fdsd.data.errors import Unsupported, listing
from fdsd.data.groups import ParamGroup
from fdsd.data.optim import OptimState
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec, VirtualTensor, dtype_name
from fdsd.data.values import is_dict, same_value

__all__ = ["Faults", "Loaded", "Require", "faults_of"]

Require = Literal["state", "listed", "nothing"]


@define(eq=False)
class Loaded:
    """A state beside the optimizers that are to have it.

    Attributes:
        optimizers: The live optimizers.
        state: The state, by first names.
        rows: For each name its state, nested as the optimizer keeps it.
        matches: For each optimizer where the options of its groups come from.
        problems: Names that clash, and options.
    """

    modules: Modules
    optimizers: tuple[LiveOptimizer, ...]
    state: OptimState
    rows: dict[str, Any]
    matches: list[list[GroupMatch]]
    problems: list[Problem]
    templates: Templates = field(factory=Templates)
    known: set[str] = field(factory=set, init=False)
    listed: set[str] = field(factory=set, init=False)
    known_groups: list[LiveGroup] = field(factory=list, init=False)  # templates know groups by identity

    def __attrs_post_init__(self) -> None:
        self.known = {fqn for live in self.optimizers for group in live.groups for fqn in group.fqns}
        self.listed = set(self.state.fqns)

    @classmethod
    def of(cls, state: OptimState, modules: Modules, optimizers: Optimizer | Iterable[Optimizer]) -> Loaded:
        """Sort a state for optimizers."""
        given: Any = state
        if not isinstance(given, OptimState):
            raise Unsupported(
                f"write_optimizers: the state is an OptimState, not {type(given).__name__}; "
                "OptimState.from_torch(osd, fqns) reads torch's dict."
            )
        live = live_optimizers(modules, optimizers)
        named, problems = _by_first_names(state, modules)
        matches, conflicts = match_groups(named.groups, live)
        return cls(modules, live, named, to_rows(named.slots), matches, [*problems, *conflicts])

    def columns_of(self, param: LiveParam) -> Columns:
        """Give the state of the parameters in one of FSDP1's, value by value, in the order of the slots."""
        found: dict[Path, dict[int, Any]] = {}
        for slot, column in self.state.slots.items():
            if slot and (values := {i: column[fqn] for i, fqn in enumerate(param.fqns) if fqn in column}):
                found[as_path(slot)] = values
        return found

    def strays_of(self, i: int) -> dict[str, Any]:
        """Give the entries that belong to no parameter, and go to an optimizer."""
        strays = self.strays()
        return {key: row for key, row in strays.items() if i in self._takers(key)}

    def strays(self) -> dict[str, Any]:
        """Give the entries that belong to no parameter."""
        return {
            key: row
            for key, row in self.rows.items()
            if key not in self.known and key not in self.listed and key not in self.modules.tensors
        }

    def _takers(self, key: str) -> list[int]:
        having = [i for i, live in enumerate(self.optimizers) if key in live.state]
        return [0] if not having and len(self.optimizers) == 1 else having

    def homeless(self) -> list[str]:
        """List the entries that belong to no parameter, and of which no optimizer is known to have them."""
        return [key for key in self.strays() if not self._takers(key)]


def _by_first_names(state: OptimState, modules: Modules) -> tuple[OptimState, list[Problem]]:
    """Bring tied parameters to their first names."""
    tied: dict[str, str] = {}
    for fqn, live in modules.tensors.items():
        if live.tied_to is not None:
            tied[fqn] = live.tied_to
    names = {*state.fqns, *[fqn for column in state.slots.values() for fqn in column]} if tied else set[str]()
    if names.isdisjoint(tied):
        return state, []
    clashes: dict[str, None] = {}
    slots: dict[Any, dict[str, Any]] = {}
    for slot, column in state.slots.items():
        into = slots[slot] = {}
        for fqn, value in column.items():
            first = tied.get(fqn, str(fqn))
            if first in into and not same_value(into[first], value):
                clashes[first] = None
            into.setdefault(first, value)
    seen: set[str] = set()
    groups: list[ParamGroup] = []
    for group in state.groups:
        firsts = [tied.get(fqn, fqn) for fqn in group.fqns]
        kept = [fqn for fqn in dict.fromkeys(firsts) if fqn not in seen]
        seen.update(kept)
        groups.append(ParamGroup(kept, group.options, named=group.named))
    made = state.replace(slots=slots, groups=groups)
    if not clashes:
        return made, []
    told = f"Names of one tied parameter have different states: {listing(clashes)}. Drop one of each."
    return made, [Problem("collision", told, tuple(clashes))]


def faults_of(
    loaded: Loaded,
    require: Require,
    keep: Collection[str],
    *,
    allow_unexpected: bool,
    values: bool,
    is_joint: bool = False,
    options: bool = False,
) -> Faults:
    """Find everything that is wrong.

    Args:
        loaded: The state beside the optimizers.
        require: As for ``write_optimizers``.
        keep: As for ``write_optimizers``.
        allow_unexpected: As for ``write_optimizers``.
        values: Whether tensors have to be here as they will be written.
        is_joint: Whether the state is that of all ranks, so that parameters of which this one holds nothing need it
            too.
        options: Whether groups need all options that the class has no defaults for.
    """
    made = Faults(others=list(loaded.problems), homeless=loaded.homeless())
    if require != "nothing":
        _find_missing(loaded, require, frozenset(keep), made, is_joint=is_joint)
        if not values:  # then some of them may be on other ranks only
            made.lacking = [*_lacking_values(loaded, is_joint=is_joint), *(_lacking_options(loaded) if options else ())]
    if not allow_unexpected:
        _find_unexpected(loaded, made)
    made.wrong = [
        found
        for live in loaded.optimizers
        for group in live.groups
        for param in group.params
        for found in _wrong_values(loaded, live, group, param, values)
    ]
    if not made.wrong:
        for live, matches in zip(loaded.optimizers, loaded.matches, strict=True):
            rows = {p: loaded.rows[p.fqn] for group in live.groups for p in group.params if p.fqn in loaded.rows}
            made.wrong += refusals(live, rows, [{**_own(match.live), **match.options} for match in matches])
    return made


def _own(group: LiveGroup) -> dict[str, Any]:
    return {key: value for key, value in group.options.items() if key != "params"}


def _lacking_values(loaded: Loaded, *, is_joint: bool) -> Iterator[str]:
    """Find what parameters with state lack of what a step would make; it makes all or nothing."""
    for live, matches in zip(loaded.optimizers, loaded.matches, strict=True):
        for match in matches if not live.loads_its_own_way else ():
            then = LiveGroup({**match.live.options, **match.options}, match.live.params)
            loaded.known_groups.append(then)
            for param in match.live.params:
                if not param.tensor.requires_grad or (param.is_elsewhere and not is_joint):
                    continue
                rows = {fqn: row for fqn in param.fqns if is_dict(row := loaded.rows.get(fqn)) and row}
                there = live.row(param)
                if not rows or (is_dict(there) and there and all(there.keys() <= row.keys() for row in rows.values())):
                    continue
                wanted = loaded.templates.paths(live, then, param)
                for fqn, row in rows.items():
                    yield from [f"state.{fqn}.{'.'.join(map(str, path))}" for path in wanted if not _has(row, path)]


def _has(row: Any, path: Path) -> bool:
    for key in path:
        if not is_dict(row) or key not in row:
            return False
        row = row[key]
    return True


def _lacking_options(loaded: Loaded) -> Iterator[str]:
    """Find the options of the class that groups with parameters lack, and that the class does not add itself."""
    for live, matches in zip(loaded.optimizers, loaded.matches, strict=True):
        if live.loads_its_own_way:
            continue
        for match, known in zip(matches, supplied(live, [match.options for match in matches]), strict=True):
            wanted = [key for key in live.optimizer.defaults if key in match.live.options and key not in known]
            yield from [f"param_groups.{match.live.fqns[0]}.{key}" for key in wanted if match.live.fqns]


def _find_missing(loaded: Loaded, require: Require, keep: frozenset[str], made: Faults, *, is_joint: bool) -> None:
    for live in loaded.optimizers:
        for group in live.groups:
            for param in group.params:
                if not param.tensor.requires_grad or (param.is_elsewhere and not is_joint):
                    continue
                for fqn in param.fqns:
                    if fqn in loaded.rows or fqn in keep:
                        continue
                    if require == "state" and loaded.rows and _has_state(loaded, live, group, param):
                        made.stateless.append(fqn)
                    elif fqn not in loaded.listed:
                        made.unlisted.append(fqn)
    if made.unlisted:
        made.spare = sorted(loaded.listed - loaded.known)


def _has_state(loaded: Loaded, live: LiveOptimizer, group: LiveGroup, param: LiveParam) -> bool:
    """Whether the optimizer keeps state for a parameter: it does now, or its first step would."""
    return bool(live.state.get(param.tensor) or loaded.templates.at(live, group, param, ()))


def _find_unexpected(loaded: Loaded, made: Faults) -> None:
    strays = loaded.strays()
    names = dict.fromkeys([*loaded.state.fqns, *loaded.rows])
    made.strays = [fqn for fqn in names if fqn not in loaded.known and fqn not in strays]
    if not any(live.loads_its_own_way for live in loaded.optimizers):
        made.extra = list(loaded.state.extra)


# -- values ----------------------------------------------------------------------------------------------------------


def _wrong_values(
    loaded: Loaded, live: LiveOptimizer, group: LiveGroup, param: LiveParam, values: bool
) -> Iterator[tuple[str, str]]:
    there = live.row(param)
    if param.views:
        yield from flat_problems(param, loaded.columns_of(param), there, values=values)
        return
    row = loaded.rows.get(param.fqn)
    if row is None:
        return

    first = partial(loaded.templates.at, live, group, param)
    if not is_dict(row) and not live.loads_its_own_way and (is_dict(there) or is_dict(first(()))):
        yield param.fqn, f"the state of {param.fqn!r} is {type(row).__name__}, and should be a dict"
        return
    for text in _wrong(row, there, param, first, values, ()):
        yield param.fqn, f"{text}; {param.fqn!r} has the shape {tuple(param.tensor.shape)}"


def _wrong(
    row: Any, there: Any, param: LiveParam, first: Callable[[Path], Any], values: bool, path: Path
) -> Iterator[str]:
    if is_plain(row):
        for key, value in row.items():
            live = there.get(key) if is_dict(there) else None
            if not _is_alike(value, live):
                yield from _wrong(value, live, param, first, values, (*path, key))
        return
    slot = ".".join(map(str, path))
    if values and isinstance(row, VirtualTensor | TensorSpec):
        yield f"{slot!r} is no tensor but {type(row).__name__} (materialize it first)"
        return
    if not isinstance(row, torch.Tensor | VirtualTensor | TensorSpec):
        if path == ("step",) and not _is_number(row):
            yield f"{slot!r} is no number but {type(row).__name__}"
        return
    shape = tuple(row.shape if isinstance(row, torch.Tensor) else _spec(row).shape)
    dtype = row.dtype if isinstance(row, torch.Tensor) else _spec(row).dtype
    known = _shape_known(there, shape, param, first, path)
    if known is not None:
        yield f"{slot!r} has the shape {shape} and should have {known}"
        return
    target = there.dtype if isinstance(there, torch.Tensor) else param.tensor.dtype
    if dtype.is_complex and not target.is_complex and target.is_floating_point:
        yield f"{slot!r} is {dtype_name(dtype)} and would lose its imaginary part as {dtype_name(target)}"
    elif values and isinstance(row, torch.Tensor) and (text := _misplaced(row, there, param)):
        yield f"{slot!r} {text}"


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_alike(value: Any, live: Any) -> bool:
    """Whether two plain tensors have the same shape and dtype: the usual case, told at little cost."""
    if type(value) is not torch.Tensor or type(live) is not torch.Tensor:
        return False
    return value.shape == live.shape and value.dtype == live.dtype


def _spec(leaf: Any) -> TensorSpec:
    return leaf if isinstance(leaf, TensorSpec) else leaf.spec


def _shape_known(
    there: Any, shape: tuple[int, ...], param: LiveParam, first: Callable[[Path], Any], path: Path
) -> tuple[int, ...] | None:
    """Tell the shape that a value should have instead of its own, if that is known."""
    like = tuple(param.tensor.shape)
    if isinstance(there, torch.Tensor):
        live = tuple(there.shape)
        return live if live != shape and live == like else None  # others may change their shape as they go
    if shape in (like, ()):
        return None
    made = first(path)
    if isinstance(made, torch.Tensor) and tuple(made.shape) != shape:
        return tuple(made.shape)
    return None


def _misplaced(value: torch.Tensor, there: Any, param: LiveParam) -> str | None:
    """Tell what is wrong with the kind of a tensor: whole where shards are wanted, or laid out otherwise."""
    tensor: Any = param.tensor
    if is_dtensor(value):
        model: Any = there if is_dtensor(there) else tensor if value.shape == tensor.shape else None
        if not is_dtensor(tensor):
            return "is a DTensor, and the parameter is not"
        given: Any = value
        if model is not None and not lie_alike(given, model):
            return f"lies as {given.placements}, not {model.placements} as in the optimizer (reshard it first)"
        return None
    if is_dtensor(there) or (is_dtensor(tensor) and value.ndim and value.shape == tensor.shape):
        return "is a whole tensor, and the parameter is a DTensor (shard it first, or restore with group=)"
    return None
