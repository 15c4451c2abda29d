"""Files that are written aside: a hidden file beside the destination, renamed over it when it is whole.

A draft is reserved on the disk at once, so that a full disk is an error before the work and not after it. Its
name is ``.fdsd-<tag>-<random>.tmp``; after a crash of the machine or a ``kill -9`` such a file may stay behind:
the next save to the same destination, which has the same tag, removes it. Nothing here knows what a file holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import define

from fdsd.storage.files import Extent, OpenFiles, copy_exactly, refuse, write_exactly

__all__ = ["Draft", "hidden_name", "make_folder", "mode_at", "remove_folders", "sync_folder"]

_WRITEBACK = 16 << 20
"""After so many bytes the kernel is asked to begin writing them out: the final sync then waits for little."""

_BATCH = 64 << 20
"""Neighbouring copies are gathered up to so many bytes."""


def _libc_function(name: str, *types: Any) -> Callable[..., int] | None:
    """Find a Linux call that Python does not offer; off_t is taken to have 64 bits."""
    if ctypes.sizeof(ctypes.c_long) != 8:
        return None
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = types
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


# posix_fallocate would fall back to a byte in every block, which takes hours on a network file system.
_fallocate = _libc_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_sync_file_range = _libc_function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def reserve(fd: int, size: int) -> None:
    """Make a new file ``size`` bytes long, with its blocks reserved where the file system can.

    Raises:
        OSError: The disk has no room.
    """
    if size and _fallocate is not None:
        while _fallocate(fd, 0, 0, size):
            code = ctypes.get_errno()
            if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise OSError(code, os.strerror(code))
            if code != errno.EINTR:
                break
        else:
            return
    os.ftruncate(fd, size)


def hidden_name(suffix: str = ".tmp", kind: str = "") -> str:
    """Give a fresh hidden name."""
    return f".fdsd-{kind}{secrets.token_hex(8)}{suffix}"


def make_folder(path: Path) -> list[Path]:
    """Make a folder and those above it, and give the ones that were made, innermost first."""
    made: list[Path] = []
    missing = path
    while not os.path.lexists(missing) and missing != missing.parent:
        made.append(missing)
        missing = missing.parent
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remove_folders(made)
        refuse(error, path, "the folder could not be made")
    return made


def remove_folders(folders: list[Path]) -> None:
    """Remove folders that are empty, innermost first."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable, on systems that can."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@define
class _Batch:
    """Bytes of another file that are to be copied to an offset, and may grow at the end."""

    extent: Extent
    offset: int
    nbytes: int
    sources: OpenFiles

    def take(self, extent: Extent, offset: int) -> bool:
        """Take an extent in, if it comes just behind on both sides."""
        mine = self.extent
        if self.offset + self.nbytes != offset or mine.offset + self.nbytes != extent.offset:
            return False
        if mine.path != extent.path or mine.stamp != extent.stamp:
            return False
        self.nbytes += extent.nbytes
        return True


class Draft:
    """A file of known size that is written under a hidden name in the folder of its destination.

    Args:
        path: The destination. A link there is replaced, never written through.
        size: How many bytes the file will have.
        files: Where descriptors of drafts are kept.
        durable: Whether ``finish`` waits until the bytes are on the disk.
        tag: What tells by the hidden name for which destination it is made; see ``DestinationLock``.

    Permissions are those of a file that ``open`` makes; a destination that exists hands on its own.

    Raises:
        DiskError: The disk is full, or the folder cannot be written.
    """

    def __init__(self, path: Path, size: int, files: OpenFiles, *, durable: bool = True, tag: str = "") -> None:
        self.path = path
        self.temporary = path.parent / hidden_name(kind=f"{tag}-" if tag else "")
        self.size = size
        self._files = files
        self._durable = durable
        self._written = 0
        self._batch: _Batch | None = None
        self._lock = threading.Lock()
        try:
            fd = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                mode_at(path)  # a name that is too long is an error now, not after the work
                reserve(fd, size)
            finally:
                os.close(fd)
        except OSError as error:
            self.discard()
            refuse(error, path, f"{size} bytes could not be reserved")
        except BaseException:
            self.discard()
            raise

    def write(self, memory: memoryview, offset: int) -> None:
        """Write bytes at an offset."""
        self.flush()
        with self._files.borrow(str(self.temporary)) as fd:
            write_exactly(fd, memory, offset, self.path)
            self._start_writeback(fd, memory.nbytes)

    def copy(self, extent: Extent, offset: int, sources: OpenFiles) -> None:
        """Copy an extent to an offset, now or together with what comes next to it.

        Args:
            extent: The bytes.
            offset: Where they go.
            sources: Where descriptors of the files to read from are kept.
        """
        with self._lock:
            batch = self._batch
            if batch is None or not batch.take(extent, offset):
                due, self._batch = batch, _Batch(extent, offset, extent.nbytes, sources)
            else:
                due, self._batch = (batch, None) if batch.nbytes >= _BATCH else (None, batch)
        self._copy(due)

    def flush(self) -> None:
        """Do the copy that still waits for a neighbour."""
        with self._lock:
            due, self._batch = self._batch, None
        self._copy(due)

    def _copy(self, due: _Batch | None) -> None:
        if due is None:
            return
        path, begin = due.extent.path, due.extent.offset
        with due.sources.borrow(path, due.extent.stamp) as source, self._files.borrow(str(self.temporary)) as fd:
            for done in range(0, due.nbytes, _WRITEBACK):
                step = min(_WRITEBACK, due.nbytes - done)
                copy_exactly(source, begin + done, fd, due.offset + done, step, paths=(path, str(self.path)))
                self._start_writeback(fd, step)

    def _start_writeback(self, fd: int, count: int) -> None:
        self._written += count
        if self._durable and self._written >= _WRITEBACK and _sync_file_range is not None:
            self._written = 0
            _sync_file_range(fd, 0, 0, 2)  # SYNC_FILE_RANGE_WRITE: begin, do not wait; a hint, so errors are nothing

    def finish(self) -> None:
        """Take over the permissions of what will be replaced, and wait for the bytes to be on the disk.

        Raises:
            DiskError: The disk lost some of them.
        """
        self.flush()
        with self._files.borrow(str(self.temporary)) as fd:
            try:
                mode = mode_at(self.path)
                if mode is not None:
                    with contextlib.suppress(OSError):  # some file systems have no permissions
                        os.fchmod(fd, mode)
                if self._durable:
                    os.fsync(fd)
            except OSError as error:
                refuse(error, self.path, "it could not be written out")

    def place(self) -> None:
        """Rename the draft over its destination, in one step."""
        try:
            os.replace(self.temporary, self.path)
        except OSError as error:
            refuse(error, self.path, "the finished file could not be renamed into place")

    @property
    def is_placed(self) -> bool:
        """Whether the hidden name is gone: the draft stands at its destination, or was discarded."""
        return not os.path.lexists(self.temporary)

    def discard(self) -> None:
        """Remove the hidden file, if it is there."""
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)


def mode_at(path: Path) -> int | None:
    """Give the permissions of a file that is about to be replaced, which writing into it would keep."""
    try:
        old = os.lstat(path)
    except FileNotFoundError:
        return None
    return stat.S_IMODE(old.st_mode) if stat.S_ISREG(old.st_mode) else None
