"""The state of a training run as a value: the model, its optimizer, and whatever else was saved with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen

from fdsd.data.errors import Unsupported
from fdsd.data.optim import OptimState
from fdsd.data.statedict import StateDict
from fdsd.data.values import part_at, read_only, register, same_mapping

__all__ = ["TrainState"]


def _to_model(model: Mapping[str, Any]) -> StateDict[Any]:
    given: Any = model
    if not isinstance(given, Mapping):
        raise Unsupported(
            f"TrainState: model is a mapping from FQN to leaf, not {type(model).__name__}; "
            "for a module give model.state_dict()."
        )
    return model if isinstance(model, StateDict) else StateDict(model)


@frozen(eq=False)
class TrainState:
    """A model's state dict, the state of its optimizer, and what else belongs to a training run.

    Args:
        model: Any mapping from FQN to leaf; kept as a ``StateDict``.
        optim: The optimizer's state, or ``None``.
        extra: Anything else (``{"epoch": 3}``); read-only afterwards.

    Raises:
        Unsupported: ``optim`` is torch's own dict, or ``model`` a module.

    Equality: part by part, tensors by identity. In optree's namespace ``"fdsd"`` all three parts have leaves.

    >>> state = TrainState({"w": 1}, extra={"epoch": 3})
    >>> state.model["w"], state.optim, dict(state.extra)
    (1, None, {'epoch': 3})
    """

    model: StateDict[Any] = field(converter=_to_model)
    optim: OptimState | None = None
    extra: Mapping[str, Any] = field(factory=dict[str, Any], converter=read_only)

    def __attrs_post_init__(self) -> None:
        given: Any = self.optim
        if given is not None and not isinstance(given, OptimState):
            raise Unsupported(
                f"TrainState: optim is an OptimState or None, not {type(given).__name__}; "
                "OptimState.from_torch(osd, fqns) reads torch's dict."
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainState):
            return NotImplemented
        same = self.model == other.model and self.optim == other.optim
        return same and same_mapping(self.extra, other.extra)

    __hash__ = None  # type: ignore[assignment]  # leaves are compared, and tensors have no value hash

    def __reduce__(self) -> Any:
        return _rebuild, (self.model, self.optim, dict(self.extra))


def _rebuild(model: Any, optim: Any, extra: dict[str, Any]) -> TrainState:
    """Make a state without checks: optree may put any objects in."""
    made = TrainState.__new__(TrainState)
    object.__setattr__(made, "model", model)
    object.__setattr__(made, "optim", optim)
    object.__setattr__(made, "extra", read_only(extra))
    return made


def _flatten(state: TrainState) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    keys = tuple(state.extra)
    places = (("model",), ("optim",), *(("extra", key) for key in keys))
    return tuple([part_at(state, place) for place in places]), keys, places


def _unflatten(keys: tuple[Any, ...], children: Iterable[Any]) -> TrainState:
    model, optim, *values = children
    return _rebuild(model, optim, dict(zip(keys, values, strict=True)))


register(TrainState, _flatten, _unflatten)
