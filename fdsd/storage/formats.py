"""The formats that fdsd knows, and how it tells them apart: by content, by what a folder holds, by name.

Nothing here reads tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import frozen

from fdsd.data.errors import BadFile, MissingFile, Unsupported, listing
from fdsd.data.protocols import Source
from fdsd.storage.files import FileStamp, local_path, refuse, refuse_pointer
from fdsd.storage.hf_folder import INDEX_SUFFIX, names_in
from fdsd.storage.safetensors_source import SafetensorsSource
from fdsd.storage.torch_file import TorchFileSource

__all__ = ["FORMATS", "Format", "detect", "of_target", "open_source"]

_FOREIGN = (".gguf", ".h5", ".json", ".msgpack", ".npz", ".onnx")
"""Suffixes that nobody means as the name of a folder."""

_TORCH_NAMES = ("pytorch_model.bin", "model.pt", "model.pth", "adapter_model.bin")


@frozen
class Format:
    """A format: how its files are named, and how they are opened.

    Args:
        name: The word for ``format=``.
        suffixes: How names of its files end.
        open: Gives the source of a path; takes a key where a file can hold several state dicts.
        in_folders: Whether a checkpoint may be a folder of such files.
    """

    name: str
    suffixes: tuple[str, ...]
    open: Callable[[Path, str | None], Source]
    in_folders: bool


def _open_safetensors(path: Path, key: str | None) -> Source:
    if key is not None:
        raise Unsupported(f"{path}: a safetensors file holds one state dict, so key={key!r} has no meaning here.")
    return SafetensorsSource(path)


def _open_torch(path: Path, key: str | None) -> Source:
    return TorchFileSource(_torch_file_in(path) if os.path.isdir(path) else path, key=key)


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        known.name: known
        for known in (
            Format("safetensors", (".safetensors", INDEX_SUFFIX), _open_safetensors, in_folders=True),
            Format("torch", (".pt", ".pth", ".bin", ".ckpt"), _open_torch, in_folders=False),
        )
    }
)
"""The formats by name."""


def _known() -> str:
    return "; ".join(f"{known.name!r} ({', '.join(known.suffixes)})" for known in FORMATS.values())


def detect(path: str | os.PathLike[str], format: str | None = None) -> str:
    """Tell the format of a path.

    Args:
        path: A file or a folder that exists, or one that is to be written.
        format: The format's name, if it is known already.

    Returns:
        The format's name. What exists is judged by its content; what does not, by its suffix, a path without
        one being a folder of safetensors.

    Raises:
        Unsupported: No format fits, or there is none of this name; the message lists them.

    >>> detect("out/model.pt"), detect("out"), detect("x", format="torch")
    ('torch', 'safetensors', 'torch')
    """
    if format is not None:
        return _check(format)
    path = local_path(path)
    found = _of_folder(path) if os.path.isdir(path) else _of_content(path) if os.path.isfile(path) else None
    found = found or _of_name(path)
    if found is None:
        refuse_pointer(path)
        raise Unsupported(f"{path} has no format that is known: {_known()}. Give format= if you know it.")
    return found


def _check(format: str) -> str:
    if not isinstance(format, str) or format not in FORMATS:
        raise Unsupported(f"format={format!r} is not known. There are: {_known()}.")
    return format


def of_target(path: str | os.PathLike[str], format: str | None = None) -> tuple[str, bool]:
    """Tell what is meant by a path that is to be written, whatever stands there now.

    Args:
        path: The path. Upper and lower case are the same in a suffix.
        format: The format's name; by default the suffix tells it, and a path without one of ours is a folder of
            safetensors.

    Returns:
        The format's name, and whether one file is meant; else a folder is.

    Raises:
        Unsupported: There is no format of this name; or the suffix is that of a format which is not written here.

    >>> of_target("x.SAFETENSORS"), of_target("x.pt"), of_target("llama-3.1"), of_target("x", "torch")
    (('safetensors', True), ('torch', True), ('safetensors', False), ('torch', True))
    """
    path = local_path(path)
    name = path.name.lower()
    if name.endswith(INDEX_SUFFIX) or (format is None and name.endswith(_FOREIGN)):
        raise Unsupported(
            f"{path} ends in {path.suffix!r}, a format that is not written here. Name x.safetensors, x.pt or a "
            "folder; format= says which is meant by another name."
        )
    told = next((known.name for known in FORMATS.values() if name.endswith(known.suffixes)), None)
    kind = (told or "safetensors") if format is None else _check(format)
    return kind, told is not None or not FORMATS[kind].in_folders


def _of_name(path: Path) -> str | None:
    for known in FORMATS.values():
        if path.name.lower().endswith(known.suffixes):
            return known.name
    return None if path.suffix or os.path.isfile(path) else "safetensors"


def _of_content(path: Path) -> str | None:
    size = FileStamp.of(path).size
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        refuse(error, path, "it could not be opened")
    # First safetensors: the length of its header may look like the beginning of a pickle.
    length = int.from_bytes(head[:8], "little")
    if len(head) > 8 and head[8:9] in b"{ \t\r\n" and length <= size - 8:
        return "safetensors"
    if head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        return "torch"
    return None


def _of_folder(path: Path) -> str | None:
    names = [name for name in names_in(path) if not name.startswith(".")]
    if any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in names):
        return "safetensors"
    if any(name in _TORCH_NAMES for name in names):
        return "torch"
    return None


def _torch_file_in(folder: Path) -> Path:
    found = [name for name in _TORCH_NAMES if os.path.isfile(folder / name)]
    if not found:
        raise MissingFile(f"{folder} has none of the torch files {listing(_TORCH_NAMES)}; open the file by its path.")
    if len(found) > 1:
        raise BadFile(f"{folder} has several torch files: {listing(found)}. Open the one that you mean by its path.")
    return folder / found[0]


def open_source(path: str | os.PathLike[str], *, format: str | None = None, key: str | None = None) -> Any:
    """Open a path that exists as a source.

    Args:
        path: A file or a folder.
        format: The format's name; by default it is detected.
        key: Which state dict of a file that holds several.

    Raises:
        MissingFile: Nothing is there.
        Unsupported: No format fits.
        BadFile: The files are truncated, corrupt or contradict each other.
    """
    path = local_path(path)
    if not os.path.lexists(path):
        raise MissingFile(f"{path} is not there.")
    return FORMATS[detect(path, format)].open(path, key)
