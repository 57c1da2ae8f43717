"""Visible (query, key) pairs of a mask, counted from its definition in docs/attention.md: row by row, or in blocks.

This is the second count: it reads the setting itself and uses nothing of `engine.attention`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

_ROWS_AT_ONCE = 1 << 20
_MOST_ROWS = 1 << 28  # beyond, counting takes minutes
_MOST_BLOCKS = 1 << 16
_UNITS = {"k": 1 << 10, "M": 1 << 20}


@lru_cache(maxsize=256)
def visible_pairs(mask: str, seq_len: int, rows: int) -> int:
    """Pairs that the first `rows` queries of `seq_len` tokens see.

    Raises ValueError for a mask it does not know, and for one of too many rows or blocks to be counted.
    """
    name, *arguments = mask.split(":")
    if name == "full":
        return rows * seq_len
    if name == "causal":
        return rows * (rows + 1) // 2
    if rows > _MOST_ROWS:
        raise ValueError(f"mask {mask[:60]!r} of {rows} rows has no second count, which takes up to {_MOST_ROWS} rows")
    if name == "sliding_window":
        left, right, first = (*map(_tokens, arguments), 0, 0)[:3]
        return _summed(rows, lambda query: _window_row(query, seq_len, left, right, first))
    if name == "documents":
        lengths = arguments[0].removesuffix(",...").split(",")
        ends = np.cumsum([_tokens(length) for length in lengths])
        causal = len(arguments) == 1
        return _summed(rows, lambda query: _document_row(query, seq_len, ends, causal))
    if name == "block_sparse":
        return _block_sparse(arguments[1], _tokens(arguments[0]), "causal" in arguments[2:], seq_len, rows)
    raise ValueError(f"mask {mask[:60]!r} has no second count")


def _tokens(text: str) -> int:
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text)


def _summed(rows: int, keys_of: Any) -> int:
    """The sum of `keys_of(queries)` over all queries, some at a time."""
    return sum(
        int(keys_of(np.arange(start, min(start + _ROWS_AT_ONCE, rows), dtype=np.int64)).sum())
        for start in range(0, rows, _ROWS_AT_ONCE)
    )


def _window_row(query: Any, seq_len: int, left: int, right: int, first: int) -> Any:
    """Keys of each query: its window, and of the `first` tokens those that lie before it; a global query sees all keys,
    where `right` is 0 those up to itself."""
    start = np.maximum(query - left, 0)
    stop = np.minimum(query + right, seq_len - 1) + 1
    keys = stop - start + np.minimum(first, start)
    return np.where(query < first, query + 1 if right == 0 else seq_len, keys)


def _document_row(query: Any, seq_len: int, ends: Any, causal: bool) -> Any:
    """Keys of each query: its document, which the end of the sequence may cut; with `causal` up to the query."""
    period, place = np.divmod(query, ends[-1])
    index = np.searchsorted(ends, place, side="right")
    stop = np.minimum(period * ends[-1] + ends[index], seq_len)
    start = period * ends[-1] + np.concatenate(([0], ends))[index]
    return (query + 1 if causal else stop) - start


def _block_sparse(pattern: str, size: int, causal: bool, seq_len: int, rows: int) -> int:
    """Blocks seen times their sizes; with `causal` whole earlier blocks, and the triangle of a block with itself."""
    blocks = -(-seq_len // size)
    if blocks > _MOST_BLOCKS:
        raise ValueError(f"a mask of {blocks} blocks has no second count, which takes up to {_MOST_BLOCKS} blocks")
    sizes = np.full(blocks, size, dtype=np.int64)
    sizes[-1] = seq_len - (blocks - 1) * size
    columns = np.arange(blocks)
    total = 0
    for block in range(-(-rows // size)):
        queries = min(size, rows - block * size, int(sizes[block]))
        seen = _seen(pattern, block, columns)
        if causal:
            total += queries * int(sizes[:block][seen[:block]].sum())
            total += queries * (queries + 1) // 2 if seen[block] else 0
        else:
            total += queries * int(sizes[seen].sum())
    return total


def _seen(pattern: str, block: int, columns: Any) -> Any:
    """Which blocks of keys a block of queries sees."""
    if match := re.fullmatch(r"strided-(\d+)", pattern):
        stride = int(match[1])
        return (abs(columns - block) < stride) | (columns % stride == stride - 1)
    if match := re.fullmatch(r"local_global-(\d+)-(\d+)", pattern):
        reach, everywhere = int(match[1]), int(match[2])
        return (abs(columns - block) <= reach) | (columns < everywhere) | (block < everywhere)
    if re.fullmatch(r"[01]+(/[01]+)*", pattern):
        return np.array([one == "1" for one in pattern.split("/")[block]])
    raise ValueError(f"block pattern {pattern[:60]!r} has no second count")
