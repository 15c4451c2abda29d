"""Bringing a state into live modules: what is checked first, what is asked for, and what is done with the results.

Everything is checked before the first request runs. Optimizers, and how requests are delivered, are unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, field, frozen

from fdsd.algebra.apply import defer_leaf
from fdsd.algebra.dtypes import copy_elements
from fdsd.comms.alone import this_rank
from fdsd.comms.installing import install, is_meta, like_live, new_memory
from fdsd.comms.live import LiveTensor, Modules
from fdsd.comms.modules import layout_of, leaf_of, memory_of
from fdsd.data.errors import SpecMismatch, Unsupported, listing
from fdsd.data.problem import Problem, describe
from fdsd.data.spec import TensorSpec, is_exact, spec_of
from fdsd.data.statedict import StateDict
from fdsd.engine.matching import DtypeRule, Match, expected, match_state
from fdsd.engine.request import Request
from fdsd.layout.layout import Layout
from fdsd.layout.local import local_of
from fdsd.layout.wants import local_shape_of
from fdsd.pipeline.pipeline import Pipeline
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

    keep: Pipeline = Pipeline(())
    allow_missing: Choice = Choice()
    allow_unexpected: Choice = Choice()
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
        spec, owner = live.spec, live.tied_to or name
        tied = live.tied_to is not None or modules.aliases_of(name)
        token = tokens.setdefault(owner, object()) if tied else None
        made[name] = TensorSpec(spec.shape, spec.dtype, tie=token)
    return StateDict.trusted(made, modules.metadata, kind="abstract")


@define(eq=False)
class ModelLoad:
    """The loading of one model: its requests, and what has been delivered.

    Attributes:
        modules: The live model.
        match: What goes where.
        requests: What has to be delivered, by the names of the model.
        initialised: Names that ``init`` made.
        left_on_meta: Names without memory that nothing was there for.
    """

    modules: Modules
    rules: Rules
    match: Match
    state: Mapping[str, Any]
    requests: dict[str, Request] = field(factory=dict)
    initialised: dict[str, torch.Tensor] = field(factory=dict)
    left_on_meta: tuple[str, ...] = ()
    _values: dict[str, torch.Tensor] = field(factory=dict)

    def take(self, name: str, value: torch.Tensor) -> None:
        """Accept a delivered local tensor."""
        self._values[name] = value

    def finish(self) -> None:
        """Put everything in its place: new memory, what was staged, extra state, and what modules load themselves."""
        with torch.no_grad():
            for name, value in (*self._values.items(), *self.initialised.items()):
                if name not in self.modules.through:
                    self._place(self.modules.tensors[name], value)
            for machine in self.modules.machines():
                machine.load(self._for_machine(machine), self._metadata())
        for name, source in self.match.loads.items():
            if name in self.modules.extra and name not in self.modules.through:
                self.modules.extra[name].owner.set_extra_state(self.state[source])
        self._values.clear()

    def _metadata(self) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = getattr(self.state, "_metadata", None)
        return found

    def _place(self, live: LiveTensor, value: torch.Tensor) -> None:
        if is_meta(live) or (self.rules.dtype == "source" and value.dtype != live.spec.dtype):
            install(self.modules, live, value)
        elif self.rules.staged or live.fqn in self.initialised:
            copy_elements(value, memory_of(live))

    def _for_machine(self, machine: Any) -> dict[str, Any]:
        """Give all values that a module which loads itself has to get: those that are not there, as they are."""
        made: dict[str, Any] = {}
        for name, one in self.modules.through.items():
            if one is not machine:
                continue
            owner = name
            if (live := self.modules.tensors.get(name)) is not None:
                owner = live.tied_to or name
            if owner in self._values:
                assert live is not None
                made[name] = like_live(self.modules.tensors[owner], self._values[owner])
            elif owner in self.match.loads:
                made[name] = self.state[self.match.loads[owner]]
            else:
                made[name] = self.modules.extra[name].value if live is None else leaf_of(live)
        return made


def plan_model(state: Mapping[str, Any], modules: Modules, rules: Rules, *, verb: str = "restore") -> ModelLoad:
    """Compare a state with a model, and ask for what the model needs; nothing is written.

    Args:
        state: Leaves by FQN, of any kind.
        modules: The live model.
        rules: How strictly it has to fit.
        verb: How errors call the asker.

    Raises:
        FdsdError: Everything that does not fit, in one message.

    >>> from fdsd.comms.modules import read_modules
    >>> load = plan_model({"w": torch.ones(1)}, read_modules(torch.nn.ParameterDict({"w": torch.zeros(1)})), Rules())
    >>> list(load.requests)
    ['w']
    """
    wanted = expected(specs_of(modules), rules.keep, verb)
    match = match_state(
        state, wanted, dtype=rules.dtype, allow_missing=rules.allow_missing, allow_unexpected=rules.allow_unexpected
    )
    load = ModelLoad(modules, rules, match, state)
    problems = [*match.problems, *_hollow(state, match), *_meta_problems(load)]
    if problems:
        raise problems[0].error(f"{verb}: {describe(problems)}")
    for name, source in match.loads.items():
        live = modules.tensors.get(name)
        if live is not None:
            load.requests[name] = _request(live, state[source], source, rules, through=name in modules.through)
    _initialise(load)
    return load


def _hollow(state: Mapping[str, Any], match: Match) -> list[Problem]:
    """Find what has no data to load."""
    names = [name for name in match.loads.values() if isinstance(state[name], TensorSpec) or _is_hollow(state[name])]
    if not names:
        return []
    return [Problem("spec", f"{listing(names)} have no data (specs, or on the meta device).", tuple(names))]


def _is_hollow(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def _request(live: LiveTensor, leaf: Any, source: str, rules: Rules, *, through: bool) -> Request:
    spec = spec_of(leaf)
    assert spec is not None
    node, target = defer_leaf(leaf, source), layout_of(live)
    if live.flat is not None:
        node = live.flat.flatten(node)
    dtype = spec.dtype if rules.dtype == "source" else live.spec.dtype
    if not (through or rules.staged or is_meta(live)) and dtype == live.spec.dtype:
        return Request(node, target, False, memory_of(live))
    shape = local_shape_of(target, node.shape, this_rank())
    if shape is None:
        return Request(node, target, False, None, dtype)
    return Request(node, target, False, new_memory(live, shape, dtype, rules.device))


def _meta_problems(load: ModelLoad) -> list[Problem]:
    """Find what has no memory and will not get any, unless there is an initialiser."""
    loaded = load.match.loads
    hollow = [
        name
        for name, live in load.modules.tensors.items()
        if live.tied_to is None and is_meta(live) and name not in loaded
    ]
    load.left_on_meta = tuple(hollow)
    persistent = [name for name in hollow if load.modules.tensors[name].persistent]
    if persistent and load.rules.init is None:
        text = (
            f"{listing(persistent)} are on the meta device, and the state has nothing for them. Give "
            "init=lambda fqn, spec: tensor."
        )
        return [Problem("missing", text, tuple(persistent))]
    return []


def _initialise(load: ModelLoad) -> None:
    """Make what is missing and has no memory."""
    init = load.rules.init
    if init is None:
        return
    for name in load.left_on_meta:
        live = load.modules.tensors[name]
        made: Any = init(name, live.spec)
        if made is None:
            continue
        if not is_exact(made) or tuple(made.shape) != live.spec.shape or made.is_meta:
            given = spec_of(made) if isinstance(made, torch.Tensor) else type(made).__name__
            raise SpecMismatch(f"init gave {given} for {name!r}, which is {live.spec}. Give a tensor of this shape.")
        load.initialised[name] = _local(live, made.detach(), load.rules.device)
    load.left_on_meta = tuple([name for name in load.left_on_meta if name not in load.initialised])
    if persistent := [name for name in load.left_on_meta if load.modules.tensors[name].persistent]:
        raise SpecMismatch(f"init gave nothing for {listing(persistent)}, which are on the meta device and missing.")


def _local(live: LiveTensor, whole: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    target = layout_of(live)
    if live.flat is not None:
        raise Unsupported(f"{live.fqn!r} is part of a flat parameter, which FSDP makes itself; init cannot make it.")
    part = local_of(whole, target, this_rank()) if isinstance(target, Layout) else whole
    memory = new_memory(live, tuple(part.shape), live.spec.dtype, device)
    copy_elements(part, memory)
    return memory
