"""Sequence lengths: powers of 1024, exact both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.base.lengths import format_length, parse_length


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("64k", 65536), ("64K", 65536), ("1M", 1048576), ("1.5k", 1536), ("2G", 2**31), ("4096", 4096), (" 1k ", 1024)],
)
def test_units_are_powers_of_1024(text: str, tokens: int) -> None:
    assert parse_length(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "-1k", "1kk", "1 k", "64kb", "1m", "1e3", "0x10", "1.2345k", "0.5"])
def test_what_is_no_whole_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"; write a"):
        parse_length(text)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(65536, "64k"), (1048576, "1M"), (1536, "1.5k"), (1000, "1000"), (1048577, "1048577"), (0, "0")],
)
def test_the_shortest_exact_spelling_is_printed(tokens: int, text: str) -> None:
    assert format_length(tokens) == text


@given(st.one_of(st.integers(0, 2**40), st.integers(0, 2**20).map(lambda n: n * 512)))
def test_printing_and_parsing_are_inverse(tokens: int) -> None:
    assert parse_length(format_length(tokens)) == tokens
