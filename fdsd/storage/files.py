"""Local files by position: stamps, descriptors that are opened when needed, exact reads and kernel copies.

Every read and write names its offset (``pread`` and ``pwrite``), so that threads share descriptors. Nothing
here knows what a file holds, and nothing here makes or renames files: drafts do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

from attrs import define, frozen

from fdsd.data.errors import BadFile, DiskError, FdsdError, MissingFile, SpecMismatch, Unsupported

__all__ = [
    "Extent",
    "FileStamp",
    "OpenFiles",
    "copy_exactly",
    "local_path",
    "read_exactly",
    "refuse",
    "refuse_pointer",
    "write_exactly",
]

_STEP = 256 << 20
"""The most bytes one system call moves, so that an interrupt is noticed soon."""
_BUFFER = 1 << 20
"""The buffer of a copy that the kernel does not do; a larger one would not stay in a cache."""
PAGE = 4096
"""Bytes that the kernel copies in one piece, where they keep their place within it."""
_POINTER = b"version https://git-lfs"
_LONGEST_POINTER = 1024
"""What the specification of Git LFS allows."""
_NO_KERNEL_COPY = frozenset(
    [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EPERM, errno.EBADF]
)


def refuse(error: OSError, path: str | os.PathLike[str], doing: str) -> NoReturn:
    """Raise what the system said about a file as one of fdsd's errors, with its ``errno``.

    Args:
        error: What the system raised.
        path: The file that the user knows.
        doing: What was tried, as "it could not be read".
    """
    text = f"{os.fspath(path)}: {doing}: {error.strerror or error}."
    made: FdsdError
    if isinstance(error, FileNotFoundError):
        made = MissingFile(text)
    elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        made = DiskError(f"{text} What stood there before is unchanged; make room or choose another place.")
    else:
        made = DiskError(text)
    assert isinstance(made, OSError)
    made.errno = error.errno
    raise made from error


def local_path(path: str | os.PathLike[str]) -> Path:
    """Take what a user gives as a path.

    Raises:
        Unsupported: It is neither text nor a path.
        BadFile: It holds a zero byte, which no file system takes.

    >>> local_path("a/b").name
    'b'
    """
    given: object = path
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise Unsupported(f"A path is text or a pathlib.Path, not {type(given).__name__}: {_short(given)}.")
    if "\0" in text:
        raise BadFile(f"{text!r} is no path: it has a zero byte.")
    return Path(text)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@frozen
class FileStamp:
    """What tells whether a file is still the one that was opened: its size, time of change and inode."""

    size: int
    mtime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, target: str | os.PathLike[str] | int, path: str | os.PathLike[str] | None = None) -> FileStamp:
        """Take the stamp of a path (links are followed) or of a descriptor of ``path``.

        Raises:
            MissingFile: Nothing is there.
            BadFile: It is no regular file.
        """
        shown = path if path is not None else target
        assert not isinstance(shown, int)
        try:
            now = os.stat(target)
        except OSError as error:
            refuse(error, shown, "it could not be found")
        if not stat.S_ISREG(now.st_mode):
            raise BadFile(f"{os.fspath(shown)} is no regular file.")
        return cls(now.st_size, now.st_mtime_ns, now.st_ino, now.st_dev)

    def check(self, path: str | os.PathLike[str]) -> None:
        """Raise unless ``path`` still is this file, unchanged.

        Raises:
            BadFile: It was written or replaced since, or is gone.
        """
        if FileStamp.of(path) != self:
            raise BadFile(f"{os.fspath(path)} was changed after it was opened; open it again.")


@frozen
class Extent:
    """Consecutive bytes of a file: what the kernel can copy without a look at them."""

    path: str
    offset: int
    nbytes: int
    stamp: FileStamp

    def part(self, begin: int, end: int) -> Extent:
        """Give the bytes from ``begin`` to ``end`` of these.

        >>> Extent("x", 10, 8, FileStamp(18, 0, 0, 0)).part(2, 5).offset
        12
        """
        if not 0 <= begin <= end <= self.nbytes:
            raise SpecMismatch(f"{self.path}: bytes {begin} to {end} were asked of an extent of {self.nbytes}.")
        return Extent(self.path, self.offset + begin, end - begin, self.stamp)


@define
class _Entry:
    fd: int
    stamp: FileStamp | None
    users: int = 0


class OpenFiles:
    """Descriptors by path: opened when needed, a few kept, safe for threads.

    Args:
        limit: How many stay open while nobody uses them.
        flags: How files are opened.
    """

    def __init__(self, limit: int = 8, flags: int = os.O_RDONLY) -> None:
        self._limit = limit
        self._flags = flags
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._finalizer = weakref.finalize(self, _close_all, self._entries)

    def __reduce__(self) -> Any:
        return OpenFiles, (self._limit, self._flags)

    @contextlib.contextmanager
    def borrow(self, path: str, stamp: FileStamp | None = None) -> Generator[int, None, None]:
        """Lend the descriptor of a file.

        Args:
            path: The file.
            stamp: If given, the file must still be the one of this stamp.

        Raises:
            BadFile: The file changed, or is gone.
        """
        if stamp is not None:
            stamp.check(path)
        with self._lock:
            entry = self._entries.get(path)
            if entry is None or entry.stamp != stamp:
                entry = self._open(path, stamp)
            self._entries.move_to_end(path)
            entry.users += 1
        try:
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1
                if self._entries.get(path) is not entry and not entry.users:
                    os.close(entry.fd)
                self._trim(self._limit)

    def _open(self, path: str, stamp: FileStamp | None) -> _Entry:
        try:
            fd = os.open(path, self._flags)
        except OSError as error:
            refuse(error, path, "it could not be opened")
        entry = _Entry(fd, stamp)
        try:
            if stamp is not None and FileStamp.of(fd, path) != stamp:
                raise BadFile(f"{path} was changed after it was opened; open it again.")
        except BaseException:
            os.close(fd)
            raise
        replaced = self._entries.pop(path, None)
        if replaced is not None and not replaced.users:
            os.close(replaced.fd)
        self._entries[path] = entry
        return entry

    def _trim(self, limit: int) -> None:
        surplus = len(self._entries) - limit
        if surplus <= 0:
            return
        idle = [path for path, entry in self._entries.items() if not entry.users]
        for path in idle[:surplus]:
            os.close(self._entries.pop(path).fd)

    def close(self) -> None:
        """Close what nobody uses now; files open again when needed."""
        with self._lock:
            self._trim(0)


def _close_all(entries: OrderedDict[str, _Entry]) -> None:
    while entries:
        os.close(entries.popitem()[1].fd)


def read_exactly(fd: int, memory: memoryview, offset: int, path: str) -> None:
    """Fill ``memory`` with the bytes of a file from ``offset`` on.

    Raises:
        BadFile: The file ends before.
        DiskError: The system refused.
    """
    done, total = 0, memory.nbytes
    while done < total:
        try:
            count = os.preadv(fd, [memory[done : done + _STEP]], offset + done)
        except OSError as error:
            refuse(error, path, f"bytes {offset + done} and on could not be read")
        if not count:
            raise BadFile(
                f"{path} is truncated: bytes {offset} to {offset + total} were asked, and it ends at {offset + done}."
            )
        done += count


def refuse_pointer(path: str | os.PathLike[str]) -> None:
    """Raise if a file is what Git LFS leaves in the place of one that it has not fetched yet.

    Raises:
        BadFile: It is.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(_LONGEST_POINTER)
    except OSError:
        return  # whoever reads it says why it cannot be read
    if head.startswith(_POINTER):
        size = next((line[5:].decode("ascii", "replace") for line in head.splitlines() if line[:5] == b"size "), "")
        raise BadFile(
            f"{os.fspath(path)} is a Git LFS pointer: the file itself{f', {size} bytes,' if size else ''} was not "
            "fetched. Run `git lfs pull` in its repository, or download the file."
        )


def write_exactly(fd: int, memory: memoryview, offset: int, path: str | os.PathLike[str]) -> None:
    """Write all of ``memory`` at ``offset``.

    Raises:
        DiskError: The system refused; the disk may be full.
    """
    done, total = 0, memory.nbytes
    while done < total:
        try:
            done += os.pwrite(fd, memory[done : done + _STEP], offset + done)
        except OSError as error:
            refuse(error, path, "it could not be written")


def copy_exactly(
    source: int, source_offset: int, target: int, target_offset: int, length: int, *, paths: tuple[str, str]
) -> None:
    """Copy bytes from one file to another: by the kernel where it is fast, else through a small buffer.

    The kernel takes three times as long for bytes that move within their page; the buffer does not.

    Args:
        source: Descriptor to read from.
        source_offset: Where to begin.
        target: Descriptor to write to.
        target_offset: Where to write.
        length: How many bytes.
        paths: Names of both files, for messages.

    Raises:
        BadFile: The source ends before.
        DiskError: The system refused.
    """
    done = 0
    if (source_offset - target_offset) % PAGE == 0:
        done = _kernel_copy(source, source_offset, target, target_offset, length, paths)
    if done == length:
        return
    buffer = memoryview(bytearray(min(_BUFFER, length - done)))
    while done < length:
        part = buffer[: min(len(buffer), length - done)]
        read_exactly(source, part, source_offset + done, paths[0])
        write_exactly(target, part, target_offset + done, paths[1])
        done += len(part)


def _kernel_copy(
    source: int, source_offset: int, target: int, target_offset: int, length: int, paths: tuple[str, str]
) -> int:
    """Copy as much as the kernel does, and give the count; 0 at once where it cannot."""
    copy = getattr(os, "copy_file_range", None)
    done = 0
    while copy is not None and done < length:
        step = min(_STEP, length - done)
        try:
            count: int = copy(source, target, step, source_offset + done, target_offset + done)
        except OSError as error:
            if error.errno in _NO_KERNEL_COPY:
                break
            refuse(error, paths[1], f"bytes of {paths[0]} could not be copied into it")
        if not count:  # the end of the source; the plain copy words the error, or does better on odd file systems
            break
        done += count
    return done
