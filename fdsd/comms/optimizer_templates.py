"""The state that optimizers would have after they have made it and before they have used it, without a step.

Throw-away twins are stepped, one for each kind of parameter (``optimizer_probe``); live optimizers never.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from attrs import field, frozen
from torch.optim import Optimizer

from fdsd.comms.live import Modules
from fdsd.comms.live_optimizers import LiveGroup, LiveOptimizer, LiveParam, live_optimizers
from fdsd.comms.optimizer_flats import spread
from fdsd.comms.optimizer_layouts import as_laid
from fdsd.comms.optimizer_probe import first_row, fresh_copy
from fdsd.comms.optimizer_values import local_part
from fdsd.comms.optimizers import columns_of, merged, raw_state, state_of
from fdsd.data.columns import Path, at_path, is_plain
from fdsd.data.errors import Unsupported
from fdsd.data.optim import OptimState

__all__ = ["Templates", "read_or_template", "start", "template_of"]


def template_of(modules: Modules, optimizers: Optimizer | Iterable[Optimizer]) -> OptimState:
    """Tell what the state would be once a first step has made it, with the values that it starts from.

    Counters are 0, moments zeros (or what else the class fills them with), for each parameter that trains. Frozen
    parameters have no state, neither have those of which this rank holds nothing (FSDP1). Of a parameter of a
    DTensor kind the optimizer's own step runs on DTensors of zeros; if that communicates, so does this.

    Args:
        modules: The model, or its parts.
        optimizers: One optimizer or several. Not touched: no step, no gradients, no hooks, no random numbers.

    Returns:
        The state with the live groups. Its tensors are fresh, and zeros that need memory.

    Raises:
        Unsupported: A class cannot be stepped on zeros without a closure: LBFGS for one.

    Law: an optimizer into which this is loaded trains as if nothing had been loaded. SGD with dampening is the
    exception: no buffer is like none, so the template's zeros are there to be loaded into; they are negative zeros.

    >>> from fdsd.comms.modules import read_modules
    >>> model = torch.nn.Linear(2, 1)
    >>> nadam = torch.optim.NAdam(model.parameters())
    >>> state = template_of(read_modules(model), nadam)
    >>> {slot: column["bias"].tolist() for slot, column in state.slots.items()}
    {'step': 0.0, 'mu_product': 1.0, 'exp_avg': [0.0], 'exp_avg_sq': [0.0]}
    >>> dict(nadam.state)
    {}
    """
    return merged([_template(live, modules) for live in live_optimizers(modules, optimizers)])


def read_or_template(modules: Modules, optimizers: Optimizer | Iterable[Optimizer]) -> OptimState:
    """Read the state of optimizers, and of those that have none their template.

    Args:
        modules: The model, or its parts.
        optimizers: One optimizer or several. Each is judged by itself; a partial state stays partial.

    Raises:
        Unsupported: A fresh one has no template.

    >>> from fdsd.comms.modules import read_modules
    >>> model = torch.nn.Linear(2, 1)
    >>> read_or_template(read_modules(model), torch.optim.Adam(model.parameters())).slots["step"]["bias"]
    tensor(0.)
    """
    return merged(
        [
            _template(live, modules) if live.is_fresh else state_of(live, modules)
            for live in live_optimizers(modules, optimizers)
        ]
    )


def start(optimizer: Optimizer) -> None:
    """Give a fresh optimizer the state that its first step would make, without a step; one that has state keeps it.

    Args:
        optimizer: Its parameters and their gradients stay as they are.

    Raises:
        Unsupported: The class cannot be stepped on zeros without a closure; nothing has been written.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> adam = torch.optim.Adam([weight])
    >>> start(adam)
    >>> adam.state[weight]["exp_avg"]
    tensor([0.])
    """
    groups = [
        LiveGroup(one, tuple([LiveParam(param, ()) for param in one["params"]])) for one in optimizer.param_groups
    ]
    live = LiveOptimizer(optimizer, type(optimizer).__name__, tuple(groups))
    if live.is_fresh:
        optimizer.state.update({param.tensor: row for param, row in _first_rows(live)})


def _first_rows(live: LiveOptimizer) -> list[tuple[LiveParam, dict[Any, Any]]]:
    templates = Templates()
    return [
        (param, _without_momentum(row) if group.options.get("dampening") else row)
        for group in live.groups
        for param in group.params
        if (row := templates.row(live, group, param)) is not None
    ]


def _template(live: LiveOptimizer, modules: Modules) -> OptimState:
    # groups, and what a state_dict of the optimizer's own adds, are read
    return spread(raw_state(live, modules).replace(slots=columns_of(_first_rows(live))), live)


def _without_momentum(row: dict[Any, Any]) -> dict[Any, Any]:
    """Say by negative zeros that there is no momentum yet.

    To SGD with dampening, zeros are not like none: its first gradient counts fully. Negative zeros are memory to load
    into like others, they stay what they are wherever they are copied, saved, sharded or gathered, and no
    optimizer gets them by adding up.
    """
    if isinstance(buffer := row.get("momentum_buffer"), torch.Tensor) and buffer.is_floating_point():
        local_part(buffer).neg_()
    return row


@frozen
class Templates:
    """First states of parameters: each kind of parameter is probed once."""

    _rows: dict[Hashable, dict[Any, Any] | str] = field(factory=dict, init=False, repr=False)
    _paths: dict[Hashable, tuple[Path, ...]] = field(factory=dict, init=False, repr=False)

    def row(self, live: LiveOptimizer, group: LiveGroup, param: LiveParam) -> dict[Any, Any] | None:
        """Give the first state of a parameter in tensors of its own; ``None`` if it will have none.

        Raises:
            Unsupported: The optimizer cannot be stepped on zeros.
        """
        if not param.tensor.requires_grad or param.is_elsewhere:
            return None
        return fresh_copy(self.peek(live, group, param)) or None

    def peek(self, live: LiveOptimizer, group: LiveGroup, param: LiveParam) -> dict[Any, Any]:
        """Give the state that a parameter has if it trains, in tensors that all of one kind share, to look at.

        Raises:
            Unsupported: The optimizer cannot be stepped on zeros.
        """
        key = (id(live.optimizer), id(group.options), *_kind(param.tensor))
        found = self._rows.get(key)
        if found is None:
            options = {name: value for name, value in group.options.items() if name != "params"}
            try:
                found = as_laid(first_row(live.optimizer, options, param.tensor), param.tensor)
            except Unsupported as error:
                found = str(error)
            self._rows[key] = found
        if isinstance(found, str):
            raise Unsupported(found)
        return found

    def at(self, live: LiveOptimizer, group: LiveGroup, param: LiveParam, path: Path) -> Any:
        """Give what stands at a path of the state that a parameter has if it trains; ``None`` if that is unknown."""
        try:
            return at_path(self.peek(live, group, param), path)
        except Unsupported:
            return None

    def paths(self, live: LiveOptimizer, group: LiveGroup, param: LiveParam) -> tuple[Path, ...]:
        """Give the paths of all values that a step makes for a parameter; none if that is unknown.

        Nothing is computed, and no memory is needed: the twin steps on tensors of the meta device.
        """
        key = (id(live.optimizer), id(group.options), *_kind(param.tensor))
        if key not in self._paths:
            meta: Any = torch.nn.Parameter(torch.empty_like(param.tensor.detach(), device="meta"), requires_grad=True)
            options = {name: value for name, value in group.options.items() if name != "params"}
            options.update({name: False for name in ("fused", "capturable") if name in options})  # for other devices
            try:
                row = first_row(live.optimizer, options, meta)
            except Unsupported:
                row = {}
            self._paths[key] = tuple(_paths(row))
        return self._paths[key]


def _paths(row: Any, path: Path = ()) -> Iterator[Path]:
    if is_plain(row) and (row or not path):
        for key, value in row.items():
            yield from _paths(value, (*path, key))
    else:
        yield path


def _kind(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    mesh, placements = (getattr(tensor, name, None) for name in ("device_mesh", "placements"))  # of a DTensor
    return type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, mesh, placements
