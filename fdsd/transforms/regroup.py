"""What verbs share: reading arguments, wording calls, and putting what comes where the first of what goes stood.

No verb lives here, and nothing that knows one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fdsd.algebra.apply import Applier
from fdsd.data.errors import BadPattern, FdsdError, NotInvertible, SpecMismatch, plural
from fdsd.data.problem import Problem, describe
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.data.template import Template, as_template
from fdsd.pipeline.rewrite import UNKNOWN, Assign, Rewrite, Scope, keep

__all__ = [
    "as_dim",
    "as_int",
    "as_ints",
    "as_pattern",
    "call",
    "number_text",
    "optional_int",
    "optional_ints",
    "refuse_unless_undone",
    "regroup",
    "require_spec",
    "said_once",
    "shown",
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


def require_spec(leaf: Any) -> TensorSpec:
    """Give the spec of a leaf that has to be a tensor."""
    spec = spec_of(leaf)
    if spec is None:
        raise SpecMismatch(f"this works on tensors, not on {type(leaf).__name__}. Leave such entries out by name.")
    return spec


def as_dim(dim: int, spec: TensorSpec, *, extra: int = 0) -> int:
    """Count a dim from the front; ``extra`` is 1 for a new dim."""
    ndim = spec.ndim + extra
    if not -ndim <= dim < ndim:
        raise SpecMismatch(f"there is no dim {dim} in shape {spec.shape}, which has {plural(spec.ndim, 'dim')}.")
    return dim % ndim


def shown(value: object) -> str:
    """Show what was given in the place of an argument, cut if it is long.

    >>> shown("w"), len(shown(range(10**9))), len(shown([7] * 100))
    ("'w'", 20, 60)
    """
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def as_int(verb: str, name: str, value: Any) -> int:
    """Read a whole number: an ``int``, or what counts as one (of NumPy, or a tensor without dims), but no truth value.

    Args:
        verb: The verb that was called.
        name: The name of its argument.
        value: What was given for it.

    Raises:
        SpecMismatch: It is no whole number.

    >>> as_int("stack", "dim", torch.tensor(3))
    3
    """
    is_scalar = not isinstance(value, torch.Tensor) or (value.ndim == 0 and value.dtype is not torch.bool)
    if isinstance(value, bool) or not is_scalar:
        raise SpecMismatch(f"{verb}: {name} is a whole number, not {shown(value)}.")
    try:
        return operator.index(value)
    except TypeError:
        raise SpecMismatch(f"{verb}: {name} is a whole number, not {shown(value)}.") from None


def as_ints(verb: str, name: str, values: Any) -> tuple[int, ...]:
    """Read whole numbers in order, such as a shape; see ``as_int``.

    Raises:
        SpecMismatch: They are no sequence of whole numbers.

    >>> as_ints("reshape", "shape", [2, 3])
    (2, 3)
    """
    refusal = f"{verb}: {name} is given as several whole numbers, such as (0, 1), not as {shown(values)}."
    if isinstance(values, str | bytes | set | frozenset | Mapping):
        raise SpecMismatch(refusal)
    try:
        items: list[Any] = list(values)
    except TypeError:
        raise SpecMismatch(refusal) from None
    return tuple([as_int(verb, f"each of {name}", item) for item in items])


def optional_int(verb: str, name: str, value: Any) -> int | None:
    """Read a whole number that may be left out."""
    return None if value is None else as_int(verb, name, value)


def optional_ints(verb: str, name: str, values: Any) -> tuple[int, ...] | None:
    """Read whole numbers that may be left out."""
    return None if values is None else as_ints(verb, name, values)


def as_pattern(verb: str, name: str, value: Any) -> Template:
    """Read one pattern.

    Raises:
        BadPattern: It is none.
    """
    if not isinstance(value, str | Template):
        raise BadPattern(f"{verb}: {name} is a pattern of names, a str, not {shown(value)}.")
    return as_template(value)


def templates(verb: str, name: str, patterns: Any) -> tuple[Template, ...]:
    """Read several patterns; one alone may stand without a list.

    Raises:
        BadPattern: One of them is none.
    """
    given: Any = [patterns] if isinstance(patterns, str | Template) else patterns
    if isinstance(given, bytes | set | frozenset) or not hasattr(given, "__iter__"):
        raise BadPattern(f"{verb}: {name} are patterns of names in a list, in order, not {type(patterns).__name__}.")
    return tuple([as_pattern(verb, f"each of {name}", pattern) for pattern in given])


def templates_text(patterns: Iterable[Template]) -> str:
    """Give the source text of several patterns."""
    return repr([pattern.text for pattern in patterns])


@contextmanager
def said_once(verb: str) -> Generator[None]:
    """Take the verb off the beginning of errors: who runs the step puts it there, once for all problems."""
    try:
        yield
    except FdsdError as error:
        error.args = (str(error).removeprefix(f"{verb}: "),)
        raise


def call(verb: str, positional: Sequence[str], **named: Any) -> str:
    """Give the source text of a call; arguments that are ``None`` or equal their default are left out by the caller."""
    texts = [*positional, *[f"{key}={value!r}" for key, value in named.items()]]
    return f"{verb}({', '.join(texts)})"


def number_text(value: complex) -> str:
    """Give the source text of a number, which need not be what is printed for it.

    >>> number_text(0.5), number_text(float("-inf")), number_text(-1j)
    ('0.5', "float('-inf')", 'complex(-0.0, -1.0)')
    """
    if isinstance(value, complex):
        return f"complex({number_text(value.real)}, {number_text(value.imag)})"
    return repr(value) if isinstance(value, int) or math.isfinite(value) else f"float({str(value)!r})"


def refuse_unless_undone(verb: str, problems: Sequence[Problem]) -> None:
    """Raise if names show that an inverse would not undo a step."""
    if problems:
        raise NotInvertible(f"{verb}: {describe(problems)}")
