"""Reading optimizers as a state dict, nested or flat, and bringing a given one into one form. Nothing is written
here.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from attrs import define
from torch.optim import Optimizer

from fdsd.comms.kinds import parts_of
from fdsd.comms.live import Modules
from fdsd.comms.live_optimizers import LiveOptimizer, live_optimizers
from fdsd.comms.optimizer_templates import read_or_template
from fdsd.comms.optimizers import merged, read_optimizers
from fdsd.compat._errors import LoadError, NoMapping
from fdsd.compat._flat_optim import flat_of, state_of_flat
from fdsd.compat._flats import has_flats, shown, with_rows_from_elsewhere
from fdsd.compat._loans import lend
from fdsd.compat._model import read_model, submodule_prefixes
from fdsd.compat._options import StateDictOptions, reading_optimizers
from fdsd.data.errors import Unsupported, listing
from fdsd.data.optim import OptimState
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import as_mapping
from fdsd.data.values import is_sequence

__all__ = [
    "OptimRead",
    "as_osd",
    "as_state",
    "is_by_id",
    "listed",
    "own_methods",
    "read_state",
    "unused_momentum",
    "used_momentum",
    "without_momentum",
]

_METHODS = ("state_dict", "load_state_dict")


def listed(optimizers: Any) -> tuple[Optimizer, ...]:
    """Give the optimizers, of which there may be one.

    Raises:
        NoMapping: Something else than optimizers was given.
    """
    if isinstance(optimizers, Optimizer):
        return (optimizers,)
    several: Any = optimizers
    is_one = isinstance(several, Mapping) or not isinstance(several, Iterable)
    given: list[Any] = [optimizers] if is_one else list(cast("Iterable[Any]", several))
    if odd := [type(one).__name__ for one in given if not isinstance(one, Optimizer)]:
        raise NoMapping(f"Optimizers are torch.optim.Optimizer, one or several; these are not: {listing(odd)}.")
    return tuple(given)


@contextmanager
def own_methods(optimizers: Sequence[Optimizer]) -> Generator[None]:
    """Let optimizers that were patched to call a getter or setter have their own methods, while that works."""
    hidden: list[tuple[Optimizer, str, Any]] = []
    for optimizer in optimizers:
        for name in _METHODS:
            method = vars(optimizer).get(name)
            if getattr(method, "__qualname__", "").startswith("_patch_optimizer_state_dict."):
                hidden.append((optimizer, name, vars(optimizer).pop(name)))
    try:
        yield
    finally:
        for optimizer, name, method in hidden:
            vars(optimizer)[name] = method


@define(eq=False)
class OptimRead:
    """What a getter has read of optimizers on this rank, before any other rank is asked for anything."""

    modules: Modules
    state: OptimState

    @classmethod
    def of(cls, model: Any, optimizers: Sequence[Optimizer], submodules: Any, options: StateDictOptions) -> OptimRead:
        """Read optimizers over a model.

        Raises:
            UnknownName: A submodule is no part of the model.
        """
        modules = read_model(model, options)
        if submodules:  # of no effect but this
            submodule_prefixes(model, submodules, options)
        return cls(modules, read_state(modules, optimizers))

    def is_for_rank_0(self, options: StateDictOptions) -> bool:
        """Tell whether rank 0 alone gets it: with FSDP1 also if it is going to give it to all."""
        is_given = options.broadcast_from_rank0 and has_flats(self.modules)
        return options.full_state_dict and (options.cpu_offload or is_given)

    def shown(self, options: StateDictOptions) -> OptimState:
        """Give the state as torch shows it. Collective, if tensors lie in flat parameters of FSDP1."""
        modules, asked, only = self.modules, reading_optimizers(options), self.is_for_rank_0(options)
        state = with_rows_from_elsewhere(self.state, modules, asked)
        return state.replace(slots=shown(state.slots, modules, options, asked, rank_0_only=only))


def read_state(modules: Modules, optimizers: Sequence[Optimizer]) -> OptimState:
    """Read the state of optimizers by name; of a fresh one what it would start from, if that can be told.

    >>> import torch
    >>> from fdsd.comms.modules import read_modules
    >>> linear = torch.nn.Linear(1, 1)
    >>> read_state(read_modules(linear), [torch.optim.LBFGS(linear.parameters())]).slots
    mappingproxy({})
    """
    live_optimizers(modules, optimizers)  # for its checks of all of them together
    states: list[OptimState] = []
    for optimizer in optimizers:
        try:
            state = read_or_template(modules, [optimizer])
            if not optimizer.state:
                lend(state, optimizer)
        except Unsupported:  # one that needs a closure, or real gradients, before it has any state
            state = read_optimizers(modules, [optimizer])
        states.append(state)
    return merged(states)


def _dampened(state: OptimState) -> Iterator[tuple[str, Any]]:
    column: Mapping[str, Any] = state.slots.get("momentum_buffer", {})
    for group in state.groups:
        if group.options.get("dampening"):
            yield from [(fqn, column[fqn]) for fqn in group.fqns if fqn in column]


def used_momentum(state: OptimState) -> list[str]:
    """List the parameters of which this rank can tell that their momentum is one, and no place for one.

    >>> from fdsd.data.groups import ParamGroup
    >>> column = {"a": torch.zeros(2), "b": -torch.zeros(2)}
    >>> used_momentum(OptimState({"momentum_buffer": column}, [ParamGroup(("a", "b"), {"dampening": 0.5})]))
    ['a']
    """
    return [fqn for fqn, value in _dampened(state) if not _may_be_none(value)]


def _may_be_none(value: Any) -> bool:
    if isinstance(value, TensorSpec):
        return True  # rank 0 knows
    parts = parts_of(value) if isinstance(value, torch.Tensor) else []
    return isinstance(value, torch.Tensor) and all(_is_none(part) for part in parts)


def _is_none(part: torch.Tensor) -> bool:
    if part.is_meta or not part.is_floating_point():
        return False
    return not bool(part.any()) and bool(part.signbit().all())


def unused_momentum(state: OptimState, used: Sequence[str]) -> set[str]:
    """List the parameters whose momentum is, on all ranks, a place for one: negative zeros.

    Args:
        state: The state.
        used: What any rank has found to be used.
    """
    known = set(used)
    return {fqn for fqn, value in _dampened(state) if fqn not in known and value is not None}


def without_momentum(state: OptimState, names: Collection[str]) -> OptimState:
    """Take back the momentum that a fresh SGD gave as memory to load into, and into which nothing has been loaded."""
    if not names:
        return state
    column = {**state.slots["momentum_buffer"], **dict.fromkeys(names)}
    return state.replace(slots={**state.slots, "momentum_buffer": column})


def as_osd(state: OptimState, options: StateDictOptions) -> dict[str, Any]:
    """Give torch's dict, nested by parameter and group, or flat.

    >>> from fdsd.data.groups import ParamGroup
    >>> as_osd(OptimState({}, (ParamGroup(("w",), {"lr": 0.1}),)), StateDictOptions(flatten_optimizer_state_dict=True))
    {'param_groups.w.lr': 0.1}
    """
    if options.flatten_optimizer_state_dict:
        return flat_of(state)
    osd = state.to_torch()
    return {"state": osd["state"], "param_groups": osd["param_groups"]}


def as_state(osd: Any, modules: Modules, optimizers: Sequence[Optimizer], options: StateDictOptions) -> OptimState:
    """Read a state dict of optimizers: nested by name or by id, or flat.

    Args:
        osd: The state dict; it is not changed.
        modules: The model.
        optimizers: Those that are to have it.
        options: Only ``strict`` counts; both forms are always taken.

    Raises:
        LoadError: The flat form lacks hyper-parameters, and ``strict``.
        FdsdError: It is neither form.
    """
    given = as_mapping(osd)
    if given is None:
        raise NoMapping(f"Expected optim_state_dict to be dict-like, got {type(osd)}.")
    _check_groups(given)
    if "state" not in given:
        like = read_state(modules, optimizers)
        return state_of_flat(given, like, modules.tensors, options)
    if is_by_id(given):
        return _by_id(given, live_optimizers(modules, optimizers))
    return OptimState.from_torch({"state": given["state"], "param_groups": given.get("param_groups", [])})


def _check_groups(osd: Mapping[str, Any]) -> None:
    """Refuse groups that cannot be read.

    Raises:
        NoMapping: They are no list of dicts, each with a list of parameters.
    """
    groups = osd.get("param_groups", [])
    if not is_sequence(groups):
        raise NoMapping(f"optim_state_dict['param_groups'] is a list of dicts, not {type(groups).__name__}.")
    if odd := [i for i, group in enumerate(groups) if as_mapping(group) is None]:
        raise NoMapping(f"optim_state_dict['param_groups'] is a list of dicts; these items are none: {listing(odd)}.")
    if odd := [i for i, group in enumerate(groups) if not _lists(group.get("params"))]:
        raise NoMapping(
            f"optim_state_dict['param_groups']: in the groups {listing(odd)} 'params' is no list of names or ids."
        )


def _lists(params: Any) -> bool:
    return isinstance(params, Iterable) and not isinstance(params, str | bytes | Mapping | torch.Tensor)


def is_by_id(osd: Mapping[str, Any]) -> bool:
    """Tell whether a state dict lists parameters by id, as ``optimizer.state_dict()`` does.

    >>> is_by_id({"state": {}, "param_groups": [{"params": [0]}]}), is_by_id({"state.w.step": 3})
    (True, False)
    """
    keys = [key for group in osd.get("param_groups", ()) for key in group["params"]]
    return bool(keys) and all(isinstance(key, int) for key in keys)


def _by_id(osd: Mapping[str, Any], live: Sequence[LiveOptimizer]) -> OptimState:
    """Name the parameters by their order: in all optimizers one after the other, or in the only one."""
    count = sum(len(group["params"]) for group in osd["param_groups"])
    names = [param.fqn for one in live for param in one.params]
    if len(names) != count:
        raise LoadError(
            f"The optimizer state dict lists {count} parameters by id, and the optimizers have {len(names)}. Give what "
            "get_optimizer_state_dict returned, which lists them by name."
        )
    packed = [{key: value for key, value in group.items() if key != "param_names"} for group in osd["param_groups"]]
    return OptimState.from_torch({"state": osd["state"], "param_groups": packed}, names)
