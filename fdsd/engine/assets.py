"""What stands beside the weights of a checkpoint: configuration, tokenizer, licences. Copied and edited as a whole.

Files are staged under hidden names and renamed into place just before the weights are; whatever fails, until the
weights stand too, undoes the renames. Nothing here knows what weights are, but for their names.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from attrs import define, field

from fdsd.data import strict_json
from fdsd.data.errors import BadFile, DestinationExists, DiskError, MissingFile, NameConflict, Unsupported, listing
from fdsd.data.values import is_dict, is_mapping
from fdsd.storage.drafts import hidden_name, make_folder, mode_at, remove_folders, sync_folder
from fdsd.storage.files import local_path, refuse
from fdsd.storage.hf_folder import INDEX_SUFFIX

__all__ = ["Assets"]

_OURS = (".safetensors", INDEX_SUFFIX)
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".index.json",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".distcp",
)
_CONFIG = "config.json"
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


@define
class Assets:
    """Files on their way into a folder: staged under hidden names, then renamed into place.

    A context manager: leaving it by an exception undoes what ``place`` did.
    """

    folder: Path | None
    _staged: list[tuple[Path, Path]] = field(factory=list)
    _placed: list[tuple[Path, Path]] = field(factory=list)
    _moved: list[tuple[Path, Path]] = field(factory=list)
    _folders: list[Path] = field(factory=list)

    @classmethod
    def gather(cls, assets: Paths, config: Mapping[str, Any] | None, folder: Path | None, *, overwrite: bool) -> Assets:
        """Stage copies of the assets, and an edited ``config.json``.

        Args:
            assets: A folder, or files.
            config: Entries to set in ``config.json``.
            folder: Where they go; ``None`` if the destination is a single file, which takes none.
            overwrite: Whether files of the same name may be replaced.

        Raises:
            Unsupported: The destination is a single file; weights are among the files; the entries are no JSON.
            NameConflict: Two assets would have one name.
            DestinationExists: Something of that name is there, and ``overwrite`` is false; or it is a folder.
            MissingFile: An asset is not there.
        """
        if folder is None:
            if assets is not None or config is not None:
                raise Unsupported("save: assets and config go beside the weights in a folder; name a folder as path.")
            return cls(None)
        if config is not None and not is_mapping(config):
            raise Unsupported(f"save: config maps names to entries of {_CONFIG}; it is no {type(config).__name__}.")
        files = _collect(assets, folder)
        if config is not None:
            files.setdefault(_CONFIG, folder / _CONFIG)
        _refuse_targets(files, folder, overwrite, is_edited=config is not None)
        made = cls(folder)
        try:
            made._stage(files, config)
        except BaseException:
            made.discard()
            raise
        return made

    def _stage(self, files: Mapping[str, Path], config: Mapping[str, Any] | None) -> None:
        assert self.folder is not None
        edited = None if config is None else _edited(files[_CONFIG], config)
        for name, source in files.items():
            target = self.folder / name
            text = edited if name == _CONFIG else None
            if text is None and _is_same(source, target):
                continue
            self._folders = [*make_folder(target.parent), *self._folders]
            aside = target.parent / hidden_name()
            self._staged.append((aside, target))
            try:
                _write(source, aside, target, text)
            except OSError as error:
                refuse(error, target, f"it could not be written from {source}")

    def place(self) -> None:
        """Rename all staged files into place, or none; what they replace is kept until the end.

        Raises:
            DiskError: A rename failed; what stood there before stands.
        """
        target = self.folder
        try:
            while self._staged:
                aside, target = self._staged[0]
                if os.path.lexists(target):
                    hidden = target.parent / hidden_name(f"-{target.name}", "old-")
                    self._moved.append((hidden, target))
                    os.rename(target, hidden)
                self._placed.append((aside, target))
                os.rename(aside, target)
                del self._staged[0]
        except OSError as error:
            self._undo()
            refuse(error, target or "", "it could not be renamed into place")
        except BaseException:
            self._undo()
            raise
        if self._moved:
            for folder in {target.parent for _, target in self._moved}:
                sync_folder(folder)

    def _undo(self) -> None:
        for aside, target in self._placed:
            if not os.path.lexists(aside):
                with contextlib.suppress(OSError):
                    os.unlink(target)
        for hidden, target in reversed(self._moved):
            if os.path.lexists(hidden):
                with contextlib.suppress(OSError):
                    os.rename(hidden, target)
        self._placed, self._moved = [], []

    def discard(self) -> None:
        """Undo what was placed, and remove what was staged."""
        self._undo()
        for aside, _ in self._staged:
            with contextlib.suppress(OSError):
                aside.unlink()
        remove_folders(self._folders)

    def finish(self) -> None:
        """Remove what was replaced: the new files are to stay.

        Raises:
            DiskError: Some of it could not be removed.
        """
        moved, self._moved, self._placed, self._folders = self._moved, [], [], []
        kept: list[str] = []
        for hidden, _ in moved:
            try:
                os.unlink(hidden)
            except OSError:
                kept.append(hidden.name)
        if kept:
            raise DiskError(
                f"{self.folder}: all new files stand, but these old ones could not be removed: {listing(kept)}. "
                "Remove them by hand."
            )

    def __enter__(self) -> Assets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        self.discard()


def _write(source: Path, aside: Path, target: Path, text: str | None) -> None:
    """Write a file under its hidden name, as durable and with the permissions of what it will replace."""
    if text is None:
        shutil.copyfile(source, aside)
    else:
        aside.write_text(text, encoding="utf-8")
    mode = mode_at(target)
    if mode is not None:
        with contextlib.suppress(OSError):  # some file systems have no permissions
            aside.chmod(mode)
        fd = os.open(aside, os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _collect(assets: Paths, folder: Path) -> dict[str, Path]:
    """Find the files by their name in the new folder; names must be distinct, and none may be the weights'."""
    files: dict[str, Path] = {}
    twice: list[str] = []
    weights: list[str] = []
    for name, source in _find(assets, folder):
        if name in files and not _is_same(files[name], source):
            twice.append(f"{name} from {files[name].parent} and {source.parent}")
        if name.lower().endswith(_OURS):
            weights.append(str(source))
        files[name] = source
    if weights:
        raise Unsupported(f"save: assets go beside the new weights; these are weights themselves: {listing(weights)}.")
    if twice:
        raise NameConflict(f"save: several assets would have one name: {listing(twice)}. Leave all but one out.")
    return files


def _find(assets: Paths, folder: Path) -> Iterator[tuple[str, Path]]:
    """List the files to copy, by their name in the new folder; weights and hidden files of folders are left out."""
    if assets is None:
        return
    given = [assets] if isinstance(assets, str | os.PathLike) else list(assets)
    for item in map(local_path, given):
        if os.path.isdir(item):
            yield from _walk(item, os.path.realpath(folder))
        elif _is_file(item):
            yield item.name, item
        elif os.path.exists(item):
            raise BadFile(f"assets: {item} is neither a file nor a folder.")
        else:
            raise MissingFile(f"assets: {item} is not there. Name a folder, or files.")


def _walk(item: Path, destination: str) -> Iterator[tuple[str, Path]]:
    """List the files below a folder; the destination may lie in it, and is no part of it."""

    def fail(error: OSError) -> NoReturn:
        refuse(error, error.filename or item, "these assets could not be read")

    is_inside = destination != os.path.realpath(item)
    for base, folders, names in os.walk(item, onerror=fail):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and not (is_inside and os.path.realpath(Path(base, name)) == destination)
        )
        for name in sorted(names):
            found = Path(base, name)
            if not name.startswith(".") and not name.endswith(_WEIGHTS) and _is_file(found):
                yield str(found.relative_to(item)), found


def _is_file(path: Path) -> bool:
    """Whether there is a file; a broken link is none, and what cannot be looked at is an error."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False
    except OSError as error:
        refuse(error, path, "this asset could not be read")


def _refuse_targets(files: Mapping[str, Path], folder: Path, overwrite: bool, *, is_edited: bool) -> None:
    """Raise if something stands where files will go that may not be replaced."""
    targets = {name: folder / name for name in files}
    folders = [name for name, target in targets.items() if target.is_dir() and not target.is_symlink()]
    if folders:
        raise DestinationExists(f"{folder} has folders where assets would go: {listing(folders)}. Remove them.")
    taken = [
        name
        for name, target in targets.items()
        if os.path.lexists(target) and not (_is_same(files[name], target) and not (is_edited and name == _CONFIG))
    ]
    if taken and not overwrite:
        raise DestinationExists(f"{folder} has {listing(taken)}; give overwrite=True to replace them.")


def _is_same(a: Path, b: Path) -> bool:
    return b.exists() and a.exists() and os.path.samefile(a, b)


def _edited(path: Path, config: Mapping[str, Any]) -> str:
    """Give the text of ``config.json`` with entries set."""
    current: dict[str, Any] = {}
    if path.exists():
        try:
            raw = path.read_bytes()
        except OSError as error:
            refuse(error, path, "it could not be read")
        parsed = strict_json.parse(raw, f"{path}, which is to be edited,")
        if not is_dict(parsed):
            raise BadFile(f"{path}: it holds a {type(parsed).__name__}, not an object, and cannot be edited.")
        current = parsed
    return strict_json.dump({**current, **config}, "save: config", indent=2) + "\n"
