"""Bringing a state into live optimizers: what is checked first, what is wished for, and what is done with the results.

Everything is checked before anything is delivered. How tensors travel is unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen

from fdsd.comms.alone import this_rank
from fdsd.comms.backups import OptimizerBackup
from fdsd.comms.live import Modules
from fdsd.data.columns import Slot
from fdsd.data.errors import listing
from fdsd.data.groups import ParamGroup
from fdsd.data.optim import OptimState
from fdsd.data.problem import Problem, describe
from fdsd.data.protocols import World
from fdsd.engine.load_rules import Rules
from fdsd.engine.matching import excused
from fdsd.engine.optim_rows import Row, join_groups, rows_of
from fdsd.engine.outlines import Outline, outline_of
from fdsd.engine.unions import share_objects, union_of
from fdsd.engine.wishes import Wish, label_of
from fdsd.layout.wants import local_shape_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fdsd.comms.optimizer_targets import SlotTarget

__all__ = ["OptimLoad", "OptimTable", "plan_optim"]


@define(eq=False)
class OptimLoad:
    """The loading of optimizers: what they wish for, and what has been delivered.

    Attributes:
        modules: The live model.
        optimizers: The live optimizers.
        state: The loaded state, with specs for what only other ranks have.
        how: What ``write_optimizers`` is told.
        problems: What has to stop the load.
        wishes: What is wanted, by label.
        without_state: The parameters of the optimizers for which the state has nothing.
        with_state: Those for which it has something.
    """

    modules: Modules
    optimizers: Sequence[Optimizer]
    state: OptimState
    how: dict[str, Any]
    problems: list[Problem] = field(factory=list)
    wishes: dict[str, Wish] = field(factory=dict)
    without_state: tuple[str, ...] = ()
    with_state: tuple[str, ...] = ()
    _targets: dict[str, tuple[Row, SlotTarget]] = field(factory=dict)
    _values: dict[str, torch.Tensor] = field(factory=dict)

    def wish(self, table: OptimTable, rules: Rules) -> None:
        """Say what is wanted of a table."""
        from fdsd.comms.optimizer_targets import slot_targets

        labels = {(row.slot, row.fqn): label for label, row in table.rows.items()}
        for (slot, fqn), target in slot_targets(self.modules, self.optimizers, self.state).items():
            wish = _wish(target, labels[slot, fqn], staged=rules.staged)
            label = label_of(wish.source, wish.flattening)
            self.wishes[label] = wish
            self._targets[label] = Row(slot, fqn, None), target

    def take(self, label: str, value: torch.Tensor) -> None:
        """Accept a delivered local tensor."""
        self._values[label] = value

    @property
    def runs_code(self) -> bool:
        """Whether an optimizer loads by code of its own, which may raise."""
        from fdsd.comms.live_optimizers import live_optimizers
        from fdsd.comms.optimizer_trials import runs_code_of_others

        return any(map(runs_code_of_others, live_optimizers(self.modules, self.optimizers)))

    def check(self) -> None:
        """Raise if what has been delivered could not be written.

        Raises:
            SpecMismatch: Something does not fit; nothing has been written.
        """
        from fdsd.comms.optimizer_checks import Loaded, faults_of

        loaded = Loaded.of(self._delivered(), self.modules, self.optimizers)
        how = self.how
        found = faults_of(loaded, **how, values=True)
        if problems := found.problems():
            raise problems[0].error(f"restore: {describe(problems)}")

    def backup(self) -> Callable[[], None]:
        """Give a way back from ``write``, at the price of a copy."""
        return OptimizerBackup.of(self.optimizers).put_back

    def write(self) -> None:
        """Put everything in its place: values, slots that are new or gone, and the groups' options."""
        from fdsd.comms.optimizer_writing import write_optimizers

        state = self._delivered()
        write_optimizers(state, self.modules, self.optimizers, adopt=True, dtype="source", **self.how)
        self._values.clear()

    def _delivered(self) -> OptimState:
        """Give the state with the values of this rank, without what does not belong here."""
        columns = {slot: column.to_dict() for slot, column in self.state.slots.items()}
        for label, (row, target) in self._targets.items():
            if label in self._values:
                columns[row.slot][row.fqn] = target.finished(self._values[label])
            else:
                del columns[row.slot][row.fqn]
        return self.state.replace(slots=columns)


@frozen(eq=False)
class OptimTable:
    """The state of optimizers as the ranks of a group hold it.

    Attributes:
        rows: Where each value of all ranks stands, by label.
        outline: The values, by label.
        frame: The groups of all ranks, and other entries.
    """

    rows: Mapping[str, Row]
    outline: Outline
    frame: OptimState

    @classmethod
    def of(cls, state: OptimState, world: World, verb: str) -> OptimTable:
        """Find out what the ranks hold together; collective."""
        mine = rows_of(state)
        places = union_of(world, {label: (row.slot, row.fqn) for label, row in mine.items()}, "the slots of optimizers")
        rows = {label: Row(slot, fqn, None) for label, (slot, fqn) in places.items()}
        outline = outline_of(world, {label: row.value for label, row in mine.items()}, verb)
        groups = join_groups(state.groups, world, verb)
        extra = share_objects(world, state.extra, f"{verb}: other entries of the optimizers' state")
        return cls(rows, outline, OptimState({}, groups, extra=extra))

    @property
    def names(self) -> tuple[str, ...]:
        """The names in it, of groups and of values."""
        return tuple(dict.fromkeys([*self.frame.fqns, *[row.fqn for row in self.rows.values()]]))

    def without(self, names: Collection[str]) -> OptimState:
        """Give the state without some names."""
        columns: dict[Slot, dict[str, Any]] = {}
        for label, row in self.rows.items():
            if label in self.outline.leaves and row.fqn not in names:
                columns.setdefault(row.slot, {})[row.fqn] = self.outline.leaves[label]
        groups = [
            ParamGroup([fqn for fqn in one.fqns if fqn not in names], one.options, named=one.named)
            if any(fqn in names for fqn in one.fqns)
            else one
            for one in self.frame.groups
        ]
        return self.frame.replace(slots=columns, groups=groups)


def plan_optim(
    table: OptimTable,
    modules: Modules,
    optimizers: Sequence[Optimizer],
    scope: Mapping[str, Any],
    rules: Rules,
    *,
    kept: Collection[str] = (),
    elsewhere: Collection[str] = (),
) -> OptimLoad:
    """Compare a state with live optimizers; nothing is written, and nothing wished for yet.

    Args:
        table: What the ranks hold.
        modules: The live model.
        optimizers: The live optimizers.
        scope: The specs of the model.
        rules: How strictly the state has to fit.
        kept: First names of what the filter leaves out: it keeps its state.
        elsewhere: Names that the models of other ranks have.
    """
    from fdsd.comms.live_optimizers import live_optimizers
    from fdsd.comms.optimizer_writing import check_write

    known = {fqn for live in live_optimizers(modules, optimizers) for group in live.groups for fqn in group.fqns}
    listed, absent, left, odd = set(table.frame.fqns), set[str](), list[str](), list[str]()
    for fqn in table.names:
        first = _first(modules, fqn)
        if first in kept:
            left.append(fqn)
        elif first not in known:
            absent.update([fqn] if fqn in elsewhere and fqn not in scope else [])
            odd += [fqn] if fqn in scope or (fqn in listed and fqn not in elsewhere) else []
    fine = excused([*left, *odd], {**dict.fromkeys(table.names), **scope}, rules.allow_unexpected)
    state = table.without(absent | fine)
    stated = {_first(modules, fqn) for fqn in state.fqns}
    lacking = [fqn for fqn in known if fqn in scope and fqn not in stated]
    stays = frozenset([*excused(lacking, scope, rules.allow_missing), *kept])
    load = OptimLoad(modules, optimizers, state, {"require": "listed", "keep": stays, "allow_unexpected": False})
    load.problems = [
        *_hollow(table),
        *_on_meta(load),
        *_left_out([fqn for fqn in left if fqn not in fine]),
        *check_write(state, modules, optimizers, **load.how, is_joint=True),
    ]
    lacks = known - {_first(modules, fqn) for column in state.slots.values() for fqn in column}
    load.without_state = tuple([fqn for fqn in state.fqns if _first(modules, fqn) in lacks])
    load.with_state = tuple([fqn for fqn in state.fqns if _first(modules, fqn) not in lacks])
    return load


def _first(modules: Modules, fqn: str) -> str:
    live = modules.tensors.get(fqn)
    return fqn if live is None or live.tied_to is None else live.tied_to


def _hollow(table: OptimTable) -> list[Problem]:
    if not (names := table.outline.hollow):
        return []
    text = f"{listing(names)} have no data in the optimizer's state (specs, or on the meta device)."
    return [Problem("spec", text, names)]


def _left_out(names: Sequence[str]) -> list[Problem]:
    if not names:
        return []
    text = (
        f"the filter leaves {listing(names)} out, and the optimizer's state has them. drop() them, or give "
        "allow_unexpected=... ."
    )
    return [Problem("unexpected", text, tuple(names))]


def _on_meta(load: OptimLoad) -> list[Problem]:
    """Find parameters that will be other objects after the load, so that the optimizers would not know them."""
    names = [
        name
        for optimizer in load.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if getattr(parameter, "_local_tensor", parameter).is_meta and (name := load.modules.fqn_of(parameter))
    ]
    if not names:
        return []
    text = (
        f"the optimizers have {listing(names)}, which are on the meta device, and would not know the parameters that "
        "take their place. Restore the model alone, make the optimizers, then restore the optimizers' state."
    )
    return [Problem("unsupported", text, tuple(names))]


def _wish(target: SlotTarget, source: str, *, staged: bool) -> Wish:
    flattening = target.flattening
    if target.memory is not None and not staged:
        return Wish(source, target.placement, flattening, target.memory)
    whole = target.spec.shape if flattening is None else (target.spec.numel,)
    shape = local_shape_of(target.placement, whole, this_rank())
    if shape is None:
        return Wish(source, target.placement, flattening, None, target.spec.dtype)
    fresh = torch.empty(shape, dtype=target.spec.dtype, device=target.device)
    return Wish(source, target.placement, flattening, fresh)
