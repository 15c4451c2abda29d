"""The errors that a user of fdsd can meet, and the helpers that word them.

Every error says what was asked, what is wrong (all offenders, sorted, at most ten shown and the rest
counted) and the remedy. Each class also derives from the builtin that users of PyTorch would catch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

__all__ = [
    "BadFile",
    "BadPattern",
    "DestinationExists",
    "DiskError",
    "FdsdError",
    "IncompleteGroup",
    "LazyError",
    "MissingFile",
    "NameConflict",
    "NotInvertible",
    "OverBudget",
    "RankDisagreement",
    "RanksLost",
    "SpecMismatch",
    "UnknownName",
    "UnsafeFile",
    "Unsupported",
]


class FdsdError(Exception):
    """Base of all errors that fdsd raises on purpose."""

    def __str__(self) -> str:  # KeyError would show its argument's repr
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


class NotInvertible(FdsdError, ValueError):
    """A step has no inverse, or needs an argument (named in the message) to have one."""


class NameConflict(FdsdError, ValueError):
    """Two tensors would have one name."""


class IncompleteGroup(FdsdError, KeyError):
    """A group of tensors that belong together has holes, strays or partners that are missing."""


class UnknownName(FdsdError, KeyError):
    """A name, or a rule, that matches nothing."""


class BadPattern(FdsdError, ValueError):
    """A pattern that is not well-formed, or a pair of patterns that do not fit each other."""


class SpecMismatch(FdsdError, ValueError, RuntimeError):
    """Shapes or dtypes do not fit what was asked."""


class Unsupported(FdsdError, TypeError):
    """A leaf, dtype or kind of state that an operation refuses, with the reason."""


class LazyError(FdsdError, TypeError, AttributeError):
    """A lazy tensor was used as if its data were here; the message names ``materialize``."""


class OverBudget(FdsdError, RuntimeError):
    """An operation cannot run within the byte budget; the message names the budget that it needs."""


class RankDisagreement(FdsdError, RuntimeError):
    """Ranks of one group hold or want different things."""


class RanksLost(FdsdError, RuntimeError):
    """Ranks of a group ended or cannot be reached; the message names them, and what is undefined now."""


class BadFile(FdsdError, ValueError):
    """A file that is truncated, corrupt or not of the expected format."""


class MissingFile(BadFile, FileNotFoundError):
    """A file or folder that is not there."""


class DiskError(FdsdError, OSError):
    """The system refused a file operation: a full disk, a missing permission, a fault of the device."""


class UnsafeFile(FdsdError, ValueError):
    """A file that asks to run code, or to reach outside its own folder."""


class DestinationExists(FdsdError, FileExistsError):
    """The destination exists, and ``overwrite=True`` was not given."""


def listing(items: Iterable[Any], *, limit: int = 10, sort: bool = True) -> str:
    """Word a list of offenders: sorted, at most ``limit`` shown, the rest counted.

    >>> listing(["b", "a"])
    "'a', 'b'"
    >>> listing(range(13), limit=3)
    '0, 1, 2 and 10 more'
    """
    values = list(items)
    if sort:
        values.sort(key=lambda v: v if isinstance(v, str) else repr(v)) if not all(
            isinstance(v, int) for v in values
        ) else values.sort()
    shown = ", ".join(repr(v) for v in values[:limit])
    rest = len(values) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


def plural(count: int, noun: str) -> str:
    """Word a count: ``1 name``, ``2 names``.

    >>> plural(1, "name"), plural(2, "name")
    ('1 name', '2 names')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def add_note(error: BaseException, note: str) -> None:
    """Attach a note to an error, on Python 3.10 as well."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__dict__.setdefault("__notes__", []).append(note)
