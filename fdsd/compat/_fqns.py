"""From a name within wrapped modules to the name in the model itself, segment by segment.

Values, optimizers and process groups are unknown here.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from fdsd.comms.wrappers import EXTRA_STATE, wrapped_as
from fdsd.compat._errors import LoadError
from fdsd.data.errors import UnknownName

__all__ = ["FLAT_PARAM", "WRAPPER_SEGMENTS", "get_fqns", "prefix_of"]

FLAT_PARAM = "_flat_param"
WRAPPER_SEGMENTS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def get_fqns(model: nn.Module, name: str, modifiers: str, dropped: frozenset[str]) -> set[str]:
    """Give the name in the unwrapped model; for a flat parameter of FSDP1 the names that it is made of.

    Args:
        model: The model, wrapped in any way.
        name: A name in it, with the segments of wrappers or without.
        modifiers: The name of a method that says which child a shown name stands for.
        dropped: The segments of wrappers that go; others stay.

    Raises:
        UnknownName: A segment is no attribute.
        LoadError: ``_extra_state`` is not the last segment.
    """
    segments = name.split(".")
    if len(segments) == 1:
        return {name}
    kept: list[str] = []
    at: Any = model
    for i, segment in enumerate(segments):
        if segment == FLAT_PARAM and (flat := getattr(at, FLAT_PARAM, None)) is not None:
            return {".".join([*kept, fqn]) for fqn in flat._fqns}
        while isinstance(at, nn.Module) and (inner := wrapped_as(type(at))) not in (None, segment):
            at = getattr(at, str(inner))
        if isinstance(at, nn.Module) and segment == wrapped_as(type(at)):
            at = getattr(at, segment)
            kept += [] if segment in dropped else [segment]
            continue
        if segment == EXTRA_STATE and i != len(segments) - 1:
            raise LoadError(f"Expect `_extra_state` to be the last obj name, and the name is {name!r}.")
        kept.append(segment)
        at = None if segment == EXTRA_STATE else _child(model, name, at, segment, modifiers)
    return {".".join(kept)}


def _child(model: nn.Module, name: str, at: Any, segment: str, modifiers: str) -> Any:
    shown: Any = getattr(at, modifiers, None)
    children: Any = cast("Any", shown()) if callable(shown) else {}
    real: str | None = children.get(segment)
    for candidate in (real, segment):
        if candidate is not None and hasattr(at, candidate):
            return getattr(at, candidate)
    raise UnknownName(
        f"_get_fqns: {name!r} is no name in this {type(model).__name__}: {type(at).__name__} has no {segment!r}."
    )


def prefix_of(model: nn.Module, path: str, modifiers: str) -> str:
    """Give the prefix of the names at and below a module whose path may have the segments of wrappers."""
    if not path:
        return ""
    # with a segment behind, since a name without a dot stays as it is
    [name] = get_fqns(model, f"{path}.{EXTRA_STATE}", modifiers, WRAPPER_SEGMENTS)
    return name.removesuffix(EXTRA_STATE)
