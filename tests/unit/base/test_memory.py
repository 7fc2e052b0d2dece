"""Sizes as people write them, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import ConfigError, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0), ("4096", 4096), ("1b", 1), ("1k", 1000), ("1KB", 1000), ("1KiB", 1024),
        ("512MiB", 512 * 2**20), ("1.5GiB", 3 * 2**29), ("2 GB", 2 * 10**9),
        (" 1TiB ", 2**40), ("0.5g", 5 * 10**8), (77, 77),
    ],
)  # fmt: skip
def test_parse(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 gigabyte", "1,5GiB", "1e9", "0x10", "1GiB2"])
def test_what_is_no_size_is_an_error_that_names_the_setting(text: str) -> None:
    with pytest.raises(ConfigError, match=r"kvstore-dram-bytes.*is not a size.*4GiB"):
        parse_bytes(text, name="kvstore-dram-bytes")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536 * 2**20, "1.5 GiB"),
        (5 * 2**40, "5 TiB"), (2**20 * 123, "123 MiB"),
    ],
)  # fmt: skip
def test_format(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 10**15))
def test_formatting_keeps_three_figures(num_bytes: int) -> None:
    back = parse_bytes(format_bytes(num_bytes))
    assert abs(back - num_bytes) <= max(1, num_bytes * 0.006)
