"""The header of a safetensors file: strict parsing, every offence named, and writing.

The rules are those of the format and of its reference library: whatever that refuses, this refuses. Nothing
here reads tensors or knows of shards.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import struct
import sys
from collections.abc import Mapping
from json.encoder import encode_basestring
from types import MappingProxyType
from typing import Any

import torch
from attrs import frozen

from fdsd.data.errors import BadFile, SpecMismatch, Unsupported, listing
from fdsd.data.spec import TensorSpec, dtype_name
from fdsd.data.strict_json import as_list, as_object, is_text, parse_object
from fdsd.storage.files import PAGE, FileStamp, read_exactly, refuse, refuse_pointer

__all__ = ["DTYPES", "MAX_HEADER", "Header", "build_header", "check_storable", "parse_header", "read_header"]

MAX_HEADER = 100_000_000
"""The longest header that the reference library reads."""
METADATA = "__metadata__"
_I64 = 2**63 - 1

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
    "F4": "float4_e2m1fn_x2",  # two elements a byte: torch halves the last dim
}
_FOREIGN = frozenset(["F6_E2M3", "F6_E3M2"])
"""Of the format, but unknown to every torch."""

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {code: getattr(torch, name) for code, name in _NAMES.items() if hasattr(torch, name)}
)
"""The format's dtypes, by their code in the header."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@frozen
class Header:
    """What the header of a safetensors file says: per tensor its spec, its first byte in the file, its bytes."""

    specs: Mapping[str, TensorSpec]
    offsets: Mapping[str, int]
    nbytes: Mapping[str, int]
    metadata: Mapping[str, str]


def read_header(path: str) -> tuple[Header, FileStamp]:
    """Read and check the header of a file.

    Returns:
        The header, and the stamp of the file that it was read from.

    Raises:
        BadFile: The file is no valid safetensors file; all offenders are named.
        Unsupported: A tensor has a dtype that this torch lacks.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe must not wait for a writer
    except OSError as error:
        refuse(error, path, "it could not be opened")
    try:
        stamp = FileStamp.of(fd, path)
        if stamp.size < 8:
            raise BadFile(f"{path} is no safetensors file: it has {stamp.size} bytes, fewer than the 8 of a length.")
        prefix = bytearray(8)
        read_exactly(fd, memoryview(prefix), 0, path)
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER or length > stamp.size - 8:
            refuse_pointer(path)
            raise BadFile(
                f"{path} is no safetensors file, or truncated: it claims a header of {length} bytes; "
                f"the file has {stamp.size}, and a header at most {MAX_HEADER}."
            )
        raw = bytearray(length)
        read_exactly(fd, memoryview(raw), 8, path)
    finally:
        os.close(fd)
    return parse_header(bytes(raw), stamp.size, path), stamp


def parse_header(raw: bytes, file_size: int, path: str) -> Header:
    """Parse and check a header.

    Args:
        raw: The header, without its length.
        file_size: The size of the whole file.
        path: The file, for messages.

    Raises:
        BadFile: The header breaks a rule of the format; all offenders are named.
        Unsupported: A tensor has a dtype that this torch lacks.

    >>> raw = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    >>> parse_header(raw, 8 + len(raw) + 8, "x.safetensors").offsets
    {'a': 69}
    """
    if sys.byteorder != "little":
        raise Unsupported("safetensors files are little-endian, and this machine is not.")
    entries = parse_object(raw, f"The header of {path}")
    metadata = _metadata(entries.pop(METADATA, None), path)
    problems: list[str] = []
    infos = {name: _info(name, entry, problems) for name, entry in entries.items()}
    _raise_for(problems, path)
    good = {name: info for name, info in infos.items() if info is not None}
    _refuse_foreign(good, path)
    start = 8 + len(raw)
    _check_cover(good, file_size - start, path)
    specs = {name: info.spec() for name, info in good.items()}
    offsets = {name: start + info.begin for name, info in good.items()}
    return Header(specs, offsets, {name: info.end - info.begin for name, info in good.items()}, metadata)


@frozen
class _Info:
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def nbytes(self) -> int | None:
        """The bytes that dtype and shape ask for; ``None`` if the last elements do not fill a byte."""
        numel = 1
        for size in self.shape:
            numel *= size
        if self.code == "F4":
            return numel // 2 if self.shape and self.shape[-1] % 2 == 0 else None
        if self.code in _FOREIGN:
            return numel * 6 // 8 if numel * 6 % 8 == 0 else None
        return numel * DTYPES[self.code].itemsize if self.code in DTYPES else self.end - self.begin

    def spec(self) -> TensorSpec:
        """The tensor as torch has it."""
        shape = self.shape
        if self.code == "F4":
            shape = (*shape[:-1], shape[-1] // 2)
        return TensorSpec(shape, DTYPES[self.code])


def _metadata(value: Any, path: str) -> dict[str, str]:
    if value is None:
        return {}
    made = as_object(value)
    if made is None:
        raise BadFile(f"The header of {path}: {METADATA} is not an object of strings.")
    odd = [key for key, text in made.items() if not isinstance(text, str)]
    if odd:
        raise BadFile(f"The header of {path}: {METADATA} has values that are no strings, at {listing(odd)}.")
    return made


def _info(name: str, entry: Any, problems: list[str]) -> _Info | None:
    """Read what the header says of one tensor; note the problem and give ``None`` if that is impossible."""
    fields = as_object(entry)
    if fields is None or fields.keys() != {"dtype", "shape", "data_offsets"}:
        problems.append(f"{name!r} must have exactly 'dtype', 'shape' and 'data_offsets'")
        return None
    code, shape, offsets = fields["dtype"], _sizes(fields["shape"]), _sizes(fields["data_offsets"])
    if not isinstance(code, str) or (code not in _NAMES and code not in _FOREIGN):
        problems.append(f"{name!r} has the unknown dtype {_short(code)}")
    elif shape is None or not _fits(shape):
        problems.append(f"{name!r} has {_short(fields['shape'])} for a shape")
    elif offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        problems.append(f"{name!r} has {_short(fields['data_offsets'])} for offsets")
    else:
        info = _Info(code, shape, *offsets)
        expected = info.nbytes()
        if expected == info.end - info.begin:
            return info
        wanted = "whose last elements fill no byte" if expected is None else f"{expected} bytes"
        problems.append(f"{name!r} is {code} {_short(list(shape))}, {wanted}, and has {info.end - info.begin} bytes")
    return None


def _sizes(value: Any) -> tuple[int, ...] | None:
    items = as_list(value)
    for item in items or ():
        if type(item) is not int or not 0 <= item <= _I64:
            return None
    return None if items is None else tuple(items)


def _fits(shape: tuple[int, ...]) -> bool:
    """Whether the sizes multiply without overflow, in order, as libraries multiply them."""
    return all(numel <= _I64 for numel in itertools.accumulate(shape, operator.mul))


def _short(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= 60 else text[:57] + "..."


def _raise_for(problems: list[str], path: str) -> None:
    if problems:
        shown = "; ".join(sorted(problems)[:10])
        rest = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise BadFile(f"The header of {path} is not valid: {shown}{rest}.")


def _refuse_foreign(infos: Mapping[str, _Info], path: str) -> None:
    foreign = [f"{name} ({info.code})" for name, info in infos.items() if info.code not in DTYPES]
    if foreign:
        raise Unsupported(
            f"{path} has tensors of dtypes that torch {torch.__version__} does not have: {listing(foreign)}."
        )


def _check_cover(infos: Mapping[str, _Info], size: int, path: str) -> None:
    """Tensors lie one behind the other, from the first byte of the data to the last byte of the file."""
    problems: list[str] = []
    end, last = 0, "the header"
    for begin, stop, name in sorted([(info.begin, info.end, name) for name, info in infos.items()]):
        if stop > size:
            problems.append(f"{name!r} at {begin} to {stop} lies beyond the file, which has {size} bytes of data")
        elif begin < end:
            problems.append(f"{name!r} at {begin} to {stop} overlaps {last}")
        elif begin > end:
            problems.append(f"before {name!r} at {begin} is a hole of {begin - end} bytes")
        if stop >= end:
            end, last = stop, repr(name)
    if not problems and end != size:
        problems.append(f"{size - end} bytes at the end of the file belong to no tensor")
    _raise_for(problems, path)


def check_storable(specs: Mapping[str, TensorSpec], path: str | os.PathLike[str]) -> None:
    """Raise unless the format can hold these tensors.

    Raises:
        Unsupported: Dtypes that the format lacks; all tensors are named.
        SpecMismatch: Names that are not text, or ``__metadata__``.
    """
    foreign = [f"{name} ({dtype_name(spec.dtype)})" for name, spec in specs.items() if spec.dtype not in _CODES]
    if foreign:
        raise Unsupported(
            f"{os.fspath(path)}: safetensors has no dtype for {listing(foreign)}. Cast them, or save a torch file."
        )
    halved = [name for name, spec in specs.items() if _CODES[spec.dtype] == "F4" and not spec.shape]
    if halved:
        raise Unsupported(f"{os.fspath(path)}: packed 4-bit tensors need a dim: {listing(halved)}.")
    odd = [name for name in specs if name == METADATA or not is_text(name)]
    if odd:
        raise SpecMismatch(f"{os.fspath(path)}: safetensors cannot hold tensors of these names: {listing(odd)}.")


def lay_out(specs: Mapping[str, TensorSpec]) -> dict[str, tuple[int, int]]:
    """Say where the bytes of each tensor begin and end, counted from the end of the header.

    The widest dtype comes first, so that every tensor is aligned; names of one width keep their order.

    >>> lay_out({"a": TensorSpec((3,), torch.int8), "b": TensorSpec((2,), torch.int64)})
    {'b': (0, 16), 'a': (16, 19)}
    """
    by_width: dict[int, list[tuple[str, int]]] = {}
    widths = {dtype: dtype.itemsize for dtype in {spec.dtype for spec in specs.values()}}
    for name, spec in specs.items():
        by_width.setdefault(widths[spec.dtype], []).append((name, spec.nbytes))
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    for width in sorted(by_width, reverse=True):
        for name, nbytes in by_width[width]:
            begin, end = end, end + nbytes
            spans[name] = begin, end
    return spans


def best_phase(spans: Mapping[str, tuple[int, int]], origins: Mapping[str, int]) -> int:
    """Choose where in a page the data should begin so that most bytes stay at their place in a page.

    Only these can be copied by the kernel (see ``files.copy_exactly``).

    Args:
        spans: Where the tensors will lie, counted from the end of the header.
        origins: Where the bytes of some of them lie in the files that they are copied from.

    Returns:
        A multiple of 8 below the size of a page.

    >>> best_phase({"a": (0, 10), "b": (10, 5000)}, {"a": 4096, "b": 4096 + 18})
    8
    """
    votes = {0: 0}
    for name in origins.keys() & spans.keys():
        begin, end = spans[name]
        phase = (origins[name] - begin) % PAGE
        if phase % 8 == 0:
            votes[phase] = votes.get(phase, 0) + end - begin
    return max(votes, key=lambda phase: (votes[phase], -phase))


def build_header(
    specs: Mapping[str, TensorSpec],
    metadata: Mapping[str, str],
    path: str | os.PathLike[str],
    *,
    origins: Mapping[str, int] | None = None,
) -> tuple[bytes, dict[str, int]]:
    """Word the header of a file with its length in front, and say where each tensor begins.

    Args:
        specs: The tensors; names keep their order.
        metadata: The entries of ``__metadata__``.
        path: The file, for messages.
        origins: Where the bytes of tensors lie in the files that they are copied from; the header is then
            filled up so that most bytes keep their place within a page (see ``best_phase``).

    Returns:
        The first bytes of the file, a multiple of 8, and per tensor the offset of its first byte in the file.

    Raises:
        Unsupported: The format cannot hold a dtype, the metadata, or so long a header.

    >>> raw, offsets = build_header({"a": TensorSpec((2,), torch.int8)}, {"format": "pt"}, "x.safetensors")
    >>> len(raw) % 8, offsets["a"] == len(raw)
    (0, True)
    """
    if sys.byteorder != "little":
        raise Unsupported("safetensors files are little-endian, and this machine is not.")
    check_storable(specs, path)
    odd = [key for key, value in metadata.items() if not _is_entry(key, value)]
    if odd:
        raise Unsupported(f"{os.fspath(path)}: metadata maps strings to strings; these do not: {listing(odd)}.")
    spans = lay_out(specs)
    entries = [f'"{METADATA}":{_compact(dict(metadata))}'] if metadata else []
    kinds = {kind: _kind(*kind) for kind in {(spec.dtype, spec.shape) for spec in specs.values()}}
    for name, spec in specs.items():
        begin, end = spans[name]
        entries.append(f'{encode_basestring(name)}:{kinds[spec.dtype, spec.shape]},"data_offsets":[{begin},{end}]}}')
    text = f"{{{','.join(entries)}}}".encode()
    if origins:
        text += b" " * ((best_phase(spans, origins) - 8 - len(text)) % PAGE)
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise Unsupported(
            f"{os.fspath(path)}: the header would have {len(text)} bytes, and readers accept {MAX_HEADER}. "
            "Use a smaller max_shard_size."
        )
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + spans[name][0] for name in specs}


def _is_entry(key: object, value: object) -> bool:
    return isinstance(key, str) and isinstance(value, str) and is_text(key) and is_text(value)


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _kind(dtype: torch.dtype, sizes: tuple[int, ...]) -> str:
    """Word how an entry begins, which many tensors share."""
    code, shape = _CODES[dtype], list(sizes)
    if code == "F4":
        shape[-1] *= 2
    return _compact({"dtype": code, "shape": shape})[:-1]
