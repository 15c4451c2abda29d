"""Functions of several states: ``average`` and ``lerp``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from fdsd.algebra.apply import Applier
from fdsd.algebra.lazy import Op
from fdsd.algebra.ops import Average, Lerp, Same
from fdsd.data.errors import FdsdError, NameConflict, SpecMismatch, Unsupported, listing, plural
from fdsd.data.optim import OptimState
from fdsd.data.problem import Problem, describe
from fdsd.data.spec import spec_of
from fdsd.data.statedict import Kind, StateDict, as_mapping, require_mapping
from fdsd.data.train import TrainState
from fdsd.data.values import same_value
from fdsd.transforms.regroup import said_once, shown

__all__ = ["average", "joint_history", "joint_kind", "lerp"]


def average(states: Iterable[Mapping[str, Any]], weights: Iterable[float] | None = None) -> StateDict[Any]:
    """Average states name by name.

    Args:
        states: One state or more, with the same names, shapes and dtypes.
        weights: One weight for each state, used as given. Without them, the mean: the sum, divided once.

    Returns:
        The weighted sums, added in order in float32 (float64 for float64) and rounded once. What is no floating
        tensor (step counts, masks, extra state) must be equal everywhere, and is passed on. The steps that made all
        states alike are kept for ``save`` to record.

    Raises:
        NameConflict: The names differ.
        SpecMismatch: There are no states, weights are no numbers or not one for each, shapes or dtypes differ, or
            entries that cannot be averaged are unequal.
        Unsupported: A state is no mapping, or there is no list of them.

    Law: ``average([s] * n)`` equals ``s`` for every ``n``.

    >>> import torch
    >>> average([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])["w"]
    tensor([2.])
    """
    given = _states("average", _listed("states", states))
    if not given:
        raise SpecMismatch("average: there are no states; give one or more.")
    if weights is None:
        return _merge("average", given, Average())
    numbers = [_number("average", "each of weights", weight) for weight in _listed("weights", weights)]
    if len(numbers) != len(given):
        raise SpecMismatch(
            f"average: {plural(len(numbers), 'weight')} for {plural(len(given), 'state')}; give one for each."
        )
    return _merge("average", given, Average(tuple(numbers)))


def _listed(name: str, values: Any) -> list[Any]:
    """Read what is given one after the other; a mapping alone is a slip."""
    if isinstance(values, str) or as_mapping(values) is not None or not hasattr(values, "__iter__"):
        raise Unsupported(f"average: {name} are given in a list, not as {type(values).__name__}.")
    return list(values)


def lerp(a: Mapping[str, Any], b: Mapping[str, Any], weight: float) -> StateDict[Any]:
    """Interpolate between two states name by name: ``a`` at weight 0, ``b`` at weight 1.

    With ``a`` the running average and ``b`` the model, weight ``1 - decay`` is one step of an EMA.

    Args:
        a: A state.
        b: Another, with the same names, shapes and dtypes.
        weight: Where between them; beyond 0 and 1 it extrapolates.

    Returns:
        ``a + weight * (b - a)``, computed in float32 (float64 for float64) and rounded once. What is no floating
        tensor must be equal in both, and is passed on.

    Raises:
        NameConflict: The names differ.
        SpecMismatch: ``weight`` is no number, shapes or dtypes differ, or entries that are no floats are unequal.
        Unsupported: A state is no mapping.

    Law: ``lerp(s, s, weight)`` equals ``s``; at weight 0 and 1 the result is exactly ``a`` and ``b``.

    >>> import torch
    >>> lerp({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, 0.25)["w"]
    tensor([1.5000])
    """
    return _merge("lerp", _states("lerp", [a, b]), Lerp(_number("lerp", "weight", weight)))


def joint_history(states: Iterable[StateDict[Any]]) -> tuple[Any, ...]:
    """Give the steps that made all of some states alike: what their histories begin with; fresh ones have none."""
    known = [state.history for state in states if state.history]
    if not known:
        return ()
    shortest = min(known, key=len)
    length = next((k for k, step in enumerate(shortest) if any(history[k] != step for history in known)), len(shortest))
    return shortest[:length]


def joint_kind(states: Iterable[StateDict[Any]]) -> Kind:
    """Give the kind of a state joined of several, for the case that there are no tensors to tell it."""
    kinds = {state.kind for state in states}
    return "abstract" if "abstract" in kinds else "lazy" if "lazy" in kinds else "exact"


def _states(verb: str, states: Iterable[Any]) -> list[StateDict[Any]]:
    """Read states, each a mapping of names to leaves."""
    given: list[StateDict[Any]] = []
    for number, state in enumerate(states, start=1):
        if isinstance(state, OptimState | TrainState):
            part = "one column, state.slots[slot]" if isinstance(state, OptimState) else "state.model"
            raise Unsupported(f"{verb}: state {number} is of class {type(state).__name__}; give {part}.")
        given.append(StateDict(require_mapping(state, f"{verb}: state {number}")))
    return given


def _number(verb: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SpecMismatch(f"{verb}: {name} is a number, not {shown(value)}.")
    return float(value)


def _merge(verb: str, states: Sequence[StateDict[Any]], op: Op) -> StateDict[Any]:
    first = states[0]
    _check_names(verb, states)
    applier = Applier()
    made: dict[str, Any] = {}
    problems: list[Problem] = []
    for name in first:
        try:
            with said_once(verb):
                made[name] = _merge_leaf(verb, name, [state[name] for state in states], op, applier)
        except FdsdError as error:
            problems.append(Problem("spec", f"{name!r}: {error}", (name,)))
    if problems:
        raise SpecMismatch(f"{verb}: {describe(problems)}")
    return StateDict.trusted(made, first.metadata, joint_history(states), joint_kind(states))


def _check_names(verb: str, states: Sequence[Mapping[str, Any]]) -> None:
    first = states[0]
    for number, state in enumerate(states[1:], start=2):
        missing = [name for name in first if name not in state]
        extra = [name for name in state if name not in first]
        if missing or extra:
            parts = [f"state {number} lacks {listing(missing)}"] if missing else []
            parts += [f"state {number} has {listing(extra)} beyond the first"] if extra else []
            raise NameConflict(f"{verb}: {'; '.join(parts)}. All states must have the same names; use select().")


def _merge_leaf(verb: str, name: str, leaves: Sequence[Any], op: Op, applier: Callable[..., Any]) -> Any:
    found = [spec_of(leaf) for leaf in leaves]
    if all(spec is None for spec in found):
        if not all(same_value(leaves[0], leaf) for leaf in leaves[1:]):
            raise SpecMismatch("entries that are no tensors differ; drop them first.")
        return leaves[0]
    spec = found[0]
    if spec is not None and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        texts = tuple([f"{name} of state {number}" for number in range(1, len(leaves) + 1)])
        return applier(Same(texts, verb), *leaves)
    return applier(op, *leaves)
