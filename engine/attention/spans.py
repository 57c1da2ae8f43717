"""Which of several row ranges cover which rows. Pure integer code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def covered_spans(length: int, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Cut rows [0, length) where a range starts or stops: (start, stop, indices of the ranges that cover it)."""
    cuts = sorted({0, length, *(cut for bounds in ranges for cut in bounds)})
    return [
        (start, stop, tuple(i for i, (first, last) in enumerate(ranges) if first <= start and stop <= last))
        for start, stop in itertools.pairwise(cuts)
    ]
