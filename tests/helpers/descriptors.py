"""Descriptors of this process: those of files below a folder, since others come and go as garbage is collected."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["descriptors_below"]


def descriptors_below(folder: Path) -> int:
    """How many descriptors are open on files below ``folder``, removed ones included."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith(f"{folder.resolve()}{os.sep}")
    return found
