"""Byte counts as people write and read them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdsd.data.errors import SpecMismatch
from fdsd.data.sizes import format_size, parse_size


@given(st.integers(0, 10**14), st.sampled_from([("", 1), ("KB", 10**3), ("GiB", 2**30), ("tb", 10**12)]))
def test_whole_numbers_are_exact(number: int, unit: tuple[str, int]) -> None:
    assert parse_size(f"{number} {unit[0]}") == number * unit[1]


@given(st.integers(0, 10**5), st.integers(0, 10**9 - 1))
def test_decimals_are_exact(whole: int, part: int) -> None:
    assert parse_size(f"{whole}.{part:09}GB") == whole * 10**9 + part


def test_nothing_is_a_size_unless_told() -> None:
    assert parse_size(0) == parse_size("0") == 0
    with pytest.raises(SpecMismatch, match=r"size=-1 is no size.*0 or more"):
        parse_size(-1)


@given(st.integers(0, 10**17))
def test_sizes_read_back_about_the_same(count: int) -> None:
    assert abs(parse_size(format_size(count)) - count) <= 0.06 * count


@pytest.mark.parametrize(
    "text, size",
    [
        ("5GB", 5 * 10**9),
        ("500MB", 500 * 10**6),
        ("1KB", 1000),
        ("2TB", 2 * 10**12),
        ("1GiB", 2**30),
        ("3 MiB", 3 * 2**20),
        ("4KiB", 4096),
        ("1TiB", 2**40),
        ("7", 7),
        ("7B", 7),
        (" 1.5gb ", 1_500_000_000),
        ("0.1KB", 100),
        (12, 12),
        ("5M", 5 * 10**6),
        ("0.123456789012345PB", 123456789012345),
        (torch.tensor(3), 3),
    ],
)
def test_sizes_as_people_write_them(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "size",
    ["", "GB", "5XB", "5 G B", "-1GB", "1e9", "0", 0, -3, True, 1.5, None, "inf", "1_000", "\u0665GB", "0.0001KB"],
)
def test_what_is_no_size_is_refused(size: object) -> None:
    with pytest.raises(SpecMismatch, match=r"most=.* is no size.*above 0.*'5GB'"):
        parse_size(size, "most", least=1)  # type: ignore[arg-type]
