"""Safetensors files as a source: one file, or the files of a folder joined.

Headers are read and checked at once, data only when asked. Nothing here writes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType

import torch

from fdsd.data.errors import BadFile, listing
from fdsd.data.protocols import Piece
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec
from fdsd.data.statedict import StateDict
from fdsd.storage.files import Extent, FileStamp, OpenFiles, local_path, read_exactly
from fdsd.storage.hf_folder import INDEX_SUFFIX, Index, find_files, read_index
from fdsd.storage.ranged import read_region
from fdsd.storage.safetensors_header import Header, read_header
from fdsd.storage.safetensors_ties import Ties, join_ties, read_ties

__all__ = ["SafetensorsSource"]

_File = tuple[str, Header, FileStamp]


class SafetensorsSource:
    """The tensors of a safetensors file, of an index, or of a folder that holds either.

    Args:
        path: A file, an index ``*.safetensors.index.json``, or a folder. Links are followed.

    Attributes:
        path: What was opened.
        files: The files, in the order of the index, else of their names.

    Raises:
        BadFile: A file is missing, truncated or breaks a rule of the format; all offenders are named.
        UnsafeFile: The index names files outside its folder.
        Unsupported: A dtype that this torch lacks.

    Descriptors are opened when needed, a few kept; reads may run in several threads. A file that changes
    after it was opened here is an error at the next read, never mixed data.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> path = tempfile.mkdtemp() + "/x.safetensors"
    >>> save_file({"a": torch.tensor([1.0, 2.0])}, path)
    >>> SafetensorsSource(path).specs()
    StateDict({
      'a': TensorSpec((2,), torch.float32),
    })
    """

    path: Path
    files: tuple[str, ...]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local_path(path)
        index, paths = _locate(self.path)
        read = [(str(file), *read_header(str(file))) for file in paths]
        if index is not None:
            index.check({os.path.basename(file): header for file, header, _ in read})
        else:
            _refuse_twice(self.path, read)
        self.files = tuple([file for file, _, _ in read])
        self._files: dict[str, _File] = {}
        stored: dict[str, TensorSpec] = {}
        for file in read:
            self._files.update(dict.fromkeys(file[1].specs, file))
            stored.update(file[1].specs)
        ties, metadata = _ties(read, stored)
        self._specs = _with_ties(stored, ties, ties.weave(stored if index is None else index.files))
        self._aliases = dict(ties.owners)
        self._metadata = metadata
        self._open = OpenFiles()

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names that share another one's tensor, with that name; they are among ``specs()`` too."""
        return MappingProxyType(self._aliases)

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the files' ``__metadata__`` says, but for aliases; the first file wins."""
        return MappingProxyType(self._metadata)

    def specs(self) -> StateDict[TensorSpec]:
        """Give the spec of each name; those that are tied have equal ``tie``."""
        return self._specs

    def pieces(self, fqn: str) -> Sequence[Piece]:
        """List the parts of a tensor: one, the whole, owned by its file."""
        return [Piece(Region.whole(self._specs[fqn].shape), self.extent(fqn).path)]

    def read(self, fqn: str, region: Region, out: torch.Tensor) -> None:
        """Read a region into ``out``, which has one dim for each pair and casts to its own dtype.

        Raises:
            BadFile: The file was changed since it was opened.
            SpecMismatch: The region does not lie within the tensor, or ``out`` has another shape.
        """
        spec, extent = self._specs[fqn], self.extent(fqn)
        with self._open.borrow(extent.path, extent.stamp) as fd:

            def read_bytes(offset: int, memory: memoryview) -> None:
                read_exactly(fd, memory, offset, extent.path)

            read_region(read_bytes, spec, extent.offset, region, out)

    def extent(self, fqn: str) -> Extent:
        """Give the bytes of the file that hold a tensor, row-major, for a copy by the kernel.

        Raises:
            UnknownName: There is no such tensor.
        """
        self._specs[fqn]  # a name that is not here raises, with the nearest one
        owner = self._aliases.get(fqn, fqn)
        path, header, stamp = self._files[owner]
        return Extent(path, header.offsets[owner], header.nbytes[owner], stamp)

    def file(self, fqn: str) -> tuple[str, FileStamp]:
        """Give the file that holds a tensor, and what it was when it was opened."""
        self._specs[fqn]
        path, _, stamp = self._files[self._aliases.get(fqn, fqn)]
        return path, stamp

    def close(self) -> None:
        """Close the descriptors that are open; a later read opens them again."""
        self._open.close()

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SafetensorsSource({str(self.path)!r})"


def _locate(path: Path) -> tuple[Index | None, Sequence[Path]]:
    """Find the index, if there is one, and the files."""
    if os.path.isdir(path):
        found = find_files(path)
    elif path.name.endswith(INDEX_SUFFIX):
        FileStamp.of(path)
        found = read_index(path)
    else:
        found = [path]
    return (found, found.paths()) if isinstance(found, Index) else (None, found)


def _refuse_twice(path: Path, read: Sequence[_File]) -> None:
    owner: dict[str, str] = {}
    twice: list[str] = []
    for file, header, _ in read:
        twice += [
            f"{name} in {os.path.basename(owner[name])} and {os.path.basename(file)}"
            for name in header.specs
            if name in owner
        ]
        owner.update(dict.fromkeys(header.specs, file))
    if twice:
        raise BadFile(
            f"{path} has no index, and its files share names: {listing(twice)}. "
            "Open the file that you mean by its path."
        )


def _ties(read: Sequence[_File], names: Mapping[str, object]) -> tuple[Ties, dict[str, str]]:
    parts: list[tuple[str, Ties]] = []
    metadata: dict[str, str] = {}
    for file, header, _ in read:
        ties, rest = read_ties(header.metadata, header.specs, file)
        parts.append((file, ties))
        metadata = {**rest, **metadata}
    return join_ties(parts, names), metadata


def _with_ties(specs: Mapping[str, TensorSpec], ties: Ties, order: Sequence[str]) -> StateDict[TensorSpec]:
    tied = {**ties.owners, **{owner: owner for owner in ties.owners.values()}}
    made: dict[str, TensorSpec] = {}
    for name in order:
        spec = specs[ties.owners.get(name, name)]
        made[name] = TensorSpec(spec.shape, spec.dtype, tie=tied[name]) if name in tied else spec
    return StateDict.trusted(made)
