"""A folder of safetensors files as Hugging Face keeps them: which files it has, and what its index says.

A folder has ``model.safetensors``, or an index that maps names to files, or loose files. Files may be links,
as in the Hugging Face cache. Nothing here reads tensors or writes files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import frozen

from fdsd.data.errors import BadFile, MissingFile, UnsafeFile, listing, plural
from fdsd.data.strict_json import as_object, parse_object
from fdsd.storage.files import FileStamp, read_exactly, refuse, refuse_pointer
from fdsd.storage.safetensors_header import Header
from fdsd.storage.shards import INDEX_NAME, SINGLE_NAME

__all__ = ["OLD", "Index", "checkpoint_files", "find_files", "index_text", "is_plain_name", "read_index"]

INDEX_SUFFIX = ".safetensors.index.json"
OLD = ".fdsd-old-"
"""How the hidden names of files begin that a save has moved out of the way."""
_MAX_INDEX = 1 << 30
_SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.safetensors")


@frozen
class Index:
    """What an index says: the file of each tensor, in its order."""

    path: Path
    files: Mapping[str, str]

    def paths(self) -> list[Path]:
        """The files, each once, in the order of their first tensor."""
        return [self.path.parent / name for name in dict.fromkeys(self.files.values())]

    def check(self, headers: Mapping[str, Header]) -> None:
        """Raise unless the files hold exactly what the index says.

        Args:
            headers: The header of each file, by its name.

        Raises:
            BadFile: Tensors that are missing, that the index does not name, or that stand in another file.
        """
        absent = [f"{name} in {file}" for name, file in self.files.items() if name not in headers[file].specs]
        found = [(name, file) for file, header in headers.items() for name in header.specs]
        extra = [f"{name} in {file}" for name, file in found if name not in self.files]
        twice = [f"{name} in {file}" for name, file in found if self.files.get(name, file) != file]
        problems = [
            f"{text}: {listing(items)}"
            for text, items in (
                ("the files lack", absent),
                ("the index does not name", extra),
                ("in another file than the index says", twice),
            )
            if items
        ]
        if problems:
            raise BadFile(f"{self.path} does not fit its files; {'; '.join(problems)}.")


def is_plain_name(name: str) -> bool:
    """Tell whether a file name stays in its folder: no separator, drive, ``..`` or zero byte.

    >>> is_plain_name("model.safetensors"), is_plain_name("../model.safetensors"), is_plain_name("C:x")
    (True, False, False)
    """
    return name not in ("", ".", "..") and not any(c in name for c in "/\\:\0")


def read_index(path: Path) -> Index:
    """Read and check an index.

    Raises:
        BadFile: It is malformed, has a key twice, or names files that are missing.
        UnsafeFile: It names files outside its folder.
    """
    files = parse_index(path)
    unsafe = {file for file in files.values() if not is_plain_name(file)}
    if unsafe:
        raise UnsafeFile(
            f"{path} names files that are not plain names in its own folder: {listing(unsafe)}. "
            "Put the files beside the index and name them without a path."
        )
    missing = [file for file in dict.fromkeys(files.values()) if not os.path.isfile(path.parent / file)]
    if missing:
        raise BadFile(
            f"{path} names {plural(len(missing), 'file')} that {'is' if len(missing) == 1 else 'are'} "
            f"missing or broken links: {listing(missing)}. Download them, or restore them."
        )
    return Index(path, files)


def parse_index(path: Path) -> dict[str, str]:
    """Parse an index, and give the file of each tensor.

    Raises:
        BadFile: It is malformed, or has a key twice.
    """
    weight_map = as_object(parse_object(_read_text(path), str(path)).get("weight_map"))
    if weight_map is None:
        raise BadFile(f"{path} has no 'weight_map' from names to files, so it is no index of safetensors files.")
    odd = [name for name, file in weight_map.items() if not isinstance(file, str)]
    if odd:
        raise BadFile(f"{path} has entries in its 'weight_map' that are no file names, at {listing(odd)}.")
    return weight_map


def _read_text(path: Path) -> bytes:
    stamp = FileStamp.of(path)
    if stamp.size > _MAX_INDEX:
        raise BadFile(f"{path} has {stamp.size} bytes, which is no index.")
    refuse_pointer(path)
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        refuse(error, path, "it could not be opened")
    try:
        raw = bytearray(stamp.size)
        read_exactly(fd, memoryview(raw), 0, str(path))
    finally:
        os.close(fd)
    return bytes(raw)


def index_text(files: Mapping[str, str], total_size: int) -> bytes:
    """Word an index; names keep their order.

    >>> parse_object(index_text({"a": "x.safetensors"}, 4), "it")["metadata"]
    {'total_size': 4}
    """
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(files)}
    return json.dumps(index, indent=2, ensure_ascii=False).encode("utf-8") + b"\n"


def names_in(folder: Path) -> list[str]:
    """List the names in a folder, in order.

    Raises:
        DiskError: The folder cannot be read.
    """
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        refuse(error, folder, "the folder could not be read")


def find_files(folder: Path) -> Index | list[Path]:
    """Find out which files make up the checkpoint in a folder.

    Returns:
        The index; or, in a folder without one, the files.

    Raises:
        BadFile: There is none, or it is not clear which; the message names what is there.
    """
    names = names_in(folder)
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX) and not name.startswith(".")]
    loose = [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]
    if len(indexes) > 1:
        raise BadFile(f"{folder} has several indexes: {listing(indexes)}. Open the one that you mean by its path.")
    if indexes:
        index = read_index(folder / indexes[0])
        if SINGLE_NAME in loose and SINGLE_NAME not in index.files.values():
            raise BadFile(
                f"{folder} has both {SINGLE_NAME!r} and {indexes[0]!r}, which are two checkpoints. "
                "Open the one that you mean by its path, and remove the other."
            )
        return index
    if SINGLE_NAME in loose:
        return [folder / SINGLE_NAME]
    _refuse_remains(folder, names)
    if not loose:
        raise MissingFile(f"{folder} has no file *.safetensors and no index *{INDEX_SUFFIX}.")
    _refuse_holes(folder, loose)
    return [folder / name for name in loose]


def _refuse_remains(folder: Path, names: Iterable[str]) -> None:
    moved = [name for name in names if name.startswith(OLD)]
    if moved:
        raise BadFile(
            f"{folder}: a save was cut off while it replaced the files here. The old ones have the hidden "
            f"names {listing(moved)}; rename them back, or save again with overwrite=True."
        )


def _refuse_holes(folder: Path, names: Iterable[str]) -> None:
    """Files that count themselves must all be there, when no index can tell."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            sets.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    missing = [
        f"{stem}-{number:05d}-of-{count:05d}.safetensors"
        for (stem, count), numbers in sets.items()
        for number in sorted(set(range(1, count + 1)) - numbers)[:11]
    ]
    if missing:
        raise BadFile(f"{folder} has no index, and lacks files of a numbered set: {listing(missing)}.")


def checkpoint_files(folder: Path) -> list[str]:
    """List the safetensors files and the index of the checkpoint that a new one in this folder replaces.

    A broken index is listed by itself; files that it names outside its folder, or that are no
    ``.safetensors``, never are.
    """
    made = [name for name in (INDEX_NAME, SINGLE_NAME) if os.path.lexists(folder / name)]
    if INDEX_NAME in made:
        try:
            files = set(parse_index(folder / INDEX_NAME).values())
        except BadFile:
            files = set[str]()
        made += sorted(
            file
            for file in files - {SINGLE_NAME}
            if is_plain_name(file) and file.endswith(".safetensors") and os.path.lexists(folder / file)
        )
    return made
