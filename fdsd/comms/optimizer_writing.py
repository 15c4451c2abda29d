"""Writing a state into live optimizers: everything is checked first, then values go in place, by FQN.

Optimizers are never stepped. What is wrong with a state is ``optimizer_checks``' business, single values that of
``optimizer_values``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from attrs import define
from torch.optim import Optimizer

from fdsd.comms.backups import OptimizerBackup
from fdsd.comms.live import Modules
from fdsd.comms.live_optimizers import LiveOptimizer, LiveParam
from fdsd.comms.optimizer_checks import Loaded, Require, faults_of
from fdsd.comms.optimizer_flats import joined_row
from fdsd.comms.optimizer_groups import GroupMatch
from fdsd.comms.optimizer_probe import fresh_copy
from fdsd.comms.optimizer_trials import runs_code_of_others
from fdsd.comms.optimizer_values import Arrivals, Policy
from fdsd.data.errors import SpecMismatch, add_note
from fdsd.data.optim import OptimState
from fdsd.data.problem import Problem, describe
from fdsd.data.values import is_dict

__all__ = ["check_write", "write_optimizers"]

Dtype = Literal["target", "source"]


def check_write(
    state: OptimState,
    modules: Modules,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    require: Require = "state",
    keep: Collection[str] = (),
    allow_unexpected: bool = False,
    is_joint: bool = False,
) -> list[Problem]:
    """Find everything that would keep ``write_optimizers`` from writing a state; its values need not be here yet.

    Args:
        state: As for ``write_optimizers``; tensors may be lazy, sharded, or specs.
        modules: The model, or its parts.
        optimizers: One optimizer or several.
        require: As for ``write_optimizers``.
        keep: As for ``write_optimizers``.
        allow_unexpected: As for ``write_optimizers``.
        is_joint: As for ``faults_of``.

    Raises:
        FdsdError: As ``read_optimizers`` does, for parameters that are not in the model.
    """
    loaded = Loaded.of(state, modules, optimizers)
    how: dict[str, Any] = {"allow_unexpected": allow_unexpected, "values": False, "is_joint": is_joint}
    return faults_of(loaded, require, keep, **how).problems()


def write_optimizers(
    state: OptimState,
    modules: Modules,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    require: Require = "state",
    keep: Collection[str] = (),
    allow_unexpected: bool = False,
    adopt: bool | Callable[[object], bool] = False,
    dtype: Dtype = "target",
) -> None:
    """Give optimizers a state: its values, its groups' options, and no state where it has none.

    Live tensors of the same shape are filled and stay the same objects, and keep their dtype; others are replaced
    by tensors in the dtype that the optimizer itself would give them, or else in the dtype and on the device that
    ``Optimizer.load_state_dict`` would choose. Groups are matched by the names of their parameters, options that only
    the state has are added. An optimizer with a ``load_state_dict`` of its own, or with hooks on it, gets torch's dict
    through that.

    Args:
        state: By the names of the model; a tied parameter by any of its names. Tensors are whole for plain
            parameters, DTensors laid out alike for DTensors, and for FSDP1 this rank's piece of the flattened tensor.
        modules: The model, or its parts.
        optimizers: One optimizer or several; each takes the parameters that it has.
        require: ``"state"``: what trains, and would have state, needs one (torch's rule). ``"listed"``: what
            trains needs to be in a group, and has state if the loaded state has it: what was read is written back
            exactly. ``"nothing"``: what is missing has no state, and options keep their values.
        keep: Names whose live state stays if the loaded one has none.
        allow_unexpected: Whether names that no optimizer has are passed over.
        adopt: Whether tensors of ``state`` may become those of the optimizers, instead of copies; or which of them.
        dtype: ``"source"``: tensors keep the dtype that they have in ``state``.

    Raises:
        SpecMismatch: Something does not fit; all of it is named, and nothing has been written.
        FdsdError: As ``read_optimizers`` does, for parameters that are not in the model.

    Law: what was read, written back, changes nothing; and into another optimizer of the kind, makes it the same.

    >>> from fdsd.comms.modules import read_modules
    >>> from fdsd.comms.optimizers import read_optimizers
    >>> a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> old, new = [torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9) for m, lr in ((a, 0.1), (b, 0.2))]
    >>> a(torch.ones(2)).sum().backward()
    >>> old.step()
    >>> write_optimizers(read_optimizers(read_modules(a), old), read_modules(b), new)
    >>> new.param_groups[0]["lr"], new.state[b.bias]["momentum_buffer"]
    (0.1, tensor([1.]))
    """
    loaded = Loaded.of(state, modules, optimizers)
    if problems := faults_of(loaded, require, keep, allow_unexpected=allow_unexpected, values=True).problems():
        raise SpecMismatch(describe(problems))
    arrivals = Arrivals(adopt if callable(adopt) else lambda _: adopt, dtype)
    for live in loaded.optimizers:
        arrivals.protect(live.state)
    has_code = any(map(runs_code_of_others, loaded.optimizers))
    backup = OptimizerBackup.of([live.optimizer for live in loaded.optimizers]) if has_code else None
    with torch.no_grad():
        changes = [_Change.of(loaded, i, arrivals, frozenset(keep)) for i in range(len(loaded.optimizers))]
        try:
            _write(changes, arrivals)
        except BaseException:
            if backup is not None:
                backup.put_back()
            raise


def _write(changes: Sequence[_Change], arrivals: Arrivals) -> None:
    ours = [change for change in changes if not change.live.loads_its_own_way]
    for change in changes:  # code of others first: what raises most likely
        if change.live.loads_its_own_way:
            change.hand_over()
    arrivals.land()
    for change in ours:
        change.install()
    for change in ours:
        change.settle()


@define
class _Change:
    """What one optimizer is to have."""

    live: LiveOptimizer
    rows: dict[LiveParam, dict[Any, Any]]
    strays: dict[str, Any]
    options: list[dict[str, Any]]
    extra: Mapping[str, Any]

    @classmethod
    def of(cls, loaded: Loaded, i: int, arrivals: Arrivals, keep: frozenset[str]) -> _Change:
        live = loaded.optimizers[i]
        own = live.loads_its_own_way
        rows: dict[LiveParam, Any] = {}
        for match in loaded.matches[i]:
            moves_step = any(_option(match, key) for key in ("fused", "capturable"))
            for param in match.live.params:
                there = live.row(param)
                first = partial(loaded.templates.at, live, match.live, param)
                policy = Policy(param.tensor, moves_step, "source" if own else arrivals.dtype, first)
                if any(fqn in loaded.rows for fqn in param.fqns) and not param.is_elsewhere:
                    rows[param] = _row(loaded, arrivals, policy, param, None if own else there)
                elif there is not None and (param.is_elsewhere or keep.intersection(param.fqns)):
                    rows[param] = there
        strays = {key: _copied(arrivals, value) for key, value in loaded.strays_of(i).items()}
        options = [_options(match, None if own else arrivals) for match in loaded.matches[i]]
        return cls(live, rows, strays, options, loaded.state.extra)

    def install(self) -> None:
        """Put everything into the optimizer's own tables, whose objects stay the same."""
        state = self.live.state
        ours: dict[Any, Any] = {param.tensor: row for param, row in self.rows.items()}
        ours.update(self.strays)
        for key in [key for key in state if key not in ours]:
            del state[key]
        for key, row in ours.items():
            there = state.get(key)
            if is_dict(there) and is_dict(row):
                if there is not row:
                    there.clear()
                    there.update(row)
            else:
                state[key] = row
        for group, options in zip(self.live.groups, self.options, strict=True):
            group.options.update(options)

    def settle(self) -> None:
        """Let the class do what it does to a state that was loaded, such as one of an older version."""
        optimizer: Any = self.live.optimizer
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    def hand_over(self) -> None:
        """Give torch's dict to the optimizer's own ``load_state_dict``."""
        kept = [dict(group.options) for group in self.live.groups]
        number = 0
        packed: list[dict[str, Any]] = []
        ids: dict[LiveParam, int] = {}
        for group, options in zip(self.live.groups, self.options, strict=True):
            own = _Ids(range(number, number + len(group.params)))
            number += len(own)
            ids.update(zip(group.params, own, strict=True))
            rest = {key: value for key, value in group.options.items() if key != "params"}
            packed.append({**rest, **options, "params": own})
        state = {ids[param]: row for param, row in self.rows.items()}
        try:
            self.live.optimizer.load_state_dict(
                {"state": {**state, **self.strays}, "param_groups": packed, **self.extra}
            )
        except Exception as error:
            add_note(error, f"Raised by load_state_dict of {self.live.label}, which is its own or has hooks.")
            raise
        for options, old in zip(self.live.optimizer.param_groups, kept, strict=True):
            _keep_tensors(options, old)


class _Ids(list[int]):
    """Ids of one group in order; torch looks for each of them by ``in``, and a list would be searched every time."""

    def __contains__(self, key: object) -> bool:
        if self and isinstance(key, int) and self[-1] - self[0] + 1 == len(self):
            return self[0] <= key <= self[-1]
        return super().__contains__(key)

    def __deepcopy__(self, memo: Any) -> list[int]:
        return list(self)


def _keep_tensors(group: dict[str, Any], old: Mapping[str, Any]) -> None:
    """Tensors among the options stay the same objects: a captured graph, or a schedule, may hold them."""
    for key, value in old.items():
        new: Any = group.get(key)
        both = isinstance(value, torch.Tensor) and isinstance(new, torch.Tensor) and new is not value
        if both and new.numel() == value.numel():
            value.copy_(new.detach().reshape(value.shape))
            group[key] = value


def _option(match: GroupMatch, key: str) -> Any:
    return match.options.get(key, match.live.options.get(key))


def _options(match: GroupMatch, arrivals: Arrivals | None) -> dict[str, Any]:
    there = match.live.options
    maker = arrivals if arrivals is not None else Arrivals(lambda _: False, "source")
    made = {
        key: maker.option(value, there.get(key) if arrivals is not None else _without_tensor(there.get(key)))
        for key, value in match.options.items()
        if key != "param_names"
    }
    if match.named and "param_names" not in there:
        made["param_names"] = list(match.live.fqns)
    return made


def _without_tensor(value: Any) -> Any:
    return None if isinstance(value, torch.Tensor) else value


def _row(loaded: Loaded, arrivals: Arrivals, policy: Policy, param: LiveParam, there: Any) -> Any:
    if param.flat is not None:
        return joined_row(arrivals, policy, param, loaded.columns_of(param), there)
    given = loaded.rows[param.fqn]
    return arrivals.row(policy, given, there) if is_dict(given) else _copied(arrivals, given)


def _copied(arrivals: Arrivals, value: Any) -> Any:
    return value if arrivals.adopt(value) else fresh_copy(value)
