"""Small safetensors files and indexes that break a rule, built from text so that each says which one.

``HEADERS`` maps a name to (header, data); ``STRICTER`` names those that the reference library opens all the
same, with the reason why fdsd does not. Nothing here opens them.
"""

from __future__ import annotations

import json
import struct

import torch


def tensor(dtype: str = "F32", shape: str = "[2]", offsets: str = "[0,8]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


def one(**changes: str) -> str:
    return f'{{"a":{tensor(**changes)}}}'


def two(second: str, first: str = tensor()) -> str:
    return f'{{"a":{first},"b":{second}}}'


def with_metadata(text: str) -> str:
    return f'{{"__metadata__":{text},"a":{tensor()}}}'


def with_field(field: str) -> str:
    return f'{{"a":{{"dtype":"F32",{field},"shape":[2],"data_offsets":[0,8]}}}}'


HEADERS: dict[str, tuple[str | bytes, int]] = {
    "no header at all": ("", 0),
    "a list": ("[]", 0),
    "a number": ("7", 0),
    "two objects": ("{}{}", 0),
    "not UTF-8": (b'{"\xff":' + tensor().encode() + b"}", 8),
    "a byte order mark": (b"\xef\xbb\xbf" + one().encode(), 8),
    "half a surrogate pair": (f'{{"\\ud800":{tensor()}}}', 8),
    "half a surrogate pair in metadata": (with_metadata('{"x":"\\udfff"}'), 8),
    "a control character in a name": (f'{{"a\nb":{tensor()}}}', 8),
    "a zero byte behind": (one() + "\0", 8),
    "NaN": (with_field('"x":NaN'), 8),
    "nested 1,000 deep": (with_field('"x":' + "[" * 1000 + "]" * 1000), 8),
    "nested 100,000 deep": ('{"a":' + "[" * 100_000, 8),
    "a number of 5,000 digits": (one(offsets="[0," + "9" * 5000 + "]"), 8),
    "a name twice, same bytes": (f'{{"a":{tensor()},"a":{tensor()}}}', 8),
    "a name twice, other bytes": (f'{{"a":{tensor()},"a":{tensor(offsets="[8,16]")}}}', 16),
    "metadata twice": (f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{tensor()}}}', 8),
    "a metadata key twice": (with_metadata('{"x":"1","x":"2"}'), 8),
    "dtype twice": (with_field('"dtype":"F32"'), 8),
    "an unknown field": (with_field('"x":1'), 8),
    "no shape": ('{"a":{"dtype":"F32","data_offsets":[0,8]}}', 8),
    "a list for a tensor": ('{"a":["F32",[2],[0,8]]}', 8),
    "null for a tensor": ('{"a":null}', 0),
    "a number in metadata": (with_metadata('{"x":1}'), 8),
    "a list for metadata": (with_metadata("[]"), 8),
    "a string for metadata": (with_metadata('"x"'), 8),
    "an unknown dtype": (one(dtype="F99"), 8),
    "a dtype in small letters": (one(dtype="f32"), 8),
    "complex128": (one(dtype="C128", shape="[1]", offsets="[0,16]"), 16),
    "a dtype of 6 bits": (one(dtype="F6_E2M3", shape="[4]", offsets="[0,3]"), 3),
    "4 bits, odd rows": (one(dtype="F4", shape="[2,3]", offsets="[0,3]"), 3),
    "4 bits, odd in all": (one(dtype="F4", shape="[3,3]", offsets="[0,4]"), 4),
    "4 bits, no dim": (one(dtype="F4", shape="[]", offsets="[0,0]"), 0),
    "a float size": (one(shape="[2.0]"), 8),
    "a size with an exponent": (one(shape="[2e0]"), 8),
    "true for a size": (one(shape="[true,2]"), 8),
    "a string for a size": (one(shape='["2"]'), 8),
    "a size below 0": (one(shape="[-2]"), 8),
    "minus 0": (one(shape="[-0]", offsets="[0,0]"), 0),
    "a size of 2**64": (one(shape="[18446744073709551616,0]", offsets="[0,0]"), 0),
    "sizes that overflow": (one(shape="[9223372036854775807,9223372036854775807,0]", offsets="[0,0]"), 0),
    "sizes that torch cannot hold": (one(shape="[0,18446744073709551615]", offsets="[0,0]"), 0),
    "one offset": (one(offsets="[0]"), 8),
    "three offsets": (one(offsets="[0,8,8]"), 8),
    "offsets backwards": (one(offsets="[8,0]"), 8),
    "an offset of 2**64": (one(offsets="[0,18446744073709551616]"), 8),
    "too few bytes for the shape": (one(shape="[3]"), 8),
    "too many bytes for the shape": (one(shape="[1]"), 8),
    "data cut": (one(), 7),
    "no data": (one(), 0),
    "bytes behind the data": (one(), 9),
    "an overlap": (two(tensor(offsets="[4,12]")), 12),
    "the same bytes twice": (two(tensor(offsets="[0,8]")), 8),
    "an empty tensor inside another": (two(tensor(shape="[0]", offsets="[4,4]")), 8),
    "a hole": (two(tensor(offsets="[12,20]")), 20),
    "a hole at the beginning": (one(offsets="[4,12]"), 12),
    "an empty tensor beyond the end": (two(tensor(shape="[0]", offsets="[9,9]")), 8),
}

STRICTER = {
    "a name twice, same bytes": "one of the two would be lost",
    "a metadata key twice": "one of the two would be lost",
    "an unknown field": "it would be lost on the way to another file",
    "a list for a tensor": "the format says an object",
    "a dtype of 6 bits": "torch has no such dtype; the library fails when the tensor is asked for",
    "4 bits, odd rows": "torch packs two elements a byte; the library fails when the tensor is asked for",
    "sizes that torch cannot hold": "the library fails when the tensor is asked for",
}

LATER = {"F4": "float4_e2m1fn_x2", "F8_E8M0": "float8_e8m0fnu"}
"""Dtypes of the format that came to torch late: a file of them is fine, but an old torch has no tensor for it."""

FINE: dict[str, tuple[str, int]] = {
    "nothing": ("{}", 0),
    "one tensor": (one(), 8),
    "white space around": (f" \n{one()}\t\r\n ", 8),
    "metadata null": (with_metadata("null"), 8),
    "an empty name": (f'{{"":{tensor()}}}', 8),
    "a zero byte in a name": (f'{{"a\\u0000b":{tensor()}}}', 8),
    "a surrogate pair": (f'{{"\\ud83d\\ude00":{tensor()}}}', 8),
    "no dim": (one(shape="[]", offsets="[0,4]"), 4),
    "empty tensors at both ends": (
        f'{{"x":{tensor(shape="[0,3]", offsets="[0,0]")},"a":{tensor()},"y":{tensor(shape="[0]", offsets="[8,8]")}}}',
        8,
    ),
    "another order than the data": (f'{{"b":{tensor(offsets="[8,16]")},"a":{tensor()}}}', 16),
    "not aligned": (f'{{"a":{tensor("U8", "[1]", "[0,1]")},"b":{tensor("F32", "[1]", "[1,5]")}}}', 5),
    "4 bits": (one(dtype="F4", shape="[2,4]", offsets="[0,4]"), 4),
    "a large size beside 0": (one(shape="[9223372036854775807,0]", offsets="[0,0]"), 0),
}


def absent() -> set[str]:
    """Give the dtypes of the format that this torch lacks."""
    return {code for code, name in LATER.items() if not hasattr(torch, name)}


def lacks(case: str) -> bool:
    """Whether this torch lacks the dtype of a file that is fine."""
    return any(f'"{code}"' in FINE[case][0] for code in absent())


def build(header: str | bytes, data: int, length: int | None = None) -> bytes:
    """Give the bytes of a file with this header and so many bytes of data, all different as far as they can be."""
    raw = header if isinstance(header, bytes) else header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(i % 251 + 1 for i in range(data))


LENGTHS = {
    "a header longer than the file": build("{}", 0, 10),
    "a header of 2**63": build("{}", 0, 2**63),
    "a header of 2**64 - 1": build("{}", 0, 2**64 - 1),
    "a header over the limit": build("{}", 0, 100_000_001),
    "an empty file": b"",
    "seven bytes": bytes(7),
    "eight zeros": bytes(8),
}

INDEXES: dict[str, str] = {
    "not JSON": "{",
    "a list": "[]",
    "no weight_map": '{"metadata":{}}',
    "weight_map is a list": '{"weight_map":["a"]}',
    "a file that is no string": '{"weight_map":{"a":1}}',
    "a name twice": '{"weight_map":{"a":"x.safetensors","a":"x.safetensors"}}',
    "weight_map twice": '{"weight_map":{"a":"x.safetensors"},"weight_map":{"a":"x.safetensors"}}',
    "a file that is missing": '{"weight_map":{"a":"x.safetensors","b":"gone.safetensors"}}',
    "a tensor that is missing": '{"weight_map":{"a":"x.safetensors","b":"x.safetensors"}}',
    "a tensor that is not named": '{"weight_map":{"a":"x.safetensors"}}',
    "a folder": '{"weight_map":{"a":"folder"}}',
}

UNSAFE = [
    "../x.safetensors",
    "/etc/x.safetensors",
    "sub/x.safetensors",
    "sub\\x.safetensors",
    "..",
    ".",
    "",
    "C:x.safetensors",
    "x.safetensors\0",
]


def unsafe_index(file: str) -> str:
    return json.dumps({"weight_map": {"a": file}})
