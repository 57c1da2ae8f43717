"""Which of several row ranges cover which rows, and how many may wait to be summed. Pure integer code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

# Parts of outputs and of gradients wait to be summed together: one pass over four bf16 parts reads and writes 10 bytes
# an element, four passes over a running fp32 sum 42. They wait within the memory of four bf16 parts; the running sum
# takes that of two.
WAITING_PARTS = 4


def covered_spans(length: int, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Cut rows [0, length) where a range starts or stops: (start, stop, indices of the ranges that cover it)."""
    cuts = sorted({0, length, *(cut for bounds in ranges for cut in bounds)})
    return [
        (start, stop, tuple(i for i, (first, last) in enumerate(ranges) if first <= start and stop <= last))
        for start, stop in itertools.pairwise(cuts)
    ]
