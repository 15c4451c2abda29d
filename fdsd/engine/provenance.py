"""What a file says of how it was made: the pipeline, and the files that it was made of.

Texts for the metadata of files; nothing here writes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import Origin
from fdsd.data.sizes import format_size
from fdsd.pipeline.pipeline import Pipeline
from fdsd.storage.files import Extent

__all__ = ["capped", "provenance"]

_MOST = 64_000
"""Bytes of a pipeline's text that are recorded: every file of a checkpoint has them in its header."""


def provenance(state: Mapping[str, Any], leaves: Iterable[Any], extents: Iterable[Extent]) -> dict[str, str]:
    """Say which pipeline made a state, and of which files.

    Args:
        state: The state.
        leaves: Its leaves.
        extents: Bytes of files that are known to be among the sources already; leaves of these may be left out.
    """
    made: dict[str, str] = {}
    history = getattr(state, "history", ())
    if history:
        made["fdsd.pipeline"] = capped(repr(Pipeline(history)))
    files = _files(leaves, extents)
    if files:
        made["fdsd.sources"] = json.dumps(files)
    return made


def capped(text: str, most: int = _MOST) -> str:
    """Leave out the end of a text that is too long, and say how much is left out.

    >>> capped("short"), capped("0123456789", 4)
    ('short', '0123 ... (the last 6 B of 10 B are left out)')
    """
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) <= most:
        return text
    kept = raw[:most].decode("utf-8", "ignore")
    left = len(raw) - len(kept.encode())
    return f"{kept} ... (the last {format_size(left)} of {format_size(len(raw))} are left out)"


def _files(leaves: Iterable[Any], extents: Iterable[Extent]) -> list[dict[str, Any]]:
    found: dict[str, int] = {}
    for extent in extents:
        if extent.path not in found:
            found[extent.path] = extent.stamp.size
    seen: set[int] = set()
    stack = [leaf for leaf in leaves if isinstance(leaf, Lazy)]
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            stack.extend(node.inputs)
            give = getattr(node.op.source, "file", None) if isinstance(node.op, Origin) else None
            if give is not None and isinstance(node.op, Origin):
                path, stamp = give(node.op.fqn)
                found[path] = stamp.size
    return [{"name": os.path.basename(path), "size": size} for path, size in sorted(found.items())]
