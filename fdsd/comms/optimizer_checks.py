"""What keeps a state from being written into live optimizers, found all at once; and the state sorted for them.

Nothing is written. Groups are matched in ``optimizer_groups``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal

import torch
from attrs import define, field
from torch.optim import Optimizer

from fdsd.comms.live import Modules
from fdsd.comms.live_optimizers import LiveGroup, LiveOptimizer, LiveParam, live_optimizers
from fdsd.comms.modules import is_dtensor
from fdsd.comms.optimizer_flats import flat_problems
from fdsd.comms.optimizer_groups import GroupMatch, match_groups
from fdsd.comms.optimizer_probe import is_plain
from fdsd.comms.optimizer_templates import Templates
from fdsd.data.columns import to_rows
from fdsd.data.errors import FdsdError, Unsupported, listing, plural
from fdsd.data.groups import ParamGroup
from fdsd.data.naming import nearest
from fdsd.data.optim import OptimState
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec, VirtualTensor, dtype_name
from fdsd.data.values import is_dict, same_value, several

__all__ = ["Loaded", "Require", "problems_of"]

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

    def rows_of(self, param: LiveParam) -> list[Any]:
        """Give the state for each name of a parameter object; ``None`` for none."""
        return [self.rows.get(fqn) for fqn in param.fqns]

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


def problems_of(
    loaded: Loaded, require: Require, keep: Collection[str], allow_unexpected: bool, *, values: bool
) -> list[Problem]:
    """Find all problems; with ``values``, tensors have to be here as they will be written."""
    problems = list(loaded.problems)
    problems += _missing(loaded, require, frozenset(keep))
    if not allow_unexpected:
        problems += _unexpected(loaded)
    if homeless := loaded.homeless():
        problems.append(
            Problem(
                "unexpected",
                f"State under {listing(homeless)} belongs to no parameter, and several optimizers may be meant. "
                "Write to the optimizers one by one.",
                tuple(homeless),
            )
        )
    wrong = [
        found
        for live in loaded.optimizers
        for group in live.groups
        for param in group.params
        for found in _wrong_values(loaded, live, group, param, values)
    ]
    if wrong:
        told = f"State that does not fit: {several([text for _, text in wrong])}."
        problems.append(Problem("spec", told, tuple(dict.fromkeys([fqn for fqn, _ in wrong]))))
    return problems


def _missing(loaded: Loaded, require: Require, keep: frozenset[str]) -> Iterator[Problem]:
    if require == "nothing":
        return
    stateless: list[str] = []
    unlisted: list[str] = []
    for live in loaded.optimizers:
        for group in live.groups:
            for param in group.params:
                if not param.tensor.requires_grad or param.is_elsewhere:
                    continue
                for fqn in param.fqns:
                    if fqn in loaded.rows or fqn in keep:
                        continue
                    if require == "state" and loaded.rows and _has_state(loaded, live, group, param):
                        stateless.append(fqn)
                    elif fqn not in loaded.listed:
                        unlisted.append(fqn)
    if stateless:
        rest = f" Likewise {listing(stateless[1:])}." if len(stateless) > 1 else ""
        yield Problem(
            "missing",
            f"Missing optimizer state for parameter '{stateless[0]}' in checkpoint. The parameter requires gradients "
            f"but has no saved optimizer state.{rest} To load anyway, use StateDictOptions(strict=False).",
            tuple(stateless),
        )
    if unlisted:
        yield Problem(
            "missing",
            f"{plural(len(unlisted), 'parameter')} that train are in no group of the state: {listing(unlisted)}."
            + _hint(unlisted[0], loaded.listed - loaded.known),
            tuple(unlisted),
        )


def _has_state(loaded: Loaded, live: LiveOptimizer, group: LiveGroup, param: LiveParam) -> bool:
    """Whether the optimizer keeps state for a parameter: it does now, or its first step would."""
    if live.state.get(param.tensor):
        return True
    try:
        return bool(loaded.templates.peek(live, group, param))
    except Unsupported:
        return False


def _hint(name: str, names: Collection[str]) -> str:
    close = nearest(name, list(names))
    return f" The nearest name of those that no optimizer has is {close[0]!r}." if close else ""


def _unexpected(loaded: Loaded) -> Iterator[Problem]:
    strays = loaded.strays()
    names = dict.fromkeys([*loaded.state.fqns, *loaded.rows])
    odd = [fqn for fqn in names if fqn not in loaded.known and fqn not in strays]
    if odd:
        told = f"The state has parameters that no optimizer has: {listing(odd)}. Drop them first."
        yield Problem("unexpected", told, tuple(odd))
    if loaded.state.extra and not any(live.loads_its_own_way for live in loaded.optimizers):
        keys = list(loaded.state.extra)
        yield Problem(
            "unexpected",
            f"The state has entries {listing(keys)} beside state and groups, and no optimizer has a load_state_dict "
            "of its own to take them.",
            tuple(keys),
        )


# -- values ----------------------------------------------------------------------------------------------------------


def _wrong_values(
    loaded: Loaded, live: LiveOptimizer, group: LiveGroup, param: LiveParam, values: bool
) -> Iterator[tuple[str, str]]:
    there = live.state.get(param.tensor)
    if param.views:
        yield from flat_problems(param, loaded.rows_of(param), there, values=values)
        return
    row = loaded.rows.get(param.fqn)
    if row is None:
        return

    def template() -> Any:
        try:
            return loaded.templates.peek(live, group, param)
        except FdsdError:
            return None

    for text in _wrong(row, there, param, template, values, ()):
        yield param.fqn, f"{text}; {param.fqn!r} has the shape {tuple(param.tensor.shape)}"


def _wrong(row: Any, there: Any, param: LiveParam, template: Any, values: bool, path: tuple[Any, ...]) -> Iterator[str]:
    if is_plain(row):
        for key, value in row.items():
            live = there.get(key) if is_dict(there) else None
            if not _is_alike(value, live):
                yield from _wrong(value, live, param, template, values, (*path, key))
        return
    slot = ".".join(map(str, path))
    if values and isinstance(row, VirtualTensor | TensorSpec):
        yield f"{slot!r} is no tensor but {type(row).__name__} (materialize it first)"
        return
    if not isinstance(row, torch.Tensor | VirtualTensor | TensorSpec):
        return
    shape = tuple(row.shape if isinstance(row, torch.Tensor) else _spec(row).shape)
    dtype = row.dtype if isinstance(row, torch.Tensor) else _spec(row).dtype
    known = _shape_known(there, shape, param, template, path)
    if known is not None:
        yield f"{slot!r} has the shape {shape} and should have {known}"
        return
    target = there.dtype if isinstance(there, torch.Tensor) else param.tensor.dtype
    if dtype.is_complex and not target.is_complex and target.is_floating_point:
        yield f"{slot!r} is {dtype_name(dtype)} and would lose its imaginary part as {dtype_name(target)}"
    elif values and isinstance(row, torch.Tensor) and (text := _misplaced(row, there, param)):
        yield f"{slot!r} {text}"


def _is_alike(value: Any, live: Any) -> bool:
    """Whether two plain tensors have the same shape and dtype: the usual case, told at little cost."""
    if type(value) is not torch.Tensor or type(live) is not torch.Tensor:
        return False
    return value.shape == live.shape and value.dtype == live.dtype


def _spec(leaf: Any) -> TensorSpec:
    return leaf if isinstance(leaf, TensorSpec) else leaf.spec


def _shape_known(
    there: Any, shape: tuple[int, ...], param: LiveParam, template: Any, path: tuple[Any, ...]
) -> tuple[int, ...] | None:
    """Tell the shape that a value should have instead of its own, if that is known."""
    like = tuple(param.tensor.shape)
    if isinstance(there, torch.Tensor):
        live = tuple(there.shape)
        return live if live != shape and live == like else None  # others may change their shape as they go
    if shape in (like, ()):
        return None
    made = template()
    for key in path:
        made = made.get(key) if is_dict(made) else None
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
        if model is not None and (given.device_mesh != model.device_mesh or given.placements != model.placements):
            return f"lies as {given.placements}, not {model.placements} as in the optimizer (reshard it first)"
        return None
    if is_dtensor(there) or (is_dtensor(tensor) and value.ndim and value.shape == tensor.shape):
        return "is a whole tensor, and the parameter is a DTensor (shard it first, or restore with group=)"
    return None
