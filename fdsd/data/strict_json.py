"""Strict JSON: UTF-8, no key twice, no NaN, in either direction. Nothing here knows what the values mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard

from fdsd.data.errors import BadFile, Unsupported, listing

__all__ = ["as_list", "as_object", "dump", "is_text", "parse", "parse_object"]


class _KeyTwice(ValueError):
    pass


def parse(text: str | bytes, what: str) -> Any:
    """Parse a JSON text.

    Args:
        text: The text; bytes are UTF-8.
        what: What it is, for messages.

    Raises:
        BadFile: It is no JSON; a key stands twice; it has ``NaN`` or an infinity.

    >>> parse("[1, 2]", "x.json")
    [1, 2]
    """
    return _parse(text, what, None)


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """Parse one JSON object as the formats of tensors demand it.

    Args:
        raw: The text, in UTF-8.
        what: What it is, for messages.

    Returns:
        The object, its keys in order.

    Raises:
        BadFile: It is no such text; a key stands twice; a string holds half a surrogate pair.

    >>> parse_object(b'{"a": [1, 2]}', "x.json")
    {'a': [1, 2]}
    >>> parse_object(b'{"a": 1, "a": 2}', "x.json")
    Traceback (most recent call last):
    fdsd.data.errors.BadFile: x.json has keys that stand twice in one object: 'a'.
    """
    # "-0" is no size; only texts with a minus somewhere pay for the check of every number
    value = _parse(raw, what, _integer if b"-" in raw else None)
    made = as_object(value)
    if made is None:
        raise BadFile(f"{what} holds a JSON {_kind(value)}, not an object.")
    if b"\\u" in raw:
        _refuse_surrogates(made, what)
    return made


def _parse(text: str | bytes, what: str, as_int: Callable[[str], int] | None) -> Any:
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=as_int)
    except _KeyTwice as error:
        raise BadFile(f"{what} has keys that stand twice in one object: {error}.") from None
    except RecursionError:
        raise BadFile(f"{what} is no JSON: its values are nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise BadFile(f"{what} is no JSON: byte {error.start} is not UTF-8.") from None
    except (ValueError, TypeError) as error:
        raise BadFile(f"{what} is no JSON: {error}.") from None


def dump(value: object, what: str, *, indent: int | None = None) -> str:
    """Word a value as JSON that ``parse`` reads.

    Args:
        value: What to write.
        what: What it is, for messages.
        indent: Spaces for each level; one line by default.

    Raises:
        Unsupported: JSON cannot hold it: other types, NaN, keys that would be equal.

    >>> dump({"a": [1, None]}, "config")
    '{"a": [1, null]}'
    """
    try:
        text = json.dumps(value, indent=indent, allow_nan=False)
        parse(text, "it")
    except (TypeError, ValueError, RecursionError) as error:  # BadFile is a ValueError
        raise Unsupported(f"{what}: {str(error).rstrip('.')}. Give what JSON can hold.") from error
    return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = {key for key, _ in pairs if key in seen or seen.add(key)}  # type: ignore[func-returns-value]
        raise _KeyTwice(listing(twice))
    return made


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _integer(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is no whole number")
    return int(text)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    return "list" if isinstance(value, list) else "string" if isinstance(value, str) else "number"


def _refuse_surrogates(value: object, what: str) -> None:
    pending: list[object] = [value]
    while pending:
        item = pending.pop()
        entries = as_object(item) or {}
        pending += [*entries, *entries.values(), *(as_list(item) or [])]
        if isinstance(item, str) and not is_text(item):
            raise BadFile(f"{what} has half a surrogate pair in {item!r}, which is no text.")


def as_object(value: object) -> dict[str, Any] | None:
    """Give a parsed value back if it is an object."""
    return value if _is_object(value) else None


def as_list(value: object) -> list[Any] | None:
    """Give a parsed value back if it is a list."""
    return value if _is_list(value) else None


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def is_text(value: str) -> bool:
    """Tell whether a string can be written in UTF-8.

    >>> is_text("å"), is_text(chr(0xD800))
    (True, False)
    """
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
