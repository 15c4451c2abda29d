"""Making the leaves of a rewrite, and collecting what cannot be made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from fdsd.algebra.apply import Applier
from fdsd.data.errors import FdsdError, add_note
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.pipeline.rewrite import UNKNOWN, Assign, Rewrite

__all__ = ["build_leaf", "build_leaves"]


def build_leaves(rewrite: Rewrite, leaves: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Make the leaves of a rewrite; what cannot be made is a problem, and ``UNKNOWN`` in its place."""
    applier = Applier()
    made: dict[str, Any] = {}
    for assign in rewrite.assigns:
        if assign.build is None:
            made[assign.target] = leaves[assign.sources[0]]
        else:
            made[assign.target] = build_leaf(
                applier, assign, [leaves[name] for name in (*assign.sources, *assign.beside)], problems
            )
    _tie_specs(rewrite, made)
    return made


def _tie_specs(rewrite: Rewrite, made: dict[str, Any]) -> None:
    """Mark specs that have a further name now as tied; of tensors, identity tells it."""
    for assign in rewrite.assigns:
        spec, owner = made[assign.target], assign.sources[0] if assign.sources else ""
        if assign.alias and isinstance(spec, TensorSpec) and isinstance(kept := made.get(owner), TensorSpec):
            token = object() if kept.tie is None else kept.tie
            made[owner] = made[assign.target] = evolve(kept, tie=token)


def build_leaf(applier: Applier, assign: Assign, values: list[Any], problems: list[Problem]) -> Any:
    """Make one leaf."""
    assert assign.build is not None
    if any(value is UNKNOWN for value in values):
        return UNKNOWN
    try:
        return assign.build(applier, values)
    except FdsdError as error:
        sources = [f"{n!r} {_text(v)}" for n, v in zip(assign.sources[:10], values, strict=False)]
        more = f" and {len(values) - 10} more" if len(values) > 10 else ""
        from_text = f" from {', '.join(sources)}{more}" if sources else ""
        problem = Problem.of(error, (assign.target, *assign.sources))
        message = f"making {assign.target!r}{from_text}: {problem.message}"
        problems.append(Problem(problem.kind, message, problem.names))
        return UNKNOWN
    except Exception as error:  # a user's function failed: its own error goes on, and says for which tensor
        add_note(error, f"while making {assign.target!r} from {', '.join(map(repr, assign.sources[:10]))}")
        raise


def _text(value: Any) -> str:
    spec = spec_of(value)
    return type(value).__name__ if spec is None else str(spec)
