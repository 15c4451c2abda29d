"""Safetensors files as a sink: one file, or a folder of files with an index.

All files are made under hidden names at once, filled in any order, put in place together. Nothing is read here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import SupportsIndex

import torch

from fdsd.data.errors import BadFile, DestinationExists, SpecMismatch, UnknownName, listing, plural
from fdsd.data.region import Region
from fdsd.data.spec import TensorSpec, dtype_name
from fdsd.data.statedict import StateDict
from fdsd.storage.drafts import Draft, make_folder, remove_folders
from fdsd.storage.files import Extent, OpenFiles, local_path
from fdsd.storage.hf_folder import INDEX_SUFFIX, OLD, checkpoint_files, index_text, names_in
from fdsd.storage.ledger import Ledger
from fdsd.storage.locks import DestinationLock
from fdsd.storage.placing import Placement
from fdsd.storage.ranged import contiguous_runs, memory_of
from fdsd.storage.safetensors_header import build_header, check_storable
from fdsd.storage.safetensors_ties import Ties, split_ties, write_ties
from fdsd.storage.shards import INDEX_NAME, SINGLE_NAME, plan_shards, shard_names
from fdsd.storage.slots import Run, Slot

__all__ = ["SafetensorsSink"]


class SafetensorsSink:
    """Safetensors files that are being written; made by ``create`` or ``create_folder``.

    A context manager: leaving it commits, leaving it by any exception (an interrupt too) aborts. Until the
    commit nothing stands under a final name, and what stood there before is unchanged.

    Attributes:
        path: The file or folder that is being written.
        aliases: Names that share another one's tensor, with that name; they are not in ``specs()``.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/x.safetensors"
    >>> with SafetensorsSink.create(path, {"a": TensorSpec((2,), torch.float32)}) as sink:
    ...     sink.write("a", 0, torch.tensor([1.0, 2.0]))
    >>> from safetensors.torch import load_file
    >>> load_file(path)
    {'a': tensor([1., 2.])}
    """

    path: Path
    aliases: Mapping[str, str]

    def __init__(
        self, path: Path, stored: Mapping[str, TensorSpec], ties: Ties, *, overwrite: bool, durable: bool
    ) -> None:
        self.path = path
        self._specs = StateDict(stored)
        self.aliases = dict(ties.owners)
        self._ties = ties
        self._overwrite = overwrite
        self._durable = durable
        self._files = OpenFiles(16, os.O_RDWR)
        self._sources = OpenFiles(16)
        self._drafts: list[Draft] = []
        self._slots: dict[str, Slot] = {}
        self._ledger = Ledger()
        self._placement: Placement | None = None
        self._folders: list[Path] = []
        self._lock: DestinationLock | None = None
        self._is_open = True

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        specs: Mapping[str, TensorSpec],
        *,
        metadata: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
        origins: Mapping[str, int] | None = None,
        overwrite: bool = False,
        durable: bool | None = None,
    ) -> SafetensorsSink:
        """Begin to write one file.

        Args:
            path: The file. Missing folders are made; a link is replaced, its target left alone.
            specs: The tensors, in order; aliases may be among them.
            metadata: More entries for ``__metadata__``; ``format: pt`` is there by itself.
            aliases: Alias to owner; aliases are recorded, not stored.
            origins: Where tensors begin in the files that they will be copied from; it only makes copies faster.
            overwrite: Whether an existing file may be replaced.
            durable: Whether the commit waits until the bytes are on the disk; by default only if something
                is replaced, which a power failure must not take away.

        Raises:
            DestinationExists: The path exists, and ``overwrite`` is false; it is a folder; another save writes it.
            Unsupported: Dtypes that the format lacks; all tensors are named.
            DiskError: There is no room for the file.
        """
        path = local_path(path)
        if os.path.isdir(path):
            raise DestinationExists(f"{path} is a folder; name a file in it, or save as a folder.")
        _refuse_existing(path, [path.name] if os.path.lexists(path) else [], overwrite)
        stored, ties = split_ties(specs, aliases or {})
        check_storable({**stored, **dict.fromkeys(ties.owners, TensorSpec((), torch.bool))}, path)
        durable = os.path.lexists(path) if durable is None else durable
        sink = cls(path, stored, ties, overwrite=overwrite, durable=durable)

        def begin() -> None:
            sink._claim(path.parent, path.name)
            _refuse_existing(path, [path.name] if os.path.lexists(path) else [], overwrite)
            draft = sink._begin_file(path, stored, metadata or {}, origins or {})
            sink._placement = Placement(path.parent, [], draft, durable=durable)

        return sink._guarded(begin)

    @classmethod
    def create_folder(
        cls,
        path: str | os.PathLike[str],
        specs: Mapping[str, TensorSpec],
        *,
        max_shard_size: str | SupportsIndex = "5GB",
        metadata: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
        origins: Mapping[str, int] | None = None,
        overwrite: bool = False,
        durable: bool | None = None,
    ) -> SafetensorsSink:
        """Begin to write a folder: ``model.safetensors``, or several files and their index.

        Args:
            path: The folder; other files in it stay. Missing folders are made.
            specs: The tensors, in order; aliases may be among them.
            max_shard_size: The most bytes of tensors in one file, as ``"5GB"`` or a number.
            metadata: More entries for the ``__metadata__`` of each file.
            aliases: Alias to owner; aliases are recorded, not stored.
            origins: Where tensors begin in the files that they will be copied from; it only makes copies faster.
            overwrite: Whether a checkpoint in the folder may be replaced. Files of the old one that the new
                one does not have are removed after the new index stands (see ``placing``).
            durable: Whether the commit waits until the bytes are on the disk; by default only if something
                is replaced, which a power failure must not take away.

        Raises:
            DestinationExists: The folder has safetensors files, and ``overwrite`` is false; it is a file; another
                save writes into it.
            Unsupported: Dtypes that the format lacks; all tensors are named.
            DiskError: There is no room for the files.
        """
        path = local_path(path)
        if os.path.lexists(path) and not os.path.isdir(path):
            raise DestinationExists(f"{path} is a file, not a folder; name a file *.safetensors, or another folder.")
        found = _checkpoint_in(path)
        _refuse_existing(path, found, overwrite)
        _refuse_other_indexes(path, found)
        stored, ties = split_ties(specs, aliases or {})
        check_storable({**stored, **dict.fromkeys(ties.owners, TensorSpec((), torch.bool))}, path)
        shards = plan_shards(stored, max_shard_size)
        sink = cls(path, stored, ties, overwrite=overwrite, durable=bool(found) if durable is None else durable)

        def begin() -> None:
            sink._claim(path)
            _refuse_existing(path, _checkpoint_in(path), overwrite)
            sink._begin_folder(shards, metadata or {}, origins or {})

        return sink._guarded(begin)

    def _claim(self, folder: Path, name: str | None = None) -> None:
        """Make the folder, and see to it that nobody else writes there."""
        self._folders = make_folder(folder)
        self._lock = DestinationLock(folder, name)

    def _guarded(self, begin: Callable[[], None]) -> SafetensorsSink:
        try:
            begin()
        except BaseException:
            self.abort()
            raise
        return self

    def _begin_folder(
        self, shards: Sequence[Sequence[str]], metadata: Mapping[str, str], origins: Mapping[str, int]
    ) -> None:
        files: dict[str, str] = {}
        for file, names in zip(shard_names(len(shards)), shards, strict=True):
            self._begin_file(self.path / file, {name: self._specs[name] for name in names}, metadata, origins)
            files.update(dict.fromkeys(names, file))
        parts = self._drafts[:] if len(shards) > 1 else []
        if parts:
            total = sum([slot.nbytes for slot in self._slots.values()])
            text = index_text({name: files[name] for name in self._specs}, total)
            self._begin_draft(self.path / INDEX_NAME, text, len(text))
        remains = [name for name in names_in(self.path) if name.startswith(OLD)]
        old = [*checkpoint_files(self.path), *remains]
        roots = (INDEX_NAME, SINGLE_NAME)
        self._placement = Placement(self.path, parts, self._drafts[-1], roots, old, self._durable)

    def _begin_file(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        metadata: Mapping[str, str],
        origins: Mapping[str, int],
    ) -> Draft:
        entries = {"format": "pt", **metadata, **write_ties(self._ties, specs)}
        places = {name: origins[name] for name in specs if name in origins}
        head, offsets = build_header(specs, entries, path, origins=places)
        sizes = {name: spec.nbytes for name, spec in specs.items()}
        draft = self._begin_draft(path, head, len(head) + sum(sizes.values()))
        self._slots.update({n: Slot(draft, offsets[n], sizes[n], spec) for n, spec in specs.items()})
        return draft

    def _begin_draft(self, path: Path, head: bytes, size: int) -> Draft:
        assert self._lock is not None
        draft = Draft(path, size, self._files, durable=self._durable, tag=self._lock.tag)
        self._drafts.append(draft)
        draft.write(memoryview(head), 0)
        return draft

    def specs(self) -> StateDict[TensorSpec]:
        """Give the spec of each tensor that is stored."""
        return self._specs

    def wanted(self, fqn: str) -> Sequence[Region]:
        """List the regions of a tensor that have to be written: one, the whole."""
        return [Region.whole(self._slot(fqn).spec.shape)]

    def write(self, fqn: str, region: Region | int, value: torch.Tensor | bytes | bytearray | memoryview) -> None:
        """Write a part of a tensor.

        Args:
            fqn: The tensor.
            region: A region of it; or, for consecutive bytes, their offset within the row-major tensor.
            value: The elements, of the tensor's dtype, with one dim for each pair of the region; for an
                offset, a tensor of any shape, or bytes.

        Raises:
            SpecMismatch: The value does not fit.
            UnknownName: There is no such tensor.
            DiskError: The system refused; the disk may be full.
        """
        slot = self._slot(fqn)
        memory, keep = _bytes_of(fqn, value, slot.spec)
        if isinstance(region, int):
            runs = [(region, 0, memory.nbytes)]
            if region < 0 or region + memory.nbytes > slot.nbytes:
                raise SpecMismatch(f"{fqn!r} has {slot.nbytes} bytes; {memory.nbytes} at {region} lie beyond them.")
        else:
            if keep is None or tuple(keep.shape) != region.shape:
                shown = "bytes" if keep is None else f"shape {tuple(keep.shape)}"
                raise SpecMismatch(f"{fqn!r}: a region of shape {region.shape} cannot be written from {shown}.")
            item = slot.spec.dtype.itemsize
            runs = [(at * item, of * item, n * item) for at, of, n in contiguous_runs(slot.spec, region)]
        for at, of, count in runs:
            slot.draft.write(memory[of : of + count], slot.offset + at)
            self._ledger.add(fqn, at, at + count)

    def copy(self, fqn: str, offset: int, extent: Extent) -> None:
        """Write bytes of another file, copied by the kernel where it can; neighbours are copied together.

        Args:
            fqn: The tensor.
            offset: Where they go, in bytes within the row-major tensor.
            extent: The bytes.

        Raises:
            SpecMismatch: They do not lie within the tensor.
            BadFile: The file was changed after its extent was taken.
            DiskError: The system refused; the disk may be full.
        """
        slot = self._slot(fqn)
        if offset < 0 or offset + extent.nbytes > slot.nbytes:
            raise SpecMismatch(f"{fqn!r} has {slot.nbytes} bytes; {extent.nbytes} at {offset} lie beyond them.")
        slot.draft.copy(extent, slot.offset + offset, self._sources)
        self._ledger.add(fqn, offset, offset + extent.nbytes)

    def copy_tensors(self, extents: Iterable[tuple[str, Extent]]) -> Iterator[int]:
        """Write whole tensors that are bytes of other files; neighbours on both sides are one copy.

        Args:
            extents: The tensors, and the bytes of each.

        Yields:
            How many bytes were copied, now and then.

        Raises:
            SpecMismatch: The bytes are too many or too few for the tensor.
            BadFile: A file was changed after its extent was taken.
            DiskError: The system refused; the disk may be full.
        """
        written = self._ledger.whole
        run: Run | None = None
        for fqn, extent in extents:
            slot = self._slot(fqn)
            if extent.nbytes != slot.nbytes:
                raise SpecMismatch(f"{fqn!r} has {slot.nbytes} bytes, and cannot be a copy of {extent.nbytes}.")
            if run is None or not run.take(fqn, extent, slot):
                if run is not None:
                    yield from run.copy(self._sources)
                run = Run(fqn, fqn, extent, slot, extent.nbytes)
            written.add(fqn)
        if run is not None:
            yield from run.copy(self._sources)

    def _slot(self, fqn: str) -> Slot:
        if not self._is_open:
            raise BadFile(f"{self.path} was committed or aborted; nothing more can be written.")
        if fqn not in self._slots:
            raise UnknownName(f"{fqn!r} is not among the {plural(len(self._slots), 'tensor')} of {self.path}.")
        return self._slots[fqn]

    def commit(self) -> None:
        """Put the files in place; on any failure nothing is, and what stood there before stands.

        Raises:
            BadFile: Tensors were not written wholly; all are named.
            DestinationExists: Something came to the destination meanwhile, and ``overwrite`` is false.
            DiskError: The system refused.
        """
        if not self._is_open:
            raise BadFile(f"{self.path} was committed or aborted already.")
        try:
            if lacking := [fqn for fqn, slot in self._slots.items() if self._ledger.lacks(fqn, slot.nbytes)]:
                raise BadFile(
                    f"{self.path}: {len(lacking)} of {plural(len(self._slots), 'tensor')} were not written "
                    f"wholly: {listing(lacking)}. Nothing was put in place."
                )
            for draft in self._drafts:
                draft.finish()
            assert self._placement is not None
            root = self._placement.root.path
            _refuse_existing(root, [root.name] if os.path.lexists(root) else [], self._overwrite)
            self._placement.run()
            self._folders = []
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove what was written; does nothing after a commit."""
        self._is_open = False
        self._files.close()
        self._sources.close()
        try:
            for draft in self._drafts:
                draft.discard()
        finally:
            if self._lock:
                self._lock.release()
        remove_folders(self._folders)

    def __enter__(self) -> SafetensorsSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._is_open:
            self.commit()


def _checkpoint_in(path: Path) -> list[str]:
    """List the files of safetensors checkpoints in a folder."""
    names = names_in(path) if os.path.isdir(path) else []
    return [name for name in names if name.endswith((".safetensors", INDEX_SUFFIX)) and name[0] != "."]


def _refuse_existing(path: Path, found: Sequence[str], overwrite: bool) -> None:
    if found and not overwrite:
        what = f"{path} exists" if list(found) == [path.name] else f"{path} has {listing(found)}"
        raise DestinationExists(f"{what}; give overwrite=True to replace it, or choose another place.")


def _refuse_other_indexes(path: Path, found: Sequence[str]) -> None:
    """Beside another index the new checkpoint could not be opened by its folder."""
    others = [name for name in found if name.endswith(INDEX_SUFFIX) and name != INDEX_NAME]
    if others:
        raise DestinationExists(
            f"{path} has the index of another checkpoint: {listing(others)}. Remove it, or choose another folder."
        )


def _bytes_of(
    fqn: str, value: torch.Tensor | bytes | bytearray | memoryview, spec: TensorSpec
) -> tuple[memoryview, torch.Tensor | None]:
    """Give the bytes of a value, and the tensor that keeps them alive."""
    if not isinstance(value, torch.Tensor):
        return memoryview(value).cast("B"), None
    if value.dtype != spec.dtype:
        raise SpecMismatch(
            f"{fqn!r} is {dtype_name(spec.dtype)} and cannot be written from {dtype_name(value.dtype)}; cast it first."
        )
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memory_of(plain), plain
