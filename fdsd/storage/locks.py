"""Locks on destinations: one save at a time, and what saves that were killed left behind is swept.

A lock is a hidden file beside what is written, held with ``flock``: the system lets go of it when its process ends,
however that is. Where a file system has no such locks, there are none, and nothing is swept. What is written under
which name is no business of this module.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import weakref
from pathlib import Path

from fdsd.data.errors import DestinationExists
from fdsd.storage.files import refuse

try:
    import fcntl
except ImportError:  # no such thing on this system
    fcntl = None  # type: ignore[assignment]

__all__ = ["DestinationLock"]

_NO_LOCKS = frozenset([errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL])


class DestinationLock:
    """The right to write one file, or the checkpoint in one folder; taken when it is made.

    Args:
        folder: The folder of what is written; it must be there.
        name: The name of the file; ``None`` for the checkpoint of the folder.

    Attributes:
        tag: What the hidden names of drafts for this destination have in them.

    Raises:
        DestinationExists: Somebody else is writing there.
        DiskError: The folder cannot be written.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> lock = DestinationLock(folder, "x.pt")
    >>> DestinationLock(folder, "x.pt")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    fdsd.data.errors.DestinationExists: ...x.pt is being written by another save right now. Wait until it is done, or \
choose another place.
    >>> lock.release()
    >>> list(folder.iterdir())
    []
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.tag = "folder" if name is None else hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
        self._folder = folder
        self._path = folder / f".fdsd-{self.tag}.lock"
        self._shown = folder if name is None else folder / name
        fd = self._take()
        self._let_go = weakref.finalize(self, _let_go, fd, str(self._path))
        try:
            if fd is not None:
                self._sweep()
        except BaseException:
            self.release()
            raise

    def _take(self) -> int | None:
        """Open the lock file and lock it, and once more if who held it has removed it meanwhile."""
        while True:
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                refuse(error, self._shown, "its folder cannot be written")
            try:
                if not _lock(fd):
                    _let_go(fd, str(self._path))
                    return None
                if _is_at(fd, str(self._path)):
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise DestinationExists(
                    f"{self._shown} is being written by another save right now. Wait until it is done, or choose "
                    "another place."
                ) from None
            except BaseException:
                _let_go(fd, str(self._path))
                raise
            os.close(fd)

    def _sweep(self) -> None:
        """Remove the drafts of saves to this destination that did not live to do it."""
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(self._folder)):
                if entry.name.startswith(f".fdsd-{self.tag}-") and entry.name.endswith(".tmp"):
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            shutil.rmtree(entry.path)
                        else:
                            os.unlink(entry.path)

    def release(self) -> None:
        """Let others write; may be called twice."""
        self._let_go()


def _lock(fd: int) -> bool:
    """Take the lock of a file, and tell whether there are locks here at all."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _let_go(fd: int | None, path: str) -> None:
    if fd is None:
        return
    try:
        try:
            _remove(fd, path)
        except BaseException:  # an interrupt comes once
            _remove(fd, path)
            raise
    finally:
        with contextlib.suppress(OSError):
            if fcntl is not None:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
        with contextlib.suppress(OSError):
            os.close(fd)


def _remove(fd: int, path: str) -> None:
    """Remove the lock file while it is held: who waits for it finds that it is gone."""
    with contextlib.suppress(OSError):
        if _is_at(fd, path):
            os.unlink(path)
