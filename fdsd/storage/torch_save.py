"""Writing files that ``torch.load`` reads: aside and renamed into place, each tensor with its own elements only.

Nothing here reads files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch

from fdsd.data.errors import DestinationExists
from fdsd.data.statedict import StateDict
from fdsd.data.ties import tie_key
from fdsd.storage.drafts import hidden_name, make_folder, mode_at, remove_folders, sync_folder
from fdsd.storage.files import DiskError, refuse

__all__ = ["compact", "save_torch"]


def compact(state: Mapping[str, Any]) -> dict[str, Any]:
    """Give the same leaves as plain tensors that hold no more memory than their own elements.

    Args:
        state: Names to tensors and other objects.

    Returns:
        A dict of detached tensors, carrying ``_metadata`` where there is any. A storage is kept as it is while its
        tensors fill it, so that views of one storage stay views; otherwise each distinct tensor is copied. Tied
        names stay tied.

    >>> big = torch.arange(100)
    >>> compact({"a": big[:2]})["a"].untyped_storage().nbytes()
    16
    """
    used: dict[Hashable, dict[Hashable, int]] = {}
    for leaf in state.values():
        if _is_plain(leaf):
            used.setdefault(leaf.untyped_storage()._cdata, {})[tie_key(leaf)] = leaf.numel() * leaf.itemsize
    copies: dict[Hashable, torch.Tensor] = {}
    made: dict[str, Any] = {}
    for name, leaf in state.items():
        if _is_plain(leaf):
            storage, key = leaf.untyped_storage(), tie_key(leaf)
            if storage.nbytes() > sum(used[storage._cdata].values()):
                if key not in copies:
                    copies[key] = leaf.detach().clone(memory_format=torch.contiguous_format)
                made[name] = copies[key]
            else:
                made[name] = leaf.detach()
        else:
            made[name] = leaf
    metadata = getattr(state, "_metadata", None)
    return made if metadata is None else _with_metadata(made, metadata)


def _is_plain(leaf: Any) -> bool:
    return (type(leaf) is torch.Tensor or type(leaf) is torch.nn.Parameter) and leaf.layout is torch.strided


def _with_metadata(items: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    return StateDict.trusted(dict(items), metadata).to_dict()


def save_torch(
    path: str | os.PathLike[str], value: Any, *, overwrite: bool = False, durable: bool = True
) -> None:
    """Save a state dict, or a dict of state dicts, with ``torch.save``.

    Args:
        path: The file. Missing folders are made; a link is replaced, its target left alone.
        value: What to save. Mappings of names to tensors are compacted (see ``compact``), whatever their depth.
        overwrite: Whether an existing file may be replaced.
        durable: Whether to wait until the bytes are on the disk.

    Raises:
        DestinationExists: The path exists, and ``overwrite`` is false; or it is a folder.
        DiskError: The system refused; what stood there before stands.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/x.pt"
    >>> save_torch(path, {"a": torch.ones(2)})
    >>> torch.load(path)
    {'a': tensor([1., 1.])}
    """
    path = Path(path)
    if path.is_dir() or (os.path.lexists(path) and not overwrite):
        remedy = (
            "name a file" if path.is_dir() else "give overwrite=True to replace it, or choose another place"
        )
        raise DestinationExists(f"{path} exists; {remedy}.")
    folders = make_folder(path.parent)
    # The name inside the archive is that of the file, so the hidden part is a folder around it.
    aside = path.parent / hidden_name()
    try:
        _write(aside, path, _compacted(value), durable)
        folders = []
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        remove_folders(folders)
    if durable:
        sync_folder(path.parent)


def _compacted(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if any(isinstance(leaf, torch.Tensor) for leaf in value.values()):
        return compact(value)
    made = {name: _compacted(leaf) for name, leaf in value.items()}
    return OrderedDict(made) if isinstance(value, OrderedDict) else made


def _write(aside: Path, path: Path, value: Any, durable: bool) -> None:
    file = aside / path.name
    try:
        aside.mkdir()
        torch.save(value, file)
        mode = mode_at(path)
        if mode is not None:
            with contextlib.suppress(OSError):
                file.chmod(mode)
        if durable:
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        os.replace(file, path)
    except OSError as error:
        refuse(error, path, "it could not be written")
    except RuntimeError as error:  # torch's writer reports a full disk as its own failed assertion
        raise DiskError(
            f"{path}: torch could not write it; the disk may be full. What stood there before is unchanged. "
            f"({str(error).splitlines()[0][:120]})"
        ) from error
