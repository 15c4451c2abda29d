"""JSON for plain values, exact both ways: tuples are no lists, and infinities, NaN and 0-dim tensors survive.

A value that JSON lacks is an object with one key that begins with ``$``. Nothing here knows what values mean.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fdsd.data import strict_json
from fdsd.data.errors import BadFile, listing
from fdsd.data.spec import dtype_name
from fdsd.data.values import is_dict, is_sequence

__all__ = ["decode", "dtype_of", "encode", "parse"]

_LONG = 1 << 12  # bits; Python refuses to read very long decimal numbers


def encode(value: object, where: str, problems: list[str], *, tensors: bool = True) -> Any:
    """Give the JSON form of a value; what has none is added to ``problems``, with its place and type.

    >>> encode({"betas": (0.9, float("inf"))}, "options", [])
    {'betas': {'$tuple': [0.9, {'$float': 'inf'}]}}
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, int) and kind is int:
        return value if value.bit_length() < _LONG else {"$int": hex(value)}
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if is_sequence(value) and kind in (list, tuple):
        items = [encode(item, f"{where}[{i}]", problems, tensors=tensors) for i, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if is_dict(value) and kind is dict:
        return _encode_dict(value, where, problems, tensors)
    if isinstance(value, torch.Tensor) and kind is torch.Tensor and tensors:
        return _encode_tensor(value, where, problems)
    problems.append(f"{where} is a {kind.__module__}.{kind.__qualname__}")
    return None


def _encode_dict(value: dict[Any, Any], where: str, problems: list[str], tensors: bool) -> Any:
    def inner(item: object, key: object) -> Any:
        return encode(item, f"{where}[{key!r}]", problems, tensors=tensors)

    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: inner(item, key) for key, item in value.items()}
    pairs = [[encode(key, f"{where}, the key {key!r}", problems, tensors=False), inner(item, key)]
             for key, item in value.items()]  # fmt: skip
    return {"$dict": pairs}


def _encode_tensor(value: torch.Tensor, where: str, problems: list[str]) -> Any:
    try:
        plain = value.detach().resolve_conj().resolve_neg().cpu()
        numbers: Any = plain.reshape(1).view(torch.uint8)
        raw = bytes(numbers.tolist())
    except (RuntimeError, NotImplementedError, ValueError):  # more than one element, meta, sparse, quantized
        problems.append(f"{where} is a tensor of {dtype_name(value.dtype)}{list(value.shape)} on {value.device.type}")
        return None
    if value.ndim:
        problems.append(f"{where} is a tensor of shape {list(value.shape)}, and only 0-dim ones are written")
        return None
    return {"$tensor": {"dtype": dtype_name(value.dtype), "bytes": raw.hex()}}


def decode(data: Any, where: str) -> Any:
    """Give the value of a JSON form.

    Raises:
        BadFile: An object with a ``$`` key that ``encode`` does not write.

    >>> decode({"$tuple": [1, {"$float": "-inf"}]}, "options")
    (1, -inf)
    """
    if is_sequence(data):
        return [decode(item, f"{where}[{i}]") for i, item in enumerate(data)]
    if not is_dict(data):
        return data
    fields: dict[str, Any] = data
    if not any(key.startswith("$") for key in fields):
        return {key: decode(item, f"{where}[{key!r}]") for key, item in fields.items()}
    if len(fields) == 1:
        ((tag, body),) = fields.items()
        try:
            return _decode_tagged(tag, body, where)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            if isinstance(error, BadFile):
                raise
            raise BadFile(f"{where}: {body!r} is no value of {tag!r}.") from error
    raise BadFile(f"{where}: an object with {listing(key for key in fields if key.startswith('$'))} beside others.")


def _decode_tagged(tag: str, body: Any, where: str) -> Any:
    if tag == "$tuple" and isinstance(body, list):
        return tuple(decode(body, where))
    if tag == "$float" and body in ("inf", "-inf", "nan"):
        return float(body)
    if tag == "$int":
        return int(body, 16)
    if tag == "$dict" and is_sequence(body):
        pairs = [(decode(key, where), decode(item, f"{where}[{key!r}]")) for key, item in body]
        made = dict(pairs)
        if len(made) != len(pairs):
            raise BadFile(f"{where}: a key stands twice.")
        return made
    if tag == "$tensor" and is_dict(body) and set(body) == {"dtype", "bytes"}:
        dtype = dtype_of(body["dtype"], where)
        return torch.tensor(list(bytes.fromhex(body["bytes"])), dtype=torch.uint8).view(dtype).reshape(())
    raise BadFile(f"{where}: {tag!r} with {body!r} is no value that this version can read.")


def dtype_of(name: object, where: str) -> torch.dtype:
    """Give the dtype of a name.

    >>> dtype_of("bfloat16", "spec")
    torch.bfloat16
    """
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise BadFile(f"{where}: {name!r} is no dtype of torch {torch.__version__}.")
    return found


def parse(text: str | bytes, what: str) -> Any:
    """Read JSON strictly: no key twice, no ``NaN``.

    Raises:
        BadFile: The text is no JSON, or not strict.
    """
    return strict_json.parse(text, f"{what}: the text")
