"""Sequence lengths as files of users write them: 64k is 65,536 tokens, 1M is 1,048,576."""

from __future__ import annotations

import re
from collections.abc import Collection
from fractions import Fraction
from typing import Annotated

from cluster.files.reader import Node
from engine.reader import Meta
from harness.base.errors import UsageError

Tokens = Annotated[int, Meta(description="a whole number such as 4096 or 64k")]  # of `read_length`

UNITS = {"k": 2**10, "M": 2**20, "G": 2**30}
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([kKMG]?)")


def parse_length(text: str) -> int:
    """Tokens meant by `text`: a whole number, or one with k, M or G (powers of 1024); 1.5k is 1536.

    Raises ValueError when `text` is no length or does not come to a whole number of tokens.
    """
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a length; write a number of tokens such as 4096, 64k or 1M")
    number, unit = match.groups()
    tokens = Fraction(number) * UNITS.get(unit.replace("K", "k"), 1)
    if tokens.denominator != 1:
        raise ValueError(f"{text!r} is {float(tokens)} tokens; write a length that is a whole number of tokens")
    return int(tokens)


def read_length(node: Node, label: str) -> Node:
    """The node with a length in text as a number; any other value as it is. Raises UsageError naming `label`."""
    if not isinstance(node.value, str):
        return node
    try:
        return Node(parse_length(node.value), node.place)
    except ValueError as error:
        raise UsageError(f"{node.place}: {label}: {error}") from error


def with_lengths(node: Node, keys: Collection[str], what: str) -> Node:
    """The mapping `what` with the lengths at `keys` as numbers. Not every integer is one: a 32k vocabulary usually
    means 32,000. Raises UsageError."""
    entries = node.mapping(what)
    return Node({key: read_length(each, key) if key in keys else each for key, each in entries.items()}, node.place)


def format_length(tokens: int) -> str:
    """Shortest exact spelling of a length: 65536 is 64k, 1536 is 1.5k, 1000 stays 1000; `parse_length` inverts it."""
    for unit, size in reversed(UNITS.items()):
        tenths, rest = divmod(tokens * 10, size)
        if tokens >= size and rest == 0:
            whole, tenth = divmod(tenths, 10)
            return f"{whole}.{tenth}{unit}" if tenth else f"{whole}{unit}"
    return str(tokens)
