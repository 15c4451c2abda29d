"""Putting the finished files of a checkpoint in place: all of them, or none.

The last rename is of the *root*, the file by which readers find the checkpoint: the index, or the one file.

* No old file in the way of the other new ones: those are renamed first, then the root. Until then readers
  find the old checkpoint, whole; from then on the new one.
* New files have names of old ones: the old root and those files are first renamed to hidden names
  (``.fdsd-old-...``), so that no reader can see a mixture; then the new files come, the root last. A crash of
  the machine within these renames leaves a folder without a root, which no reader opens; old and new files
  are all there, under hidden names. An error or an interrupt undoes the renames.
* Files of the old checkpoint that are not part of the new one are removed only after the new root stands.
  After a crash before that, both checkpoints are whole, and opening the folder asks which is meant.

Nothing here knows what the files hold.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from fdsd.data.errors import DiskError, listing
from fdsd.storage.drafts import Draft, hidden_name, sync_folder
from fdsd.storage.files import refuse

__all__ = ["Placement"]


@frozen
class Placement:
    """What has to be renamed and removed so that new files replace an old checkpoint in one folder.

    Args:
        folder: The folder of all of these.
        parts: Finished drafts of the files that the root leads to.
        root: The finished draft of the file by which readers find the checkpoint.
        old_roots: Names that may be the root of the old checkpoint.
        old: Names of all files of the old checkpoint.
        durable: Whether renames must be on the disk in their order.
    """

    folder: Path
    parts: Sequence[Draft]
    root: Draft
    old_roots: Sequence[str] = ()
    old: Sequence[str] = ()
    durable: bool = True

    def run(self) -> None:
        """Do it.

        Raises:
            DiskError: A rename failed, and the old checkpoint stands as before; or files of the old one could
                not be removed, and the new one stands.
        """
        moved: list[tuple[Path, Path]] = []
        try:
            self._move_away(moved)
            for part in self.parts:
                part.place()
            self._sync()
            self.root.place()
        except BaseException:
            if self.root.is_placed:  # an interrupt may come just after the rename
                self._clean(moved)
            else:
                self._undo(moved)
            raise
        try:
            self._sync()
        finally:
            self._clean_surely(moved)

    def _move_away(self, moved: list[tuple[Path, Path]]) -> None:
        clashes = [part.path.name for part in self.parts if os.path.lexists(part.path)]
        if not clashes:
            return
        for name in dict.fromkeys([*self.old_roots, *clashes]):
            path = self.folder / name
            if os.path.lexists(path):
                hidden = self.folder / hidden_name(f"-{name}", "old-")
                moved.append((hidden, path))
                try:
                    os.rename(path, hidden)
                except OSError as error:
                    refuse(error, path, "the old file could not be renamed out of the way")
        self._sync()

    def _undo(self, moved: Sequence[tuple[Path, Path]]) -> None:
        for part in self.parts:
            if part.is_placed:
                with contextlib.suppress(OSError):
                    os.unlink(part.path)
        for hidden, path in reversed(moved):
            if os.path.lexists(hidden):
                with contextlib.suppress(OSError):
                    os.rename(hidden, path)

    def _clean_surely(self, moved: Sequence[tuple[Path, Path]]) -> None:
        """Clean once more if an interrupt comes between: old and new roots side by side could not be opened."""
        try:
            self._clean(moved)
        except DiskError:
            raise
        except BaseException:
            self._clean(moved)
            raise

    def _clean(self, moved: Sequence[tuple[Path, Path]]) -> None:
        new = {self.root.path.name, *[part.path.name for part in self.parts]}
        stale = [self.folder / name for name in self.old if name not in new]
        kept: list[str] = []
        for path in [hidden for hidden, _ in moved] + stale:
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError:
                kept.append(path.name)
        if kept:
            raise DiskError(
                f"{self.folder}: the new checkpoint stands, but these old files could not be removed: "
                f"{listing(kept)}. Remove them by hand."
            )

    def _sync(self) -> None:
        if self.durable:
            sync_folder(self.folder)
