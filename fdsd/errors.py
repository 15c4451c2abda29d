"""The public home of fdsd's errors."""

from fdsd.data.errors import (
    BadFile,
    BadPattern,
    DestinationExists,
    DiskError,
    FdsdError,
    IncompleteGroup,
    LazyError,
    MissingFile,
    NameConflict,
    NotInvertible,
    OverBudget,
    RankDisagreement,
    SpecMismatch,
    UnknownName,
    UnsafeFile,
    Unsupported,
)

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
    "SpecMismatch",
    "UnknownName",
    "UnsafeFile",
    "Unsupported",
]
