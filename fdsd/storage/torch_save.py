"""Writing files that ``torch.load`` reads: aside, renamed into place, each tensor with its own elements only.

Nothing here reads files.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch

from fdsd.data.errors import DestinationExists, DiskError, Unsupported, listing
from fdsd.data.memory import storage_id
from fdsd.data.spec import TensorSpec, VirtualTensor, is_exact
from fdsd.data.statedict import StateDict
from fdsd.data.ties import tie_key
from fdsd.data.values import is_mapping
from fdsd.storage.drafts import hidden_name, make_folder, mode_at, remove_folders, sync_folder
from fdsd.storage.files import local_path, refuse
from fdsd.storage.locks import DestinationLock

__all__ = ["compact", "save_torch"]


def compact(state: Mapping[str, Any]) -> dict[str, Any]:
    """Give the same leaves as plain tensors that hold no more memory than their own elements.

    Args:
        state: Names to tensors and other objects.

    Returns:
        A dict of detached tensors, carrying ``_metadata`` where there is any. A storage is kept as it is
        while its tensors fill it, so that views of one storage stay views; otherwise each distinct tensor is
        copied. Tied names stay tied.

    >>> big = torch.arange(100)
    >>> compact({"a": big[:2]})["a"].untyped_storage().nbytes()
    16
    """
    used: dict[Hashable, dict[Hashable, int]] = {}
    for leaf in state.values():
        if _is_plain(leaf):
            used.setdefault(storage_id(leaf), {})[tie_key(leaf)] = leaf.numel() * leaf.itemsize
    copies: dict[Hashable, torch.Tensor] = {}
    made: dict[str, Any] = {}
    absent = [name for name, leaf in state.items() if isinstance(leaf, VirtualTensor | TensorSpec)]
    if absent:
        raise Unsupported(f"these leaves have no data here: {listing(absent)}. Call materialize() first.")
    for name, leaf in state.items():
        if _is_plain(leaf):
            key = tie_key(leaf)
            if leaf.untyped_storage().nbytes() > sum(used[storage_id(leaf)].values()):
                if key not in copies:
                    copies[key] = leaf.detach().clone(memory_format=torch.contiguous_format)
                made[name] = copies[key]
            else:
                made[name] = leaf.detach()
        else:
            made[name] = leaf
    return StateDict.trusted(made, getattr(state, "_metadata", None)).to_dict()


def _is_plain(leaf: Any) -> bool:
    return is_exact(leaf) and leaf.layout is torch.strided


def save_torch(
    path: str | os.PathLike[str], value: Any, *, overwrite: bool = False, durable: bool | None = None
) -> None:
    """Save a state dict, or a dict of state dicts, with ``torch.save``.

    Args:
        path: The file. Missing folders are made; a link is replaced, its target left alone.
        value: What to save. Mappings of names to tensors, at any depth, are compacted (see ``compact``).
        overwrite: Whether an existing file may be replaced.
        durable: Whether to wait until the bytes are on the disk; by default only if something is replaced,
            which a power failure must not take away.

    Raises:
        DestinationExists: The path exists, and ``overwrite`` is false; or it is a folder; or another save writes it.
        DiskError: The system refused; what stood there before stands.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/x.pt"
    >>> save_torch(path, {"a": torch.ones(2)})
    >>> torch.load(path)
    {'a': tensor([1., 1.])}
    """
    path = local_path(path)
    _refuse_existing(path, overwrite)
    durable = os.path.lexists(path) if durable is None else durable
    folders = make_folder(path.parent)
    try:
        lock = DestinationLock(path.parent, path.name)
        # The name inside the archive is that of the file, so the hidden part is a folder around it.
        aside = path.parent / hidden_name(kind=f"{lock.tag}-")
        try:
            _refuse_existing(path, overwrite)
            _write(aside, path, _compacted(value), durable)
            folders = []
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            lock.release()
    finally:
        remove_folders(folders)
    if durable:
        sync_folder(path.parent)


def _refuse_existing(path: Path, overwrite: bool) -> None:
    is_folder = os.path.isdir(path)
    if is_folder or (os.path.lexists(path) and not overwrite):
        remedy = "name a file" if is_folder else "give overwrite=True to replace it, or choose another place"
        raise DestinationExists(f"{path} exists; {remedy}.")


def _compacted(value: Any) -> Any:
    if not is_mapping(value):
        return value
    if any(isinstance(leaf, torch.Tensor) for leaf in value.values()):
        return compact(value)
    made = {name: _compacted(leaf) for name, leaf in value.items()}
    return StateDict.trusted(made, getattr(value, "_metadata", None)).to_dict()


def _write(aside: Path, path: Path, value: Any, durable: bool) -> None:
    file = aside / path.name
    try:
        aside.mkdir()
        mode = mode_at(path)  # raises if a name is too long, of which torch.save does not always tell
        torch.save(value, file)
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
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        shown = str(error).strip().splitlines() or [type(error).__name__]
        if "inline_container" in shown[0] or "PytorchStreamWriter" in shown[0]:  # torch's own failed assertion
            raise DiskError(
                f"{path}: it could not be written, the disk may be full ({shown[0][:120]}). "
                "What stood there before is unchanged; make room or choose another place."
            ) from error
        raise Unsupported(f"{path}: torch.save cannot hold this: {shown[0][:200]}.") from error
