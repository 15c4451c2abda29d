"""Bringing a state into live modules: what is checked first, what is wished for, and what is done with the results.

Everything is checked before anything is delivered. Optimizers, and how tensors travel, are unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from attrs import define, field, frozen

from fdsd.algebra.dtypes import check_cast, copy_elements
from fdsd.comms.alone import this_rank
from fdsd.comms.backups import Backup
from fdsd.comms.hooks import Machine
from fdsd.comms.installing import give_memory, install, is_meta, like_live, new_memory
from fdsd.comms.live import LiveTensor, Modules
from fdsd.comms.modules import layout_of, leaf_of, memory_of
from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec, is_exact, spec_of
from fdsd.data.statedict import StateDict
from fdsd.engine.copying import Pair, copy_pairs, prepared
from fdsd.engine.matching import DtypeRule, Match, match_state
from fdsd.engine.outlines import Outline
from fdsd.engine.wishes import Flattening, Wish, label_of
from fdsd.layout.layout import Layout
from fdsd.layout.local import local_of
from fdsd.layout.wants import local_shape_of
from fdsd.pipeline.pipeline import Pipeline, identity
from fdsd.transforms.which import Choice

__all__ = ["Init", "ModelLoad", "Rules", "plan_model", "specs_of"]

Init = Callable[[str, TensorSpec], torch.Tensor]


@frozen
class Rules:
    """How strictly a state has to fit.

    Attributes:
        keep: Leaves names out of what the model expects.
        allow_missing: Names that the state may lack.
        allow_unexpected: Names that it may have beyond.
        init: Makes what is missing and has no memory yet.
        dtype: What happens where dtypes differ.
        device: Where tensors go that have no memory yet.
        staged: Whether nothing is written before everything is there.
    """

    keep: Pipeline = identity
    allow_missing: Choice = field(factory=Choice)
    allow_unexpected: Choice = field(factory=Choice)
    init: Init | None = None
    dtype: DtypeRule = "same"
    device: torch.device | None = None
    staged: bool = False


def specs_of(modules: Modules) -> StateDict[Any]:
    """Give the specs of what a model's state dict holds, tied ones with equal ``tie``; extra state as it is.

    >>> from fdsd.comms.modules import read_modules
    >>> specs_of(read_modules(torch.nn.Linear(2, 1)))["bias"]
    TensorSpec((1,), torch.float32)
    """
    tokens: dict[str, object] = {}
    made: dict[str, Any] = {}
    for name in modules.names:
        live = modules.tensors.get(name)
        if live is None:
            made[name] = modules.extra[name].value
            continue
        made[name] = spec = live.spec
        if live.tied_to is not None or modules.aliases_of(name):
            token = tokens.setdefault(live.tied_to or name, object())
            made[name] = TensorSpec(spec.shape, spec.dtype, tie=token)
    return StateDict.trusted(made, modules.metadata, kind="abstract")


@define(eq=False)
class ModelLoad:
    """The loading of one model: what it wishes for, and what has been delivered.

    Attributes:
        modules: The live model.
        rules: How strictly it has to fit.
        state: What the ranks hold.
        match: What goes where.
        metadata: The versions of modules that were saved.
        problems: What has to stop the load.
        pairs: What this rank copies by itself: sources and targets.
        wishes: What else is wanted, by label.
        twins: Pairs of wishes that have to be equal, since the model ties what the state does not.
        initialised: What ``init`` made, by name.
        left_on_meta: Names without memory that nothing was there for.
    """

    modules: Modules
    rules: Rules
    state: Outline
    match: Match
    metadata: Mapping[str, Any] | None = None
    problems: list[Problem] = field(factory=list)
    pairs: list[Pair] = field(factory=list)
    wishes: dict[str, Wish] = field(factory=dict)
    twins: list[tuple[Wish, Wish]] = field(factory=list)
    initialised: dict[str, torch.Tensor] = field(factory=dict)
    left_on_meta: tuple[str, ...] = ()
    _names: dict[str, str] = field(factory=dict)  # of the model, by label
    _values: dict[str, torch.Tensor] = field(factory=dict)  # by name of the model; of tied ones by the first

    # -- planning ----------------------------------------------------------------------------------------------------

    def wish(self) -> None:
        """Say what is wanted."""
        for name, source in self.match.loads.items():
            if name in self.modules.tensors:
                live = self._live(name)
                if self._is_direct(live, self.state.leaves[source]):
                    continue
                wish = self._wish(live, source)
                label = label_of(source, wish.flattening)
                self.wishes[label], self._names[label] = wish, live.fqn
            elif not is_exact(self.state.leaves[source]) and spec_of(self.state.leaves[source]) is not None:
                self.wishes[source], self._names[source] = Wish(source), name  # extra state as a tensor
        for pair in self.match.untied:
            live = self._live(pair[0])
            twin = [Wish(one, layout_of(live), _flattening(live), dtype=live.spec.dtype) for one in pair]
            self.twins.append((twin[0], twin[1]))

    def _is_direct(self, live: LiveTensor, leaf: Any) -> bool:
        """Note a copy that needs no plan and no other rank; tell whether this is one."""
        target = live.tensor
        if live.flat is not None or live.fqn in self.modules.through or not (is_exact(leaf) and is_exact(target)):
            return False
        if target.is_meta or _differs(self.rules.dtype, leaf.dtype, target.dtype) or live.dtype is not None:
            return False
        check_cast(leaf.dtype, target.dtype)
        self.pairs.append((leaf, target))
        return True

    def keep_sources(self) -> None:
        """Copy what would be overwritten before it is read."""
        outs = [wish.out for wish in self.wishes.values() if wish.out is not None]
        own = [self.modules.tensors[name] for name in self.modules.through if name in self.modules.tensors]
        outs += [memory_of(live) for live in own if live.is_memory and not is_meta(live)]
        self.pairs = prepared(self.pairs, outs)

    def _live(self, name: str) -> LiveTensor:
        """Give a tensor by the first of its names."""
        live = self.modules.tensors[name]
        return live if live.tied_to is None else self.modules.tensors[live.tied_to]

    def _wish(self, live: LiveTensor, source: str) -> Wish:
        spec, target, flattening = spec_of(self.state.leaves[source]), layout_of(live), _flattening(live)
        assert spec is not None
        dtype = spec.dtype if self.rules.dtype == "source" else live.spec.dtype
        fresh = live.fqn in self.modules.through or self.rules.staged or is_meta(live) or dtype != live.spec.dtype
        if not fresh:
            return Wish(source, target, flattening, memory_of(live))
        whole = spec.shape if flattening is None else (spec.numel,)
        shape = local_shape_of(target, whole, this_rank())
        out = None if shape is None else new_memory(live, shape, dtype, self.rules.device)
        return Wish(source, target, flattening, out, dtype)

    def initialise(self) -> None:
        """Let ``init`` make what has no memory and gets none from the state."""
        init = self.rules.init
        if init is None:
            return
        for name in self._to_initialise():
            live = self.modules.tensors[name]
            made: Any = init(name, live.spec)
            if made is None:
                continue
            if not is_exact(made) or tuple(made.shape) != live.spec.shape or made.is_meta:
                given = spec_of(made) if isinstance(made, torch.Tensor) else type(made).__name__
                raise SpecMismatch(
                    f"init gave {given} for {name!r}, which is {live.spec}. Give a tensor of this shape."
                )
            self.initialised[name] = _local(live, made.detach(), self.rules.device)
        self.left_on_meta = tuple([name for name in self.left_on_meta if name not in self.initialised])
        if lacking := [name for name in self._to_initialise() if self.modules.tensors[name].persistent]:
            raise SpecMismatch(f"init gave nothing for {listing(lacking)}, which are on the meta device and missing.")

    def _to_initialise(self) -> list[str]:
        """List what has no memory, and is not left out by the filter."""
        missing = {self._live(name).fqn for name in self.match.missing if name in self.modules.tensors}
        tensors = self.modules.tensors
        return [name for name in self.left_on_meta if name in missing or not tensors[name].persistent]

    # -- what has been delivered -------------------------------------------------------------------------------------

    def take(self, label: str, value: torch.Tensor) -> None:
        """Accept a delivered local tensor."""
        self._values[self._names[label]] = value

    def backup(self) -> Callable[[], None]:
        """Give a way back from ``run_code``."""
        tensors = Backup.of([machine.module for machine in self.modules.machines()])
        extra = [(self.modules.extra[name].owner, value) for name, value in self._extras(old=True)]

        def undo() -> None:
            tensors.put_back()
            for owner, value in extra:
                owner.set_extra_state(value)

        return undo

    def run_code(self) -> None:
        """Hand on what modules load by code of their own, which may raise: whole modules, and extra state."""
        with torch.no_grad():
            for machine in self.modules.machines():
                values = self._for_machine(machine)
                made = [name for name in values if name in self._values or name in self.initialised]
                give_memory(self.modules, machine.module, made, self.rules.device)
                machine.load(values, self.metadata)
        for name, value in self._extras(old=False):
            self.modules.extra[name].owner.set_extra_state(value)

    def _extras(self, *, old: bool) -> Iterator[tuple[str, Any]]:
        """Give the extra states that go to their modules directly: what the state has, or what was there before."""
        for name, source in self.match.loads.items():
            if name in self.modules.extra and name not in self.modules.through:
                value = self._values.get(name, self.state.leaves[source])
                yield name, self.modules.extra[name].value if old else value

    def place(self) -> None:
        """Put everything else in its place: new memory, what was staged, and what this rank copies by itself."""
        with torch.no_grad():
            copy_pairs(self.pairs)
            for name, value in (*self._values.items(), *self.initialised.items()):
                live = self.modules.tensors.get(name)
                if live is not None and name not in self.modules.through:
                    self._place(live, value)
        self._values.clear()
        self.pairs.clear()

    def _place(self, live: LiveTensor, value: torch.Tensor) -> None:
        if is_meta(live) or _differs(self.rules.dtype, value.dtype, live.spec.dtype):
            install(self.modules, live, value)
        elif self.rules.staged:
            copy_elements(value, memory_of(live))

    def _for_machine(self, machine: Machine) -> dict[str, Any]:
        """Give all values that a module which loads itself has to get: those that are not there, as they are."""
        made: dict[str, Any] = {}
        for name, one in self.modules.through.items():
            if one is not machine:
                continue
            live = None if name not in self.modules.tensors else self._live(name)
            owner = name if live is None else live.fqn
            value = self._values.get(owner, self.initialised.get(owner))
            if live is not None:
                made[name] = leaf_of(live) if value is None else like_live(live, value)
            elif name in self.match.loads:
                made[name] = self.state.leaves[self.match.loads[name]] if value is None else value
            else:
                made[name] = self.modules.extra[name].value
        return made


def plan_model(
    state: Outline,
    modules: Modules,
    wanted: Mapping[str, Any],
    rules: Rules,
    *,
    elsewhere: Collection[str] = (),
    metadata: Mapping[str, Any] | None = None,
) -> ModelLoad:
    """Compare a state with a model; nothing is written, and nothing wished for yet.

    Args:
        state: What the ranks hold.
        modules: The live model.
        wanted: The specs of what it expects.
        rules: How strictly it has to fit.
        elsewhere: Names that the models of other ranks expect.
        metadata: The versions of modules that were saved.

    >>> from fdsd.comms.alone import Alone
    >>> from fdsd.comms.modules import read_modules
    >>> from fdsd.engine.outlines import outline_of
    >>> modules = read_modules(torch.nn.ParameterDict({"w": torch.zeros(1)}))
    >>> load = plan_model(outline_of(Alone(), {"w": torch.ones(1)}, "restore"), modules, specs_of(modules), Rules())
    >>> load.wish()
    >>> len(load.pairs), load.wishes, load.problems
    (1, {}, [])
    """
    match = match_state(
        state.leaves,
        wanted,
        dtype=rules.dtype,
        allow_missing=rules.allow_missing,
        allow_unexpected=rules.allow_unexpected,
        owners=state.owners,
        elsewhere=elsewhere,
    )
    load = ModelLoad(modules, rules, state, match, metadata)
    load.problems = [*_hollow(state, wanted), *match.problems, *_meta_problems(load, wanted), *_dtype_problems(load)]
    return load


def _differs(rule: DtypeRule, source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether a tensor has to take another dtype."""
    return rule == "source" and source != target


def _flattening(live: LiveTensor) -> Flattening:
    return None if live.flat is None else live.flat.order or ()


def _hollow(state: Outline, wanted: Mapping[str, Any]) -> list[Problem]:
    """Find what has no data to load."""
    names = [name for name in state.hollow if name in wanted]
    if not names:
        return []
    return [
        Problem("spec", f"{listing(names)} have no data in the state (specs, or on the meta device).", tuple(names))
    ]


def _meta_problems(load: ModelLoad, wanted: Mapping[str, Any]) -> list[Problem]:
    """Find what has no memory and will not get any, unless there is an initialiser, or a filter leaves it out."""
    tensors, loaded = load.modules.tensors, set(load.match.loaded)
    on_meta = [name for name, live in tensors.items() if live.tied_to is None and is_meta(live)]
    groups = {name: (name, *load.modules.aliases_of(name)) for name in on_meta}
    hollow = [name for name in on_meta if loaded.isdisjoint(groups[name])]
    load.left_on_meta = tuple(hollow)
    needed = [name for name in hollow if tensors[name].persistent and any(one in wanted for one in groups[name])]
    if needed and load.rules.init is None:
        text = (
            f"{listing(needed)} are on the meta device, and the state has nothing for them. Give "
            "init=lambda fqn, spec: tensor."
        )
        return [Problem("missing", text, tuple(needed))]
    return []


def _dtype_problems(load: ModelLoad) -> list[Problem]:
    """Find tensors that cannot take the dtype of the state: what FSDP and DTensors hold has been planned for one."""
    if load.rules.dtype != "source":
        return []
    names: list[str] = []
    for name, source in load.match.loads.items():
        live, spec = load.modules.tensors.get(name), spec_of(load.state.leaves[source])
        if live is None or spec is None or spec.dtype == live.spec.dtype or name in load.modules.through:
            continue
        if live.flat is not None or (hasattr(live.tensor, "_local_tensor") and not is_meta(live)):
            names.append(name)
    if not names:
        return []
    text = (
        f"{listing(names)} have another dtype in the state, and lie over ranks in memory that keeps its dtype. Convert "
        'the model before it is sharded, or give dtype="target".'
    )
    return [Problem("spec", text, tuple(names))]


def _local(live: LiveTensor, whole: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Cut the local tensor of this rank out of a whole one."""
    if live.flat is not None:
        raise Unsupported(f"{live.fqn!r} is part of a flat parameter, which FSDP makes itself; init cannot make it.")
    target = layout_of(live)
    part = local_of(whole, target, this_rank()) if isinstance(target, Layout) else whole
    memory = new_memory(live, tuple(part.shape), live.spec.dtype, device)
    copy_elements(part, memory)
    return memory
