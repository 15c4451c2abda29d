"""What stands beside the weights of a checkpoint: configuration, tokenizer, licences. Copied and edited as a whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from attrs import define, field

from fdsd.data.errors import BadFile, DestinationExists, Unsupported, listing
from fdsd.storage.drafts import hidden_name, make_folder, remove_folders
from fdsd.storage.files import MissingFile, refuse

__all__ = ["Assets"]

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
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


@define
class Assets:
    """Files on their way into a folder: staged under hidden names, then renamed into place."""

    folder: Path | None
    _staged: list[tuple[Path, Path]] = field(factory=list)
    _folders: list[Path] = field(factory=list)

    @classmethod
    def gather(cls, assets: Paths, config: Mapping[str, Any] | None, folder: Path | None, *, overwrite: bool) -> Assets:
        """Stage copies of the assets, and an edited ``config.json``.

        Args:
            assets: A folder, or files.
            config: Entries to set in ``config.json``.
            folder: Where they go; ``None`` if the destination is a single file, which takes none.
            overwrite: Whether files of the same name may be replaced.
        """
        if folder is None:
            if assets is not None or config is not None:
                raise Unsupported("save: assets and config go beside the weights in a folder; name a folder as path.")
            return cls(None)
        files = dict(_find(assets))
        if config is not None:
            files.setdefault("config.json", folder / "config.json")
        taken = [
            name
            for name, source in files.items()
            if os.path.lexists(folder / name) and not _is_same(source, folder / name)
        ]
        if config is not None and (folder / "config.json").exists():
            taken.append("config.json")
        if taken and not overwrite:
            raise DestinationExists(f"{folder} has {listing(set(taken))}; give overwrite=True to replace them.")
        made = cls(folder)
        try:
            made._stage(files, config)
        except BaseException:
            made.discard()
            raise
        return made

    def _stage(self, files: Mapping[str, Path], config: Mapping[str, Any] | None) -> None:
        assert self.folder is not None
        edited = None if config is None else _edited(files["config.json"], config)
        for name, source in files.items():
            target = self.folder / name
            is_edited = name == "config.json" and edited is not None
            if not is_edited and _is_same(source, target):
                continue
            self._folders = [*make_folder(target.parent), *self._folders]
            aside = target.parent / hidden_name()
            self._staged.append((aside, target))
            try:
                if is_edited:
                    aside.write_text(edited or "", encoding="utf-8")
                else:
                    shutil.copyfile(source, aside)
            except OSError as error:
                refuse(error, target, "it could not be written")

    def place(self) -> None:
        """Rename all staged files into place."""
        while self._staged:
            aside, target = self._staged[0]
            os.replace(aside, target)
            del self._staged[0]
        self._folders = []

    def discard(self) -> None:
        """Remove what was staged and not placed."""
        for aside, _ in self._staged:
            aside.unlink(missing_ok=True)
        remove_folders(self._folders)

    def __enter__(self) -> Assets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def _find(assets: Paths) -> Iterator[tuple[str, Path]]:
    """List the files to copy, by their name in the new folder; weights and hidden files are left out."""
    if assets is None:
        return
    given = [assets] if isinstance(assets, str | os.PathLike) else list(assets)
    for item in map(Path, given):
        if item.is_dir():
            for found in sorted(item.rglob("*")):
                name = found.relative_to(item)
                if found.is_file() and not found.name.endswith(_WEIGHTS) and not _is_hidden(name):
                    yield str(name), found
        elif item.is_file():
            yield item.name, item
        else:
            raise MissingFile(f"assets: {item} is not there. Name a folder, or files.")


def _is_hidden(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def _is_same(a: Path, b: Path) -> bool:
    return b.exists() and a.exists() and os.path.samefile(a, b)


def _edited(path: Path, config: Mapping[str, Any]) -> str:
    """Give the text of ``config.json`` with entries set."""
    current: Any = {}
    if path.exists():
        try:
            current = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadFile(f"{path}: it is no JSON and cannot be edited: {error}.") from error
        if not isinstance(current, dict):
            raise BadFile(f"{path}: it holds {type(current).__name__}, not an object, and cannot be edited.")
    try:
        return json.dumps({**current, **config}, indent=2) + "\n"
    except TypeError as error:
        raise Unsupported(f"config: {error}. Give what JSON can hold.") from error
