"""Functions of several states: ``average`` and ``lerp``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fdsd.algebra.apply import Applier
from fdsd.algebra.lazy import Op
from fdsd.algebra.ops import Average, Lerp, Same
from fdsd.data.errors import FdsdError, NameConflict, SpecMismatch, listing
from fdsd.data.spec import spec_of
from fdsd.data.statedict import StateDict, same_leaf

__all__ = ["average", "lerp"]


def average(states: Sequence[Mapping[str, Any]], weights: Sequence[float] | None = None) -> StateDict[Any]:
    """Average states name by name.

    Args:
        states: One state or more, with the same names, shapes and dtypes.
        weights: One weight for each state, used as given; equal ones that add up to 1 by default.

    Returns:
        The weighted sums, added in order in float32 (float64 for float64) and rounded once. What is no floating
        tensor (step counts, masks, extra state) must be equal everywhere, and is passed on.

    Raises:
        NameConflict: The names differ.
        SpecMismatch: Shapes or dtypes differ, or entries that cannot be averaged are unequal.

    >>> import torch
    >>> average([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])["w"]
    tensor([2.])
    """
    if not states:
        raise SpecMismatch("average: there are no states; give one or more.")
    given = [1 / len(states)] * len(states) if weights is None else [float(weight) for weight in weights]
    if len(given) != len(states):
        raise SpecMismatch(f"average: {len(given)} weights for {len(states)} states; give one for each.")
    return _merge("average", states, Average(tuple(given)))


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

    >>> import torch
    >>> lerp({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, 0.25)["w"]
    tensor([1.5000])
    """
    return _merge("lerp", [a, b], Lerp(float(weight)))


def _merge(verb: str, states: Sequence[Mapping[str, Any]], op: Op) -> StateDict[Any]:
    first = states[0]
    _check_names(verb, states)
    applier = Applier()
    made: dict[str, Any] = {}
    problems: list[str] = []
    for name in first:
        try:
            made[name] = _merge_leaf(verb, name, [state[name] for state in states], op, applier)
        except FdsdError as error:
            problems.append(f"{name!r}: {error}")
    if problems:
        more = f" And {len(problems) - 10} more." if len(problems) > 10 else ""
        raise SpecMismatch(f"{verb}: {' '.join(problems[:10])}{more}")
    return StateDict.trusted(made, getattr(first, "_metadata", None))


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
        if not all(same_leaf(leaves[0], leaf) for leaf in leaves[1:]):
            raise SpecMismatch("entries that are no tensors differ; drop them first.")
        return leaves[0]
    spec = found[0]
    if spec is not None and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        texts = tuple([f"{name} of state {number}" for number in range(1, len(leaves) + 1)])
        return applier(Same(texts, verb), *leaves)
    return applier(op, *leaves)
