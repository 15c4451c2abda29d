"""Where in whose code an error arose: the line that a user can change comes first."""

from __future__ import annotations

import os
import sysconfig
import traceback

__all__ = ["place"]

_FDSD = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_MADE = ("<frozen ", "<attrs generated ")
"""How the names of files begin that are none."""


def place(error: BaseException, file: str | None = None) -> str:
    """Name the file and line where an error arose.

    Args:
        error: What was raised.
        file: A file that is the user's, wherever it lies.

    Returns:
        The deepest line in code that is neither fdsd's, Python's nor installed, or in ``file``; else in code that is
        not fdsd's or Python's; else of all.

    >>> try:
    ...     raise ValueError
    ... except ValueError as error:
    ...     place(error).endswith(", line 2")
    True
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_MADE)]
    paths = sysconfig.get_paths()
    installed = tuple([paths[key] + os.sep for key in ("purelib", "platlib")])
    python = (paths["stdlib"] + os.sep, paths["platstdlib"] + os.sep)
    outside = [f for f in frames if not f.filename.startswith(_FDSD)]
    theirs = [f for f in outside if not f.filename.startswith(installed)]
    own = [f for f in frames if f.filename == file or (f in theirs and not f.filename.startswith(python))]
    last = (own or theirs or outside or frames)[-1]
    return f"{last.filename}, line {last.lineno}"
