"""What verbs that join and divide tensors share: putting what comes where the first of what goes stood."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fdsd.algebra.apply import Applier
from fdsd.data.errors import NotInvertible, SpecMismatch
from fdsd.data.problem import Problem, describe
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.data.template import Template, as_template
from fdsd.pipeline.rewrite import UNKNOWN, Assign, Rewrite, Scope, keep

__all__ = [
    "as_dim",
    "call",
    "refuse_unless_undone",
    "regroup",
    "require_spec",
    "templates",
    "templates_text",
    "unknown",
]


def regroup(
    scope: Scope, gone: Iterable[str], comes: Mapping[int, Sequence[Assign]], problems: Iterable[Problem]
) -> Rewrite:
    """Replace names: at each position what comes there, and the names that stay where they are."""
    leaves = set(gone)
    assigns: list[Assign] = []
    for at, name in enumerate(scope.names):
        if at in comes:
            assigns.extend(comes[at])
        elif name not in leaves:
            assigns.append(keep(name))
    return Rewrite.of(assigns, problems)


def unknown(_applier: Applier, _values: Sequence[Any]) -> Any:
    """Build what cannot be built, since a part of it is missing."""
    return UNKNOWN


def require_spec(leaf: Any, verb: str) -> TensorSpec:
    """Give the spec of a leaf that a verb rearranges."""
    spec = spec_of(leaf)
    if spec is None:
        raise SpecMismatch(f"{verb} rearranges tensors, not {type(leaf).__name__}. Leave this entry out by name.")
    return spec


def as_dim(dim: int, spec: TensorSpec, verb: str, *, extra: int = 0) -> int:
    """Count a dim from the front; ``extra`` is 1 for a new dim."""
    ndim = spec.ndim + extra
    if not -ndim <= dim < ndim:
        raise SpecMismatch(f"{verb}: there is no dim {dim} in shape {spec.shape}, which has {spec.ndim} dims.")
    return dim % ndim


def templates(patterns: Iterable[str | Template]) -> tuple[Template, ...]:
    """Read several patterns; one alone is given in a list too."""
    if isinstance(patterns, str | Template):
        patterns = [patterns]
    return tuple([as_template(pattern) for pattern in patterns])


def templates_text(patterns: Iterable[Template]) -> str:
    """Give the source text of several patterns."""
    return repr([pattern.text for pattern in patterns])


def call(verb: str, positional: Sequence[str], **named: Any) -> str:
    """Give the source text of a call; arguments that are ``None`` or equal their default are left out by the caller."""
    texts = [*positional, *[f"{key}={value!r}" for key, value in named.items()]]
    return f"{verb}({', '.join(texts)})"


def refuse_unless_undone(verb: str, problems: Sequence[Problem]) -> None:
    """Raise if names show that an inverse would not undo a step."""
    if problems:
        raise NotInvertible(f"{verb}: {describe(problems)}")
