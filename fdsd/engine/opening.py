"""Opening checkpoints: every tensor lazy, nothing read but headers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fdsd.algebra.lazy import Lazy
from fdsd.algebra.ops import Origin
from fdsd.data.protocols import Source
from fdsd.data.statedict import StateDict
from fdsd.data.ties import tie_key
from fdsd.storage.formats import open_source

__all__ = ["open", "state_of"]


def open(path: str | os.PathLike[str], *, format: str | None = None, key: str | None = None) -> StateDict[Any]:
    """Open a checkpoint: names and lazy tensors, which are read when they are materialized or saved.

    Args:
        path: A safetensors file, an index or a folder of either (links are followed), or a torch file.
        format: ``"safetensors"`` or ``"torch"``; found out by default.
        key: Which state dict of a torch file that holds several, such as ``"model"`` or ``"state.model"``.

    Returns:
        A ``StateDict`` in the order of the file. Names that are tied in the file share one lazy tensor; entries that
        are no tensors are there as they are.

    Raises:
        BadFile: The file is missing, truncated, or breaks a rule of its format.
        UnsafeFile: It would run code, or reach outside its folder.
        UnknownName: There is no such key; the message lists them.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> save_file({"w": torch.ones(2, 3)}, path)
    >>> open(path)
    StateDict({
      'w': <Lazy float32[2, 3]>,
    })
    """
    source = open_source(path, format=format, key=key)
    return state_of(source)


def state_of(source: Source) -> StateDict[Any]:
    """Give the state of a source: a lazy tensor for each name, one for names that are tied."""
    made: dict[str, Any] = {}
    tied: dict[Any, Lazy] = {}
    found = source.specs()
    whole: Mapping[str, Any] = getattr(source, "state", found)  # a file may hold more than tensors
    for fqn, entry in whole.items():
        spec = found.get(fqn)
        if spec is None:
            made[fqn] = entry
        elif (key := tie_key(spec)) is None:
            made[fqn] = Lazy(Origin(source, fqn, spec), (), [spec])
        else:
            made[fqn] = tied.setdefault(key, Lazy(Origin(source, fqn, spec), (), [spec]))
    return StateDict.trusted(made, getattr(whole, "_metadata", None))
