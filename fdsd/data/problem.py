"""`Problem`: one thing that is wrong with a rewrite, as data, so that all can be told at once.

Finding problems lives where names are matched and specs are checked; raising them lives in the verbs.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from fdsd.data.errors import (
    BadPattern,
    FdsdError,
    IncompleteGroup,
    NameConflict,
    NotInvertible,
    SpecMismatch,
    UnknownName,
    Unsupported,
)

__all__ = ["Problem", "describe"]

# An error that came from elsewhere is of the first kind that has its class.
_ERRORS: dict[str, type[FdsdError]] = {
    "unmatched rule": UnknownName,
    "shadowed rule": UnknownName,
    "collision": NameConflict,
    "bad target": NameConflict,
    "two patterns": NameConflict,
    "partial group": IncompleteGroup,
    "ragged indices": IncompleteGroup,
    "round trip": NotInvertible,
    "missing": UnknownName,
    "unexpected": UnknownName,
    "spec": SpecMismatch,
    "unsupported": Unsupported,
    "pattern": BadPattern,
}


@frozen
class Problem:
    """What is wrong: its kind, a sentence with the remedy, the names concerned and the rule's place, if any.

    >>> Problem("collision", "2 names map to 'a': 'x', 'y'.", ("x", "y")).error.__name__
    'NameConflict'
    """

    kind: str
    message: str
    names: tuple[str, ...] = ()
    rule: int | None = None

    @classmethod
    def of(cls, error: FdsdError, names: Iterable[str] = ()) -> Problem:
        """Turn an error about some names into a problem.

        >>> Problem.of(SpecMismatch("shapes differ"), ["x"])
        Problem(kind='spec', message='shapes differ', names=('x',), rule=None)
        """
        kind = next((kind for kind, found in _ERRORS.items() if isinstance(error, found)), "other")
        return cls(kind, str(error), tuple(names))

    @property
    def error(self) -> type[FdsdError]:
        """The class of the error that a verb raises for it."""
        return _ERRORS.get(self.kind, FdsdError)


def describe(problems: Iterable[Problem], *, limit: int = 10) -> str:
    """Word problems one after another: at most ``limit``, the rest counted.

    >>> describe([Problem("collision", f"{i} is wrong.") for i in range(3)], limit=2)
    '0 is wrong. 1 is wrong. And 1 more.'
    """
    every = list(problems)
    rest = len(every) - limit
    shown = " ".join(problem.message for problem in every[:limit])
    return f"{shown} And {rest} more." if rest > 0 else shown
