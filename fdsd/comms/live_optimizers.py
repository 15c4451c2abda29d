"""Live optimizers with the names of their parameters: which parameter objects are whose, in which group.

Nothing is read of their state, and nothing is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from attrs import field, frozen
from torch.optim import Optimizer

from fdsd.comms.live import Modules
from fdsd.comms.optimizer_layouts import as_laid
from fdsd.data.errors import NameConflict, UnknownName, Unsupported, listing, plural

if TYPE_CHECKING:
    from fdsd.comms.fsdp1 import Flat, FlatView

__all__ = ["LiveGroup", "LiveOptimizer", "LiveParam", "listed", "live_optimizers"]


@frozen(eq=False)
class LiveParam:
    """A parameter as an optimizer has it.

    Args:
        tensor: The object in the optimizer's group.
        fqns: Its first name; of FSDP1's flat parameter, the names of all parameters in it.
        views: With FSDP1, where each of them lies in the flat parameter, of which this rank has a shard. Empty for
            all others, and where FSDP1 does not shard and the optimizer has the original parameters.
    """

    tensor: torch.Tensor = field(repr=False)
    fqns: tuple[str, ...]
    views: tuple[FlatView, ...] = field(default=(), repr=False)

    @property
    def fqn(self) -> str:
        """The name that stands for it where one is needed."""
        return self.fqns[0]

    @property
    def flat(self) -> Flat | None:
        """The flat parameter that it is; ``None`` if it is an original parameter."""
        return None if not self.views or self.views[0].flat.uses_originals else self.views[0].flat

    @property
    def is_elsewhere(self) -> bool:
        """Whether this rank holds nothing of it, so that its optimizer never steps it."""
        return bool(self.views) and self.flat is None and not self.here(0)

    def here(self, i: int) -> int:
        """Count the elements of one of its parameters that this rank holds."""
        begin, end = self.views[i].interval(self.views[i].flat.coordinate)
        return end - begin


@frozen(eq=False)
class LiveGroup:
    """A parameter group of a live optimizer.

    Args:
        options: The optimizer's own dict, ``params`` included.
        params: The parameters, in its order.
    """

    options: dict[str, Any] = field(repr=False)
    params: tuple[LiveParam, ...]

    @property
    def fqns(self) -> tuple[str, ...]:
        """The names of all parameters, in order."""
        return tuple([fqn for param in self.params for fqn in param.fqns])


@frozen(eq=False)
class LiveOptimizer:
    """A live optimizer and the names of its parameters.

    Args:
        optimizer: The optimizer.
        label: What errors call it: ``optimizers[0] (Adam)``.
        groups: Its groups.
    """

    optimizer: Optimizer = field(repr=False)
    label: str
    groups: tuple[LiveGroup, ...]

    @property
    def params(self) -> tuple[LiveParam, ...]:
        """The parameters of all groups, in order."""
        return tuple([param for group in self.groups for param in group.params])

    @property
    def state(self) -> dict[Any, Any]:
        """The optimizer's own table of state."""
        state: dict[Any, Any] = self.optimizer.state
        return state

    def row(self, param: LiveParam) -> Any:
        """Give its state of a parameter, with DTensors that say how they lie; ``None`` without any."""
        return as_laid(self.state.get(param.tensor), param.tensor)

    @property
    def is_fresh(self) -> bool:
        """Whether it has no state at all."""
        return not any(self.state.values())

    @property
    def saves_its_own_way(self) -> bool:
        """Whether ``state_dict`` does more than torch's: the class has its own, or there are hooks on it."""
        return _is_own(self.optimizer, "state_dict") or _has_hooks(self.optimizer, "state_dict")

    @property
    def loads_its_own_way(self) -> bool:
        """Whether ``load_state_dict`` does more than torch's."""
        return _is_own(self.optimizer, "load_state_dict") or _has_hooks(self.optimizer, "load_state_dict")


def _is_own(optimizer: Optimizer, method: str) -> bool:
    return method in vars(optimizer) or getattr(type(optimizer), method) is not getattr(Optimizer, method)


def _has_hooks(optimizer: Optimizer, method: str) -> bool:
    return any(getattr(optimizer, f"_optimizer_{method}_{when}_hooks", None) for when in ("pre", "post"))


def live_optimizers(modules: Modules, optimizers: Optimizer | Iterable[Optimizer]) -> tuple[LiveOptimizer, ...]:
    """Name the parameters of optimizers.

    Args:
        modules: The model, or its parts.
        optimizers: One optimizer or several.

    Raises:
        Unsupported: What was given is no optimizer.
        UnknownName: Parameters are not in the model.
        NameConflict: A parameter is in two groups, or in two optimizers.

    >>> from fdsd.comms.modules import read_modules
    >>> model = torch.nn.Linear(2, 1)
    >>> [live] = live_optimizers(read_modules(model), torch.optim.SGD(model.parameters(), lr=0.1))
    >>> live.label, live.groups[0].fqns
    ('optimizers[0] (SGD)', ('weight', 'bias'))
    """
    made = tuple([_named(modules, given, i) for i, given in enumerate(listed(optimizers))])
    _check_known(made, modules)
    _check_once(made)
    return made


def listed(optimizers: Any) -> list[Optimizer]:
    """Give one optimizer, or several, as a list.

    Raises:
        Unsupported: Something else was given.

    >>> listed(())
    []
    """
    if isinstance(optimizers, Optimizer):
        return [optimizers]
    if not _is_iterable(optimizers):
        raise Unsupported(f"Optimizers are torch.optim.Optimizer, one or several; not {type(optimizers).__name__}.")
    given = list(optimizers)
    if odd := [type(one).__name__ for one in given if not isinstance(one, Optimizer)]:
        raise Unsupported(f"Optimizers are torch.optim.Optimizer, one or several; these are not: {listing(odd)}.")
    return given


def _is_iterable(value: object) -> TypeGuard[Iterable[Any]]:
    return isinstance(value, Iterable) and not isinstance(value, str | Mapping | torch.Tensor)


def _named(modules: Modules, optimizer: Optimizer, i: int) -> LiveOptimizer:
    flat_names = {id(live.flat): fqn for fqn, live in modules.tensors.items() if live.flat and live.tied_to is None}

    def param(tensor: torch.Tensor) -> LiveParam:
        fqn = modules.fqn_of(tensor)
        if fqn is not None:
            view = modules.tensors[fqn].flat if flat_names else None
            return LiveParam(tensor, (fqn,), (view,) if view is not None and view.flat.is_sharded else ())
        flat = modules.flat_of(tensor)
        if flat is None:
            return LiveParam(tensor, ())
        return LiveParam(tensor, tuple([flat_names[id(view)] for view in flat.views]), flat.views)

    groups = [LiveGroup(group, tuple([param(p) for p in group["params"]])) for group in optimizer.param_groups]
    return LiveOptimizer(optimizer, f"optimizers[{i}] ({type(optimizer).__name__})", tuple(groups))


def _check_known(made: tuple[LiveOptimizer, ...], modules: Modules) -> None:
    problems: list[str] = []
    for live in made:
        strays = [tuple(param.tensor.shape) for param in live.params if not param.fqns]
        if strays:
            problems.append(f"{plural(len(strays), 'parameter')} of {live.label}, of shapes {listing(strays)}")
    if problems:
        raise UnknownName(
            f"{' and '.join(problems)}: not in the model, which has {plural(len(modules.tensors), 'tensor')}. Give the "
            "model, or all its parts, that the optimizer was made for; after a parameter was replaced (by .to(), by "
            "a wrapper or by loading with assign=True), make the optimizer again."
        )


def _check_once(made: tuple[LiveOptimizer, ...]) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for live in made:
        for i, group in enumerate(live.groups):
            for fqn in group.fqns:
                places[fqn].append(f"{live.label} group {i}")
    if double := {fqn: where for fqn, where in places.items() if len(where) > 1}:
        first = next(iter(double))
        raise NameConflict(
            f"{plural(len(double), 'parameter')} of the model stand more than once in the optimizers: "
            f"{listing(double)}; {first!r} in {' and '.join(double[first])}. Each may have one state: list it once. "
            "Parameters that share their memory are one parameter of several names."
        )
