"""Byte counts as people write and read them."""

from __future__ import annotations

import re

from fdsd.data.errors import SpecMismatch

__all__ = ["format_size", "parse_size"]

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGTP", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


def parse_size(size: int | str) -> int:
    """Read a byte count: an integer, or a number with a unit of thousands (``MB``) or 1024s (``MiB``).

    Raises:
        SpecMismatch: It is no size, or negative.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(12)
    (5000000000, 1572864, 12)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise SpecMismatch(f"A size is 0 or more bytes, not {size}.")
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size) if isinstance(size, str) else None
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise SpecMismatch(f"{size!r} is no size. Write a number of bytes, or like '5GB', '500MB', '1GiB'.")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


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
