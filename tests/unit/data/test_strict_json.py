"""JSON as the formats demand it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdsd.data.errors import BadFile, Unsupported
from fdsd.data.strict_json import dump, is_text, parse, parse_object

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(texts, values, max_size=3), st.booleans())
def test_what_json_writes_is_parsed(value: dict[str, object], ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert parse_object(raw, "it") == value
    assert list(parse_object(raw, "it")) == list(value)


@given(st.binary() | st.text('[]{}",:0-9eE.+tfn \\u', max_size=30).map(str.encode))
def test_anything_else_is_a_bad_file(raw: bytes) -> None:
    with contextlib.suppress(BadFile):
        assert isinstance(parse_object(raw, "it"), dict)


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "stand twice in one object: 'c'"),
        ("[1]", "a JSON list, not an object"),
        ('"x"', "a JSON string"),
        ("null", "a JSON null"),
        ("7", "a JSON number"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ('{"a": -0}', "-0 is no whole number"),
        ('{"a": ' + "[" * 100_000 + "}", "nested too deeply"),
        ('{"a": "\\ud800"}', "half a surrogate pair"),
        ('{"\\ud800": 1}', "half a surrogate pair"),
        ('{"a": [{"b": ["\\udfff"]}]}', "half a surrogate pair"),
    ],
)
def test_what_is_refused_and_why(text: str, words: str) -> None:
    with pytest.raises(BadFile, match="it .*" + words):
        parse_object(text.encode(), "it")


def test_a_pair_of_surrogates_is_text() -> None:
    assert parse_object(b'{"\\ud83d\\ude00": -1}', "it") == {"\U0001f600": -1}
    assert is_text("\U0001f600") and not is_text("\ud83d")


@given(values, st.sampled_from([None, 2]))
def test_what_is_dumped_is_parsed(value: object, indent: int | None) -> None:
    assert parse(dump(value, "it", indent=indent), "it") == value


@pytest.mark.parametrize(
    "value, words",
    [
        ({"a": float("nan")}, "not JSON compliant"),
        ([float("-inf")], "not JSON compliant"),
        ({1: 0, "1": 0}, "stand twice in one object: '1'. Give"),
        ({(1, 2): 0}, "keys must be"),
        (object(), "object is not JSON"),
    ],
)
def test_what_json_cannot_hold(value: Any, words: str) -> None:
    with pytest.raises(Unsupported, match=f"it: .*{words}"):
        dump(value, "it")


def test_a_value_in_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(Unsupported, match="Circular"):
        dump(value, "it")
