"""Bringing a state into live modules: what is checked first, what is wished for, and what is done with the results.

Everything is checked before anything is delivered. Optimizers, and how tensors travel, are unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from attrs import define, field

from fdsd.algebra.dtypes import check_cast, copy_elements
from fdsd.algebra.lazy import Lazy
from fdsd.comms.alone import this_rank
from fdsd.comms.backups import Backup
from fdsd.comms.dtensors import lie_alike
from fdsd.comms.hooks import Machine
from fdsd.comms.installing import give_memory, install, is_meta, like_live, new_memory
from fdsd.comms.live import LiveTensor, Modules
from fdsd.comms.modules import is_dtensor, layout_and_memory_of, layout_of, leaf_of, memory_of
from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.data.memory import is_grid
from fdsd.data.problem import Problem
from fdsd.data.spec import is_exact, spec_of
from fdsd.engine.copying import Cuts, Pair, copy_pairs, prepared
from fdsd.engine.load_rules import Rules, left_on_meta, made_by_init, problems_of
from fdsd.engine.matching import Match, match_state
from fdsd.engine.opaque import copies_of, copy_opaque
from fdsd.engine.outlines import Outline
from fdsd.engine.wishes import Wish, label_of
from fdsd.layout.flattening import Flattening
from fdsd.layout.layout import Layout
from fdsd.layout.local import local_of
from fdsd.layout.wants import local_shape_of

__all__ = ["ModelLoad", "Told", "plan_model"]


class Told(NamedTuple):
    """What code of modules' own finds missing in what it gets, and what it did not expect."""

    missing: list[str]
    unexpected: list[str]


@define(eq=False)
class ModelLoad:
    """The loading of one model: what it wishes for, and what has been delivered.

    Attributes:
        modules: The live model.
        rules: How strictly it has to fit.
        state: What the ranks hold.
        match: What goes where.
        metadata: The versions of modules that were saved.
        beyond: Names that the model does not have, and the modules below which they stand, whose code may know them.
        problems: What has to stop the load.
        pairs: What this rank copies by itself: sources and targets.
        wishes: What else is wanted, by label.
        twins: Pairs of wishes that have to be equal, since the model ties what the state does not.
        opaque: What only the classes of tensors know how to copy: sources and targets by name.
        initialised: What ``init`` made, by name.
        left_on_meta: Names without memory that nothing was there for.
    """

    modules: Modules
    rules: Rules
    state: Outline
    match: Match
    metadata: Mapping[str, Any] | None = None
    beyond: Mapping[str, Machine] = field(factory=dict[str, Machine])
    problems: list[Problem] = field(factory=list)
    pairs: list[Pair] = field(factory=list)
    wishes: dict[str, Wish] = field(factory=dict)
    twins: list[tuple[Wish, Wish]] = field(factory=list)
    opaque: dict[str, Pair] = field(factory=dict)
    initialised: dict[str, torch.Tensor] = field(factory=dict)
    left_on_meta: tuple[str, ...] = ()
    _names: dict[str, str] = field(factory=dict)  # of the model, by label
    _values: dict[str, torch.Tensor] = field(factory=dict)  # by name of the model; of tied ones by the first
    _cuts: Cuts = field(factory=lambda: Cuts(this_rank()))
    _fresh: set[str] = field(factory=set)  # what has been delivered to other memory than the model's

    # -- planning ----------------------------------------------------------------------------------------------------

    def wish(self) -> None:
        """Say what is wanted."""
        tensors, leaves, through = self.modules.tensors, self.state.leaves, self.modules.through
        for name, source in self.match.loads.items():
            leaf, live = leaves[source], tensors.get(name)
            if (live is None or name in through) and self._is_as_given(live, leaf):
                continue
            if live is None:
                if not is_exact(leaf) and spec_of(leaf) is not None:
                    self._ask(Wish(source), name)  # extra state as a tensor
                continue
            if live.tied_to is not None:
                live = tensors[live.tied_to]
            if not isinstance(leaf, Lazy):
                if self._is_opaque(live, leaf):
                    self.opaque[live.fqn] = leaf, live.tensor
                    continue
                if self._is_direct(live, leaf):
                    continue
            self._ask(self._wish(live, source), self._owner(name) if through else live.fqn)
        for pair in self.match.untied:
            live = self._live(pair[0])
            twin = [Wish(one, layout_of(live), _flattening(live), dtype=live.spec.dtype) for one in pair]
            self.twins.append((twin[0], twin[1]))

    def _ask(self, wish: Wish, name: str) -> None:
        label = wish.source if wish.flattening is None else label_of(wish.source, wish.flattening)
        self.wishes[label], self._names[label] = wish, name

    def _is_as_given(self, live: LiveTensor | None, leaf: Any) -> bool:
        """Tell whether code of a module's own gets a leaf as it is: unless it is elsewhere, or whole and to be cut."""
        if not self.rules.as_given or isinstance(leaf, Lazy):
            return False
        return live is None or not (is_dtensor(live.tensor) and is_exact(leaf))

    def is_for_code(self, label: str) -> bool:
        """Tell whether a wish is for code of a module's own."""
        name = self._names[label]
        return name not in self.modules.tensors or name in self.modules.through

    @property
    def has_code(self) -> bool:
        """Whether code that may raise takes a part of the state: of modules, extra states, or classes of tensors."""
        return bool(self.modules.through or self.modules.extra or self.opaque)

    def _is_opaque(self, live: LiveTensor, leaf: Any) -> bool:
        """Tell whether only the class of a tensor knows how a value gets into it."""
        if not self.rules.as_given or live.flat is not None or not isinstance(leaf, torch.Tensor):
            return False
        pair = leaf, live.tensor
        return not all(map(is_grid, pair)) and not any(map(is_dtensor, pair)) and not live.tensor.is_meta

    def _is_direct(self, live: LiveTensor, leaf: Any) -> bool:
        """Note a copy that needs no plan and no other rank; tell whether this is one."""
        if live.flat is not None or live.dtype is not None or live.fqn in self.modules.through:
            return False
        target: Any = live.tensor
        if is_exact(leaf):
            return self._is_copied(live, leaf, target) if is_exact(target) else self._is_cut(live, leaf)
        if not (is_dtensor(leaf) and is_dtensor(target)):
            return False
        if is_meta(live) and not leaf._local_tensor.is_meta:  # it gets memory on the device of its mesh
            return False
        if not lie_alike(leaf, target):
            return False
        return self._is_copied(live, leaf._local_tensor, target._local_tensor)

    def _is_cut(self, live: LiveTensor, whole: torch.Tensor) -> bool:
        """Note copies of the parts that this rank has of a whole tensor which is here."""
        layout, local = layout_and_memory_of(live)
        if not isinstance(layout, Layout) or whole.is_quantized or whole.is_nested or whole.layout is not torch.strided:
            return False
        if local.is_meta or local.device != whole.device:
            return False
        if whole.dtype != local.dtype:
            if self.rules.dtype == "source":
                return False
            check_cast(whole.dtype, local.dtype)
        self.pairs.extend(self._cuts.pairs(whole, layout, local))
        return True

    def _is_copied(self, live: LiveTensor, source: torch.Tensor, target: torch.Tensor) -> bool:
        if source.is_meta:
            return target.is_meta  # a meta model that is given its own tensors
        dtype = source.dtype if self.rules.dtype == "source" else target.dtype
        if source.dtype != dtype:
            check_cast(source.dtype, dtype)
        if target.is_meta:
            target = new_memory(live, tuple(target.shape), dtype, self.rules.device or source.device)
            self._values[live.fqn] = target
            self._fresh.add(live.fqn)
        elif dtype != target.dtype:
            return False
        self.pairs.append((source, target))
        return True

    def keep_sources(self) -> None:
        """Copy what would be overwritten before it is read."""
        if not self.pairs:
            return
        outs = [wish.out for wish in self.wishes.values() if wish.out is not None]
        own = [self.modules.tensors[name] for name in self.modules.through if name in self.modules.tensors]
        own = [live for live in own if live.is_memory and (is_grid(live.tensor) or is_dtensor(live.tensor))]
        outs += [memory_of(live) for live in own if not is_meta(live)]
        self.pairs = prepared(self.pairs, outs)

    def _live(self, name: str) -> LiveTensor:
        """Give a tensor by the first of its names."""
        live = self.modules.tensors[name]
        return live if live.tied_to is None else self.modules.tensors[live.tied_to]

    def _owner(self, name: str) -> str:
        """Give the name by which a value is kept: code that gets what was given gets it by each of its names."""
        return name if self.rules.as_given and name in self.modules.through else self._live(name).fqn

    def _wish(self, live: LiveTensor, source: str) -> Wish:
        flattening, rules = _flattening(live), self.rules
        is_fresh = rules.staged or live.fqn in self.modules.through
        if not is_fresh and rules.dtype != "source":
            target, memory = layout_and_memory_of(live)
            if not memory.is_meta:
                return Wish(source, target, flattening, memory)
        is_fresh, target = is_fresh or is_meta(live), layout_of(live)
        spec, dtype = spec_of(self.state.leaves[source]), live.spec.dtype
        assert spec is not None
        if rules.dtype == "source" and spec.dtype != dtype:
            is_fresh, dtype = True, spec.dtype
        if not is_fresh:
            return Wish(source, target, flattening, memory_of(live))
        self._fresh.add(live.fqn)
        whole = spec.shape if flattening is None else (spec.numel,)
        shape = local_shape_of(target, whole, this_rank())
        out = None if shape is None else new_memory(live, shape, dtype, rules.device)
        return Wish(source, target, flattening, out, dtype)

    def initialise(self) -> None:
        """Let ``init`` make what has no memory and gets none from the state."""
        if self.rules.init is None:
            return
        for name in self._to_initialise():
            live = self.modules.tensors[name]
            made = made_by_init(name, self.rules.init, live, self.rules)
            if made is not None:
                self.initialised[name] = _local(live, made, self.rules.device)
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

    def take_all(self, made: Mapping[str, torch.Tensor]) -> None:
        """Accept delivered local tensors by label."""
        for label, value in made.items():
            self.take(label, value)

    def backup(self) -> Callable[[], None]:
        """Give a way back from ``run_code``."""
        tensors, opaque = Backup.of([machine.module for machine in self.modules.machines()]), copies_of(self.opaque)
        extra = [(self.modules.extra[name].owner, value) for name, value in self._extras(old=True)]

        def undo() -> None:
            tensors.put_back()
            opaque()
            faults: list[Exception] = []
            for owner, value in extra:
                try:
                    owner.set_extra_state(value)
                except Exception as error:  # the rest has to be undone all the same
                    faults.append(error)
            if faults:
                raise faults[0]

        return undo

    def run_code(self) -> Told:
        """Hand on what modules load by code of their own, which may raise: whole modules, and extra state.

        Returns:
            What it finds missing and unexpected, where it gets values as they were given.
        """
        told = Told([], [])
        with torch.no_grad():
            for machine in self.modules.machines():
                values = self._for_machine(machine)
                made = [name for name in values if self.rules.as_given or self._made(name) is not None]
                firsts = {self._live(name).fqn for name in made if name in self.modules.tensors}
                give_memory(self.modules, machine.module, firsts, self.rules.device)
                missing, unexpected = machine.load(values, self.metadata, strict=not self.rules.as_given)
                told.missing.extend([name for name in missing if name in values or name not in self.state.leaves])
                told.unexpected.extend(unexpected)
            copy_opaque(self.opaque)
        for name, value in self._extras(old=False):
            self.modules.extra[name].owner.set_extra_state(value)
        return told

    def _made(self, name: str) -> torch.Tensor | None:
        """Give what was delivered, or initialised, for a name."""
        owner = self._owner(name) if name in self.modules.tensors else name
        return self._values.get(owner, self.initialised.get(owner))

    def _extras(self, *, old: bool) -> Iterator[tuple[str, Any]]:
        """Give the extra states that go to their modules directly: what the state has, or what was there before."""
        for name, source in self.match.loads.items():
            if name in self.modules.extra and name not in self.modules.through:
                value = self._values.get(name, self.state.leaves[source])
                yield name, self.modules.extra[name].value if old else value

    def place(self) -> bool:
        """Put everything else in its place: new memory, what was staged, and what this rank copies by itself.

        Returns:
            Whether tensors of the model were replaced.
        """
        installed: list[LiveTensor] = []
        with torch.no_grad():
            copy_pairs(self.pairs)
            made = {name: value for name, value in self._values.items() if name in self._fresh}
            for name, value in (*made.items(), *self.initialised.items()):
                live = self.modules.tensors.get(name)
                if live is None or name in self.modules.through:
                    continue
                if is_meta(live) or (self.rules.dtype == "source" and value.dtype != live.spec.dtype):
                    install(self.modules, live, value)
                    installed.append(live)
                elif self.rules.staged:
                    copy_elements(value, memory_of(live))
        self._values.clear()
        self.pairs.clear()
        return bool(installed)

    def _for_machine(self, machine: Machine) -> dict[str, Any]:
        """Give the values that a module which loads itself has to get: those that are not there, as they are."""
        if self.rules.as_given:
            homes = {**self.modules.through, **self.beyond}
            return {name: self._for_code(name) for name in self.match.loads if homes.get(name) is machine}
        return {name: self._for_code(name) for name, one in self.modules.through.items() if one is machine}

    def _for_code(self, name: str) -> Any:
        value, source = self._made(name), self.match.loads.get(name)
        if name in self.modules.tensors and (value is not None or not self.rules.as_given):
            live = self._live(name)
            return leaf_of(live) if value is None else like_live(live, value)
        if value is not None:
            return value
        return self.modules.extra[name].value if source is None else self.state.leaves[source]


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
    >>> from fdsd.engine.load_rules import specs_of
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
        hollow=state.hollow,
    )
    load = ModelLoad(modules, rules, state, match, metadata)
    load.left_on_meta = left_on_meta(modules, match)
    load.problems = problems_of(state, modules, wanted, match, rules, load.left_on_meta)
    return load


def _flattening(live: LiveTensor) -> Flattening | None:
    return None if live.flat is None else live.flat.flattening


def _local(live: LiveTensor, whole: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Cut the local tensor of this rank out of a whole one."""
    if live.flat is not None:
        raise Unsupported(f"{live.fqn!r} is part of a flat parameter, which FSDP makes itself; init cannot make it.")
    target = layout_of(live)
    part = local_of(whole, target, this_rank()) if isinstance(target, Layout) else whole
    memory = new_memory(live, tuple(part.shape), live.spec.dtype, device)
    copy_elements(part, memory)
    return memory
