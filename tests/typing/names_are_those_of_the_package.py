"""Public names are imported when they are first used; checkers see all of them, and no other."""

from __future__ import annotations

import fdsd
from fdsd import errors, transpose

version: str = fdsd.__version__
step: fdsd.Pipeline = transpose("w") >> fdsd.identity
error: type[fdsd.errors.FdsdError] = errors.NameConflict

fdsd.transpos("w")  # E: attr-defined / reportAttributeAccessIssue
