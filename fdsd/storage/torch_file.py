"""Files of ``torch.save`` as a source: mapped, never executed, with one state dict picked out.

Nothing here needs the classes of process groups; files that hold DTensors are refused for now. Writing lives
in ``torch_save``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from fdsd.algebra.dtypes import copy_elements
from fdsd.data.errors import BadFile, UnknownName, UnsafeFile, Unsupported, listing
from fdsd.data.protocols import Piece
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict, specs
from fdsd.data.ties import ties
from fdsd.data.values import is_mapping
from fdsd.storage.files import FileStamp, local_path, refuse, refuse_pointer

__all__ = ["TorchFileSource", "load_torch"]

_ZIP = b"PK\x03\x04"
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_RANKED = "torch.distributed."


def load_torch(path: str | os.PathLike[str]) -> Any:
    """Load a file of ``torch.save`` without running code from it; tensors of newer files are mapped.

    Raises:
        UnsafeFile: It asks for classes or functions that are not known to be harmless; they are named.
        Unsupported: It holds DTensors or sharded tensors.
        BadFile: It is truncated, corrupt, or no such file.
    """
    shown = str(local_path(path))
    is_zip = _starts_with(shown, _ZIP)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old protocols and storages are torch's to read, not the user's to fix
            if not shown.endswith(".safetensors"):  # by this name torch expects another format
                return torch.load(shown, map_location="cpu", weights_only=True, mmap=True if is_zip else None)
            with open(shown, "rb") as file:
                return torch.load(file, map_location="cpu", weights_only=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except MemoryError as error:
        raise BadFile(f"{shown} asks for more memory than there is; it may be corrupt.") from error
    except Exception as error:
        _refuse_load(shown, error, is_zip)


def _starts_with(path: str, magic: bytes) -> bool:
    FileStamp.of(path)
    try:
        with open(path, "rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        refuse(error, path, "it could not be opened")


def _refuse_load(path: str, error: Exception, is_zip: bool) -> NoReturn:
    """Say what torch found wrong, in one sentence."""
    asked = set(_GLOBAL.findall(str(error)))
    if is_zip and isinstance(error, pickle.UnpicklingError):
        with contextlib.suppress(Exception):  # a file that is odd in other ways too: what was found is enough
            asked |= set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    ranked = [name for name in asked if name.startswith(_RANKED)]
    if ranked or (not asked and _RANKED in str(error)):
        raise Unsupported(f"{path} holds sharded tensors of process groups: {listing(ranked)}.") from error
    if asked:
        raise UnsafeFile(
            f"{path} asks for classes or functions that no state dict needs, and that may run code: "
            f"{listing(asked)}. If you trust them, load it with torch.load and pass the tensors on."
        ) from error
    if isinstance(error, OSError):
        refuse(error, path, "it could not be read")
    refuse_pointer(path)
    first = str(error).strip().splitlines() or [type(error).__name__]
    raise BadFile(f"{path} is truncated, corrupt, or no file of torch.save: {_short(first[0])}.") from error


def _short(text: str) -> str:
    text = text.rstrip(".")
    return text if len(text) <= 160 else text[:157] + "..."


class TorchFileSource:
    """The state dict in a file of ``torch.save``.

    Args:
        path: The file.
        key: Which of the nested dicts, by dots, as ``"model"`` or ``"checkpoint.model"``. Needed when the top
            level is not itself names and tensors.

    Attributes:
        path: The file.
        key: The key that was given.
        state: Names to tensors, which share the mapped file and their storages; and to other objects.

    Raises:
        UnknownName: There is no such key, or one is needed; the message lists those there are.
        UnsafeFile: The file asks to run code.
        BadFile: The file is truncated or corrupt, or holds no state dict.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/x.pt"
    >>> torch.save({"model": {"a": torch.ones(2)}, "epoch": 3}, path)
    >>> TorchFileSource(path, key="model").specs()
    StateDict({
      'a': TensorSpec((2,), torch.float32),
    })
    """

    path: Path
    key: str | None
    state: StateDict[Any]

    def __init__(self, path: str | os.PathLike[str], *, key: str | None = None) -> None:
        self.path = local_path(path)
        self.key = key
        self._stamp = FileStamp.of(self.path)
        self.state = StateDict(_pick(load_torch(self.path), key, self.path))
        _refuse_leaves(self.state, self.path)
        self._aliases = {name: group[0] for group in ties(self.state) for name in group[1:]}
        found = specs(self.state)
        self._specs: StateDict[TensorSpec] = StateDict.trusted(
            {name: spec for name, spec in found.items() if isinstance(spec, TensorSpec)}
        )

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names that share another one's tensor, with that name."""
        return MappingProxyType(self._aliases)

    def specs(self) -> StateDict[TensorSpec]:
        """Give the spec of each tensor; other objects are in ``objects`` only."""
        return self._specs

    @property
    def objects(self) -> Mapping[str, Any]:
        """The entries that are no tensors."""
        return {name: leaf for name, leaf in self.state.items() if name not in self._specs}

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """The module versions that ``nn.Module.state_dict`` keeps in ``_metadata``, if any."""
        return self.state.metadata

    def pieces(self, fqn: str) -> Sequence[Piece]:
        """List the parts of a tensor: one, the whole, owned by the file."""
        return [Piece(Region.whole(self._specs[fqn].shape), str(self.path))]

    def file(self, fqn: str) -> tuple[str, FileStamp]:
        """Give the file that holds a tensor, and what it was when it was opened."""
        self._specs[fqn]  # a name that is not here raises, with the nearest one
        return str(self.path), self._stamp

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        """Read a region into ``out``, which has one dim for each pair and casts to its own dtype.

        Raises:
            BadFile: The file was changed since it was opened.
            SpecMismatch: The region does not lie within the tensor.
        """
        region.check_inside(self._specs[fqn].shape, f"reading {fqn!r} of {self.path}")
        self._stamp.check(self.path)  # the pages of a file that was cut would kill the process
        tensor: torch.Tensor = self.state[fqn].detach()
        strides, offset = region.strides(tensor.stride())
        with torch.no_grad():
            copy_elements(tensor.as_strided(region.shape, strides, tensor.storage_offset() + offset), out)

    def __repr__(self) -> str:
        key = "" if self.key is None else f", key={self.key!r}"
        return f"TorchFileSource({str(self.path)!r}{key})"


def _pick(value: Any, key: str | None, path: Path) -> Mapping[str, Any]:
    """Find the state dict that a key names, or the top level."""
    if not is_mapping(value):
        raise BadFile(f"{path} holds a {type(value).__name__}, not names and tensors.")
    found = value if key is None else _descend(value, key)
    if found is None:
        raise UnknownName(f"{path} has no dict at key={key!r}. There are: {_candidates(value)}.")
    if not _is_state(found):
        where = "is no state dict itself" if key is None else f"has no state dict at key={key!r}"
        raise UnknownName(f"{path} {where}; give key= one of: {_candidates(value)}.")
    return found


def _candidates(value: Mapping[Any, Any]) -> str:
    keys = [key for key, found in _nested(value, (), set()) if _is_state(found)]
    return listing(keys, sort=False) if keys else "none that hold names and tensors"


def _nested(value: Mapping[Any, Any], path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Walk the dicts below, each once (a file may nest a dict in itself), with their keys."""
    for key, child in value.items():
        if is_mapping(child) and isinstance(key, str) and id(child) not in seen and len(path) < 32:
            seen.add(id(child))
            yield ".".join((*path, key)), child
            if not _is_state(child):
                yield from _nested(child, (*path, key), seen)


def _descend(value: Mapping[Any, Any], key: str) -> Mapping[Any, Any] | None:
    """Follow a key by dots; a key that has dots itself is found too."""
    if is_mapping(child := value.get(key)):
        return child
    at = key.find(".")
    while at >= 0:
        child = value.get(key[:at])
        if is_mapping(child) and (found := _descend(child, key[at + 1 :])) is not None:
            return found
        at = key.find(".", at + 1)
    return None


def _is_state(value: Mapping[Any, Any]) -> bool:
    """Names to tensors and plain values: no dict of tensors below, but for a module's extra state."""
    return all(
        isinstance(name, str) and (name.rpartition(".")[2] == "_extra_state" or not _has_tensors_below(leaf))
        for name, leaf in value.items()
    )


def _has_tensors_below(leaf: Any) -> bool:
    pending: list[Mapping[Any, Any]] = [leaf] if is_mapping(leaf) else []
    seen = {id(leaf)}
    while pending:
        for child in pending.pop().values():
            if isinstance(child, torch.Tensor):
                return True
            if is_mapping(child) and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
    return False


def _refuse_leaves(state: Mapping[str, Any], path: Path) -> None:
    ranked = [
        f"{name} ({type(leaf).__name__})"
        for name, leaf in state.items()
        if type(leaf).__module__.startswith("torch.distributed")
    ]
    if ranked:
        raise Unsupported(f"{path} holds sharded tensors of process groups: {listing(ranked)}.")
    sparse = [
        f"{name} ({leaf.layout})"
        for name, leaf in state.items()
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided
    ]
    if sparse:
        raise Unsupported(f"{path} holds tensors that are not dense: {listing(sparse)}. Save them dense.")
