"""Byte counts as people write and read them."""

from __future__ import annotations

import operator
import re
from typing import SupportsIndex

from fdsd.data.errors import SpecMismatch

__all__ = ["format_size", "parse_size"]

_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGTP", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


def parse_size(size: str | SupportsIndex, what: str = "size", *, least: int = 0) -> int:
    """Read a byte count: a whole number, or text such as ``"5GB"`` (10**9 bytes each) or ``"1.5 GiB"`` (2**30).

    Args:
        size: The size.
        what: The argument's name, for messages.
        least: The least that makes sense.

    Raises:
        SpecMismatch: It is no size, or below ``least``.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(12)
    (5000000000, 1572864, 12)
    """
    count = _count(size)
    if count is None or count < least:
        above = f"{least} or more" if least != 1 else "above 0"
        raise SpecMismatch(
            f"{what}={size!r} is no size; write a number of bytes, {above}, or text such as '5GB', '500MB', '1.5GiB'."
        )
    return count


def _count(size: str | SupportsIndex) -> int | None:
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]{1,15})(?:\.([0-9]{1,15}))?\s*([A-Za-z]*)\s*", size, re.ASCII)
        unit = None if match is None else _UNITS.get(match[3].upper())
        if match is None or unit is None:
            return None
        part = match[2] or "0"  # whole numbers all along: floats would round
        count: int = int(match[1]) * unit + int(part) * unit // 10 ** len(part)
        return count
    if isinstance(size, bool) or not isinstance(size, SupportsIndex):
        return None
    try:
        return operator.index(size)
    except TypeError:  # a tensor of several elements
        return None


def format_size(count: int) -> str:
    """Word a byte count.

    >>> format_size(512), format_size(90_868_376)
    ('512 B', '90.9 MB')
    """
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000
        if value < 999.95 or unit == "PB":
            break
    return f"{value:.1f} {unit}"
