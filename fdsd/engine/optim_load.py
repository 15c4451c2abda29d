"""Bringing a state into live optimizers: what is checked first, what is asked for, and what is done with the results.

Everything is checked before the first request runs. How requests are delivered is unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from fdsd.algebra.apply import defer_leaf
from fdsd.comms.alone import this_rank
from fdsd.comms.live import Modules
from fdsd.data.columns import Slot
from fdsd.data.optim import OptimState
from fdsd.data.problem import describe
from fdsd.engine.matching import expected
from fdsd.engine.model_load import Rules, specs_of
from fdsd.engine.request import Request
from fdsd.layout.wants import local_shape_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fdsd.comms.optimizer_checks import Require
    from fdsd.comms.optimizer_targets import SlotTarget

__all__ = ["OptimLoad", "plan_optim"]


@define(eq=False)
class OptimLoad:
    """The loading of optimizers: their requests, and what has been delivered.

    Attributes:
        requests: What has to be delivered, by parameter and slot.
        without_state: The parameters of the optimizers for which the state has nothing.
    """

    state: OptimState
    modules: Modules
    optimizers: Sequence[Optimizer]
    how: dict[str, Any]
    requests: dict[str, Request] = field(factory=dict)
    without_state: tuple[str, ...] = ()
    _targets: dict[str, tuple[Slot, str, SlotTarget]] = field(factory=dict)
    _values: dict[str, torch.Tensor] = field(factory=dict)

    def take(self, name: str, value: torch.Tensor) -> None:
        """Accept a delivered local tensor."""
        self._values[name] = value

    def finish(self) -> None:
        """Put everything in its place: values, slots that are new or gone, and the groups' options."""
        from fdsd.comms.optimizer_writing import write_optimizers

        columns = {slot: column.to_dict() for slot, column in self.state.slots.items()}
        for label, (slot, fqn, target) in self._targets.items():
            if label in self._values:
                columns[slot][fqn] = target.finished(self._values[label])
            else:
                del columns[slot][fqn]  # nothing of it belongs here
        state = self.state.replace(slots=columns)
        write_optimizers(state, self.modules, self.optimizers, adopt=True, dtype="source", **self.how)
        self._values.clear()


def plan_optim(
    state: OptimState,
    modules: Modules,
    optimizers: Sequence[Optimizer],
    rules: Rules,
    *,
    require: Require = "listed",
    verb: str = "restore",
) -> OptimLoad:
    """Compare a state with live optimizers, and ask for what they need; nothing is written.

    Args:
        state: The loaded state, of leaves of any kind.
        modules: The live model.
        optimizers: The live optimizers.
        rules: How strictly it has to fit: names that its filter leaves out keep their state.
        require: What a parameter that trains needs, as ``write_optimizers`` takes it.
        verb: How errors call the asker.

    Raises:
        FdsdError: Everything that does not fit, in one message.
    """
    from fdsd.comms.optimizer_targets import slot_targets
    from fdsd.comms.optimizer_writing import check_write

    specs = specs_of(modules)
    kept = frozenset(specs) - frozenset(expected(specs, rules.keep, verb))
    lax = bool(rules.allow_unexpected.patterns or rules.allow_unexpected.predicates)
    how: dict[str, Any] = {"require": require, "keep": kept, "allow_unexpected": lax}
    if problems := check_write(state, modules, optimizers, **how):
        raise problems[0].error(f"{verb}: {describe(problems)}")
    load = OptimLoad(state, modules, optimizers, how)
    have = {fqn for column in state.slots.values() for fqn in column}
    load.without_state = tuple([fqn for fqn in state.fqns if fqn not in have])
    for (slot, fqn), target in slot_targets(modules, optimizers, state).items():
        label = f"{fqn}: {slot if isinstance(slot, str) else '.'.join(map(str, slot))}"
        load.requests[label] = _request(target, state.slots[slot][fqn], label, rules)
        load._targets[label] = slot, fqn, target  # pyright: ignore[reportPrivateUsage]  # its own maker
    return load


def _request(target: SlotTarget, leaf: Any, label: str, rules: Rules) -> Request:
    node = target.flatten(defer_leaf(leaf, label))
    if target.memory is not None and not rules.staged:
        return Request(node, target.placement, False, target.memory)
    shape = local_shape_of(target.placement, node.shape, this_rank())
    if shape is None:
        return Request(node, target.placement, False, None, target.spec.dtype)
    fresh = torch.empty(shape, dtype=target.spec.dtype, device=target.device)
    return Request(node, target.placement, False, fresh)
