"""The way of a state into live modules and optimizers: what is asked, planned, delivered, written and reported.

What fits is ``matching``'s business; what a model or an optimizer wants, and how it takes it, is that of
``model_load`` and ``optim_load``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from fdsd.algebra.lazy import Lazy
from fdsd.comms.alone import this_rank
from fdsd.comms.live import Modules
from fdsd.data.errors import FdsdError, NameConflict, SpecMismatch, Unsupported, add_note, listing, plural
from fdsd.data.optim import OptimState
from fdsd.data.problem import describe
from fdsd.data.protocols import World
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict
from fdsd.data.train import TrainState
from fdsd.data.values import is_mapping
from fdsd.engine.delivery import plan_delivery
from fdsd.engine.load_rules import Rules, specs_of
from fdsd.engine.matching import expected
from fdsd.engine.model_load import ModelLoad, plan_model
from fdsd.engine.optim_load import OptimLoad, OptimTable, plan_optim
from fdsd.engine.outlines import Outline, outline_of
from fdsd.engine.unions import agree_alike, everyone, together
from fdsd.engine.wishes import Wish, label_of, out_of_reach, requests_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Asked", "LoadReport", "Restoring"]


@frozen(repr=False)
class LoadReport:
    """What a load did, by the names of the model.

    Attributes:
        loaded: The names that were loaded.
        missing: The names that were expected and were not there.
        unexpected: The names that were there and not expected.
        untied: The names that are tied in the model and were not in the state, which had equal tensors for them.
        initialised: The names that ``init`` made.
        left_on_meta: Non-persistent buffers that have no memory still: no state holds them. Give ``init``.
        without_state: The parameters for which the optimizer's state had nothing.
        with_state: Those for which it had something, which was loaded.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    untied: tuple[str, ...] = ()
    initialised: tuple[str, ...] = ()
    left_on_meta: tuple[str, ...] = ()
    without_state: tuple[str, ...] = ()
    with_state: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rest = ("missing", "unexpected", "untied", "initialised", "left_on_meta", "without_state")
        told = [
            f"{what.replace('_', ' ')}: {listing(names, sort=False)}" for what in rest if (names := getattr(self, what))
        ]
        first = f"{plural(len(self.loaded), 'name')} loaded"
        optim = [f"state of {plural(len(self.with_state), 'parameter')} loaded"] if self.with_state else []
        return f"<LoadReport: {'; '.join([first, *optim, *told])}>"


@frozen(eq=False)
class Asked:
    """What one rank asks for.

    Attributes:
        kind: What it gives: ``"model"``, ``"optimizer"`` for the state of optimizers alone, or ``"nothing"``.
        weights: The leaves of the model.
        optim: The state of the optimizers, if there is any.
        modules: The live model.
        specs: What it expects.
        optimizers: The live optimizers.
        rules: How strictly the state has to fit.
    """

    kind: str
    weights: Mapping[str, Any]
    optim: OptimState | None
    modules: Modules
    specs: StateDict[Any]
    optimizers: tuple[Optimizer, ...]
    rules: Rules

    @classmethod
    def of(cls, state: Any, model: Any, optimizers: Any, rules: Rules) -> Asked:
        """Read what was given."""
        from fdsd.comms.live_optimizers import listed
        from fdsd.comms.modules import read_modules

        optim = state.optim if isinstance(state, TrainState) else state if isinstance(state, OptimState) else None
        weights: Any = state.model if isinstance(state, TrainState) else {} if isinstance(state, OptimState) else state
        if not is_mapping(weights):
            raise Unsupported(f"restore: a state is a mapping of names to leaves, not {type(weights).__name__}.")
        modules = read_modules(model)
        kind = "optimizer" if isinstance(state, OptimState) else "model" if weights or optim else "nothing"
        return cls(kind, weights, optim, modules, specs_of(modules), tuple(listed(optimizers)), rules)


@frozen(eq=False)
class _Group:
    """What the ranks of a group ask for together.

    Attributes:
        loads_model: Whether any of them gives weights.
        loads_optim: Whether any of them gives the state of optimizers.
        wanted: What this rank's model expects, after the filter.
        kept: First names of this rank's model that the filter leaves out.
        elsewhere: Names that the models of other ranks expect.
        metadata: The versions of modules that were saved.
    """

    loads_model: bool
    loads_optim: bool
    wanted: Mapping[str, Any]
    kept: frozenset[str]
    elsewhere: frozenset[str]
    metadata: Mapping[str, Any] | None

    @classmethod
    def of(cls, asked: Asked, world: World) -> _Group:
        """Find out; collective."""
        rules = asked.rules
        mine = asked.kind, asked.optim is not None, bool(asked.optimizers), bool(asked.modules.through)
        told = everyone(world, (*mine, rules.staged, rules.dtype), "restore: what is asked")
        kinds, have_optim, have_optimizers, through, *alike = [set(column) for column in zip(*told, strict=True)]
        if any(len(values) > 1 for values in alike):
            agree_alike(world, "restore", {"staged": rules.staged, "dtype": rules.dtype})
        together(world, "restore", lambda: _check_optimizers(asked, kinds, have_optim, have_optimizers))
        scope = _scope(asked.specs, world)
        wanted = together(world, "restore", lambda: _wanted(asked, scope))
        others = everyone(world, list(wanted), "restore: what the models expect")
        return cls(
            "model" in kinds or "optimizer" not in kinds,
            True in have_optim,
            wanted,
            _kept(asked, wanted),
            frozenset(name for names in others for name in names if name not in asked.specs),
            _metadata(asked, world) if True in through else None,
        )


def _check_optimizers(asked: Asked, kinds: set[Any], have_optim: set[Any], have_optimizers: set[Any]) -> None:
    if asked.optimizers and True not in have_optim:
        raise Unsupported(
            "restore: optimizers were given, and the state holds none. Give a TrainState(state, optim), whose optim is "
            "that of a capture, unflatten_optim() of the flat form, or OptimState.from_torch() of torch's dict; or "
            "leave the optimizers out."
        )
    if "model" not in kinds and "optimizer" in kinds and True not in have_optimizers:
        raise Unsupported("restore: the state is an optimizer's, and no optimizers were given.")


def _scope(specs: StateDict[Any], world: World) -> StateDict[Any]:
    """Give what the models of all ranks expect, so that a filter may name what other ranks have."""
    if len(world.ranks) == 1:
        return specs
    mine = {
        name: (tuple(spec.shape), spec.dtype) if isinstance(spec, TensorSpec) else None for name, spec in specs.items()
    }
    made: dict[str, Any] = {}
    for some in everyone(world, mine, "restore: what the models hold"):
        made.update({name: None if told is None else TensorSpec(*told) for name, told in some.items()})
    return StateDict.trusted({**made, **specs}, getattr(specs, "_metadata", None), kind="abstract")


def _wanted(asked: Asked, scope: StateDict[Any]) -> dict[str, Any]:
    chosen = expected(scope, asked.rules.keep)
    return {name: spec for name, spec in asked.specs.items() if name in chosen}


def _kept(asked: Asked, wanted: Mapping[str, Any]) -> frozenset[str]:
    if len(wanted) == len(asked.specs):
        return frozenset()
    modules = asked.modules
    firsts = [name for name in asked.specs if name in modules.tensors and modules.tensors[name].tied_to is None]
    return frozenset([name for name in firsts if not any(one in wanted for one in (name, *modules.aliases_of(name)))])


def _metadata(asked: Asked, world: World) -> Mapping[str, Any] | None:
    """Give the versions of modules that were saved, from another rank if this one gives nothing."""
    mine = getattr(asked.weights, "_metadata", None)
    told = everyone(world, None if mine is None else dict(mine), "restore: the metadata of the state")
    return mine or next((one for one in told if one), None)


@frozen(eq=False)
class Restoring:
    """A load that all ranks have agreed on; nothing has been written yet.

    Attributes:
        world: Who works together.
        model: The loading of the model.
        optim: The loading of the optimizers.
        outline: What the ranks hold of the model.
        table: The state of the optimizers.
        staged: Whether it is all or nothing.
    """

    world: World
    model: ModelLoad | None
    optim: OptimLoad | None
    outline: Outline
    table: OptimTable | None
    staged: bool

    @classmethod
    def planned(cls, asked: Asked, world: World) -> Restoring:
        """Compare what is asked with what there is; collective.

        Raises:
            FdsdError: Everything that does not fit, in one message, and on all ranks.
        """
        group = _Group.of(asked, world)
        outline = outline_of(world, asked.weights, "restore")
        optim = OptimState() if asked.optim is None else asked.optim
        table = OptimTable.of(optim, world, "restore") if group.loads_optim else None

        def plan() -> tuple[ModelLoad | None, OptimLoad | None]:
            return _plan(asked, group, outline, table)

        return cls(world, *together(world, "restore", plan), outline, table, asked.rules.staged)

    def run(self) -> LoadReport:
        """Deliver what was planned, and put it in its place; collective."""
        self._compare_twins()
        takers, deliveries = self._deliveries()
        try:
            for label, value in deliveries:
                if label in takers:
                    takers[label].take(label, value)
            self._write()
        except FdsdError as error:
            if not self.staged:
                add_note(error, "The model may hold a part of the state now. restore(staged=True) is all or nothing.")
            raise
        return _report(self.model, self.optim)

    def _node(self, source: str) -> Lazy | None:
        found = self.outline.node(source)
        return self.table.outline.node(source) if found is None and self.table is not None else found

    def _compare_twins(self) -> None:
        """Read names of their own that are tied in the model, and refuse them if they differ."""
        twins = [] if self.model is None else self.model.twins
        if not any(everyone(self.world, bool(twins), "restore: tied names")):
            return
        wishes = {label_of(wish.source, wish.flattening): wish for pair in twins for wish in pair}
        got = dict(plan_delivery(requests_of(wishes, self._node, self.world, "restore"), self.world).run())
        together(self.world, "restore", lambda: _check_twins(twins, got))

    def _deliveries(self) -> tuple[dict[str, Any], Iterator[tuple[str, torch.Tensor]]]:
        """Plan how tensors travel, and give who takes what, and what brings them when it is gone through."""
        if self.model is not None:
            self._together(self.model.keep_sources, ())
        loads: Sequence[Any] = [load for load in (self.optim, self.model) if load is not None]
        takers = {label: load for load in loads for label in load.wishes}
        wishes: dict[str, Wish] = {label: load.wishes[label] for label, load in takers.items()}
        requests = requests_of(wishes, self._node, self.world, "restore")
        if len(self.world.ranks) == 1 and (far := out_of_reach(requests, this_rank())):
            raise FdsdError(
                f"restore: parts of {listing(far)} are held by other ranks: give group=. Where none is taken, "
                "materialize(state, group=...) first."
            )
        return takers, iter(plan_delivery(requests, self.world).run())

    def _write(self) -> None:
        """Run what may raise first; staged, it is undone everywhere if it raises anywhere."""
        undo: list[Callable[[], None]] = []
        if self.optim is not None and (self.staged or len(self.world.ranks) > 1):
            self._together(self.optim.check, undo)
        else:
            self._together(lambda: None, undo)
        if self.model is not None and self.staged:
            undo.append(self.model.backup())
        self._together(lambda: None if self.model is None else self.model.run_code(), undo)
        runs_code = self.optim is not None and self.optim.runs_code
        if self.staged and any(everyone(self.world, runs_code, "restore")) and self.optim is not None:
            undo.append(self.optim.backup())
        self._together(lambda: None if self.optim is None else self.optim.write(), undo)
        if self.model is not None:
            self.model.place()

    def _together(self, action: Callable[[], object], undo: Sequence[Callable[[], None]]) -> None:
        try:
            together(self.world, "restore", action)
        except BaseException as error:
            for step in reversed(undo):
                try:
                    step()
                except Exception as another:  # the rest has to be undone all the same
                    add_note(error, f"Undoing it raised {type(another).__name__}: {another}")
            raise


def _plan(
    asked: Asked, group: _Group, outline: Outline, table: OptimTable | None
) -> tuple[ModelLoad | None, OptimLoad | None]:
    rules, modules = asked.rules, asked.modules
    model: ModelLoad | None = None
    optim: OptimLoad | None = None
    if group.loads_model:
        elsewhere = group.elsewhere
        model = plan_model(outline, modules, group.wanted, rules, elsewhere=elsewhere, metadata=group.metadata)
    if table is not None and asked.optimizers:
        given = asked.optimizers, asked.specs, rules
        optim = plan_optim(table, modules, *given, kept=group.kept, elsewhere=group.elsewhere)
    problems = [problem for load in (model, optim) if load is not None for problem in load.problems]
    if problems:
        raise problems[0].error(f"restore: {describe(problems)}")
    if optim is not None and table is not None:
        optim.wish(table, rules)
        if clashes := [label for label in table.rows if label in outline.leaves]:
            raise NameConflict(f"restore: the model and the optimizers both have {listing(clashes)}. Load them apart.")
    if model is not None:
        model.wish()
        model.initialise()
    return model, optim


def _check_twins(twins: Sequence[tuple[Wish, Wish]], got: Mapping[str, torch.Tensor]) -> None:
    differ: list[str] = []
    for pair in twins:
        first, second = [got.get(label_of(wish.source, wish.flattening)) for wish in pair]
        if first is not None and second is not None and not torch.equal(_bytes(first), _bytes(second)):
            differ.append(f"{pair[0].source!r} and {pair[1].source!r}")
    if differ:
        raise SpecMismatch(
            f"restore: tied in the model, and different tensors in the state: {', '.join(differ[:10])}"
            f"{f', and {len(differ) - 10} more' if len(differ) > 10 else ''}. drop() the one that does not count, or "
            "make the model without the tie."
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _report(model: ModelLoad | None, optim: OptimLoad | None) -> LoadReport:
    without, stated = ((), ()) if optim is None else (optim.without_state, optim.with_state)
    if model is None:
        return LoadReport(without_state=without, with_state=stated)
    match = model.match
    return LoadReport(
        match.loaded,
        match.missing,
        match.unexpected,
        tuple([alias for alias, _ in match.untied]),
        tuple(model.initialised),
        model.left_on_meta,
        without,
        stated,
    )
