"""What has to be done to load a state dict into a model, on this rank: the engine's load, and who meets for what.

Nothing is written here, but by code of modules' own. How ranks come to agree is unknown.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import frozen

from fdsd.algebra.apply import apply, defer_leaf
from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import SplitDim
from fdsd.comms.live import LiveTensor, Modules
from fdsd.comms.worlds import Meeting, default_world, every_rank
from fdsd.comms.wrappers import is_extra
from fdsd.compat._errors import OptionError
from fdsd.compat._fitting import Fit, fit_model
from fdsd.compat._model import expected_names
from fdsd.compat._options import StateDictOptions
from fdsd.compat._rank0 import RankZero
from fdsd.compat._sharded import deferred
from fdsd.compat._verdict import Findings
from fdsd.data.errors import FdsdError, listing
from fdsd.data.protocols import World
from fdsd.data.spec import TensorSpec, is_exact
from fdsd.engine.load_rules import Rules, unwritable
from fdsd.engine.meetings import Meetings
from fdsd.engine.model_load import ModelLoad
from fdsd.engine.outlines import Outline
from fdsd.engine.wishes import Wish, digest_of, request_of, requests_of

__all__ = ["Plan", "warn_of_meta"]


def _device(modules: Modules, world: World | None) -> torch.device | None:
    """Give the one device of a model's tensors; where no tensor has one, that of the group.

    Raises:
        OptionError: There are several.
    """
    devices = _devices([live.tensor for live in modules.tensors.values() if live.persistent])
    if len(devices) > 1:
        devices = _devices([one.tensor for one in modules.tensors.values() if one.persistent and one.tensor.ndim > 0])
    if len(devices) > 1:
        raise OptionError(
            f"Multiple devices found: {listing(map(str, devices))}. Whole state dicts are loaded into models on one."
        )
    return devices.pop() if devices else None if world is None else world.device


def _devices(tensors: Sequence[Any]) -> set[torch.device]:
    found = {getattr(tensor, "_local_tensor", tensor).device for tensor in tensors}
    return found - {torch.device("meta")}


@frozen(eq=False)
class Plan:
    """What is to be done on this rank.

    Attributes:
        fit: What goes where.
        load: The load.
        for_code: What code of modules' own wants of other ranks, or in another form.
        others: What else is wanted so.
        given: What rank 0 has for all, in the form in which any rank wants it; ``None`` if each has its own.
    """

    fit: Fit
    load: ModelLoad
    for_code: Meetings
    others: Meetings
    given: RankZero | None = None

    @classmethod
    def of(
        cls, modules: Modules, state: Mapping[str, Any], options: StateDictOptions, known: Sequence[Meeting]
    ) -> Plan:
        """Compare a state dict with a model, and plan the load: values are taken as ``load_state_dict`` takes them.

        Args:
            modules: The model.
            state: Values by name.
            options: How whole, and from whom.
            known: Who may meet for values that come from other ranks.
        """
        world, whole = default_world(), options.full_state_dict
        from_zero = options.broadcast_from_rank0 and world is not None
        state = deferred(state)
        fit = fit_model(modules, expected_names(modules, options), state, whole=whole)
        zero = _tensors_of(state) if from_zero else None
        leaves = _leaves(fit, state, zero)
        rules = Rules(dtype="target", device=_device(modules, world) if whole else None, as_given=True)
        metadata = getattr(state, "_metadata", None)
        outline = Outline(leaves, leaves, {})
        fit.errors.extend([problem.message for problem in unwritable(outline, modules, fit.match, rules)])
        load = ModelLoad(modules, rules, outline, fit.match, metadata, fit.beyond)
        load.wish()
        plan = cls(fit, load, Meetings(known), Meetings(known), zero)
        if zero is None:  # else ranks ask for what any of them wants, see join()
            for meetings, wishes in zip((plan.for_code, plan.others), plan._wishes(), strict=True):
                for label, wish in wishes.items():
                    meetings.add(label, request_of(wish, load.state.node(wish.source)))
        return plan

    def _wishes(self) -> tuple[Mapping[str, Wish], Mapping[str, Wish]]:
        """Give what code of modules' own wants, and everything else."""
        load, wishes = self.load, self.load.wishes
        if not load.has_code:
            return {}, wishes
        wanted = {label: wish for label, wish in wishes.items() if load.is_for_code(label)}
        return wanted, {label: wish for label, wish in wishes.items() if label not in wanted}

    def join(self, verdict: Findings) -> None:
        """Let all ranks ask for what any of them wants of rank 0: models may differ. Collective, if it gives for all.

        Args:
            verdict: What all ranks found.
        """
        world = default_world()
        if self.given is None or world is None:
            return
        for meetings, wishes in zip((self.for_code, self.others), self._wishes(), strict=True):
            if meetings is self.for_code and not verdict.has_machines:
                continue
            node = partial(self._node, scalars=set(verdict.scalars)) if verdict.scalars else self.given.find
            are_alike = verdict.wishes is not None
            made = requests_of(wishes, node, world, "load_state_dict", are_alike=are_alike)
            meetings.add_all(made, every_rank())

    def _node(self, source: str, scalars: Collection[str]) -> Lazy | None:
        found = None if self.given is None else self.given.find(source)
        return found if found is None or source not in scalars else apply(SplitDim(0, ()), found)

    def findings(self, *, is_empty: bool) -> Findings:
        """Say what there is to say to other ranks."""
        found = self._found()
        found.errors = self.fit.errors
        found.collective = self.for_code.collective | self.others.collective
        if self.given is not None:
            found.wishes = b"".join(map(digest_of, self._wishes()))
            found.collective = {every_rank()} if self.load.wishes else set()
        found.is_empty, found.has_machines, found.scalars = is_empty, self.load.has_code, self.fit.scalars
        return found

    def _found(self, missing: Sequence[str] = (), unexpected: Sequence[str] = ()) -> Findings:
        beyond = [*self.fit.match.unexpected, *unexpected]
        return Findings(list(dict.fromkeys([*self.fit.match.missing, *missing])), beyond, beyond)

    def run_code(self) -> tuple[Findings, Exception | None]:
        """Let modules load that do so themselves, and say what they found, or what they raised."""
        try:
            return self._found(*self.load.run_code()), None
        except FdsdError as error:
            found = self._found()
            found.errors = [str(error)]
            return found, None
        except Exception as error:  # of an extra state
            return self._found(), error


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, TensorSpec) or is_exact(leaf)


def _tensors_of(state: Mapping[str, Any]) -> RankZero:
    """Give what rank 0 has for all, as lazy tensors that lie there."""
    return RankZero({name: leaf for name, leaf in state.items() if _is_tensor(leaf) and not is_extra(name)})


def _leaves(fit: Fit, state: Mapping[str, Any], zero: RankZero | None) -> Mapping[str, Any]:
    """Give what is loaded as leaves."""
    leaves = {source: state[source] for source in fit.match.loads.values()}
    if zero is not None:
        leaves = {name: leaf if (node := zero.find(name)) is None else node for name, leaf in leaves.items()}
    for name in fit.scalars:
        leaf = leaves[name]
        leaves[name] = leaf.reshape(()) if is_exact(leaf) else apply(SplitDim(0, ()), defer_leaf(leaf, name))
    return leaves


def warn_of_meta(modules: Modules) -> None:
    """Warn of tensors that a load has left without memory."""
    tensors = (*[live for live in modules.tensors.values() if live.tied_to is None], *modules.others)
    names = [live.fqn for live in tensors if _is_still_meta(live)]
    if names:
        warnings.warn(
            f"After the load, still on the meta device: {listing(names, sort=False)}. The state dict has nothing for "
            "them (non-persistent buffers are never in one). Give them memory and values before the model is used.",
            UserWarning,
            stacklevel=5,
        )


def _is_still_meta(live: LiveTensor) -> bool:
    now: Any = getattr(live.owner, live.name, None)
    return isinstance(now, torch.Tensor) and bool(getattr(now, "_local_tensor", now).is_meta)
