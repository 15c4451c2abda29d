"""Verbs between an optimizer's state and torch's flat form of it."""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import frozen

from fdsd.data.errors import Unsupported
from fdsd.data.flat_optim import flatten, unflatten
from fdsd.data.optim import OptimState
from fdsd.data.statedict import StateDict, as_mapping
from fdsd.pipeline.pipeline import Conversion
from fdsd.pipeline.step import Grade, Step
from fdsd.transforms.regroup import call

__all__ = ["flatten_optim", "unflatten_optim"]


@frozen
class FlattenOptim(Step):
    """See ``flatten_optim``."""

    verb: ClassVar[str] = "flatten_optim"

    @property
    def converts(self) -> bool:
        return True

    @property
    def grade(self) -> Grade:
        return Grade.ONE_SIDED

    def apply(self, state: Any) -> Any:
        if not isinstance(state, OptimState):
            raise Unsupported(
                f"flatten_optim: it takes an OptimState, not {type(state).__name__}. Give state.optim, or "
                "OptimState.from_torch(optimizer.state_dict(), fqns)."
            )
        return flatten(state)

    def invert(self) -> tuple[Step, ...]:
        return (UnflattenOptim(),)

    def call_text(self) -> str:
        return "flatten_optim()"


@frozen
class UnflattenOptim(Step):
    """See ``unflatten_optim``."""

    like: OptimState | None = None
    strict: bool = True
    verb: ClassVar[str] = "unflatten_optim"

    @property
    def converts(self) -> bool:
        return True

    @property
    def grade(self) -> Grade:
        return Grade.EXACT

    def apply(self, state: Any) -> Any:
        flat = as_mapping(state)
        if flat is None:
            raise Unsupported(f"unflatten_optim: it takes the flat form, a mapping, not {type(state).__name__}.")
        return unflatten(flat, self.like, strict=self.strict)

    def invert(self) -> tuple[Step, ...]:
        return (FlattenOptim(),)

    def call_text(self) -> str:
        like = [] if self.like is None else [repr(self.like)]
        return call(self.verb, like if self.strict else [*like, "strict=False"])


def flatten_optim() -> Conversion[OptimState, StateDict[Any]]:
    """Turn an optimizer's state into torch's flat form, ``state.<fqn>.<slot>`` and ``param_groups.<fqn>.<option>``.

    The rule: torch, ``torch.distributed.checkpoint.state_dict``, ``flatten_optimizer_state_dict``.

    Law: ``unflatten_optim(like=s)(flatten_optim()(s)) == s``.

    >>> from fdsd.data.optim import ParamGroup
    >>> state = OptimState({"step": {"w": 3}}, (ParamGroup(("w",), {"lr": 0.1}),))
    >>> flatten_optim()(state).to_dict()
    {'state.w.step': 3, 'param_groups.w.lr': 0.1}
    """
    return Conversion((FlattenOptim(),))


def unflatten_optim(like: OptimState | None = None, *, strict: bool = True) -> Conversion[StateDict[Any], OptimState]:
    """Turn torch's flat form back into an optimizer's state.

    Args:
        like: A state with the groups to restore, empty ones included. Without it, parameters with equal options
            form one group each, in order of first appearance.
        strict: With ``like``: whether the flat form must have every value of it, and no other names. Otherwise options
            that are missing keep the value of ``like``, and state that is missing stays uninitialised.

    Raises:
        Unsupported: ``like`` is no ``OptimState``.
        UnknownName: When run, strictly: values are missing, or names are unknown; all are named.
        NameConflict: When run: a flat name can be read in two ways; ``like`` tells which is meant.
        SpecMismatch: When run: parameters of one group of ``like`` have different options.

    Law: ``flatten_optim()(unflatten_optim()(flat)) == flat``.

    >>> unflatten_optim()(StateDict({"state.w.step": 3, "param_groups.w.lr": 0.1})).groups
    (ParamGroup(('w',), {'lr': 0.1}),)
    """
    given: Any = like
    if not isinstance(given, OptimState | None):
        raise Unsupported(
            f"unflatten_optim: like is an OptimState, not {type(given).__name__}. Give capture(model, optimizer).optim."
        )
    return Conversion((UnflattenOptim(like, strict),))
