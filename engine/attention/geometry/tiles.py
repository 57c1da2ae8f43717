"""The work of one ring step: which rectangles of (queries x keys) a rank computes, and the band visible inside each.

Every mask the engine knows is, between two runs of positions, a union of bands `lo <= key - query <= hi`. A `Tile` is
a rectangle of local indices with such a band, already trimmed so that each of its rows sees at least one key: no kernel
is given an empty row, and none has to know about layouts or global positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Counts: TypeAlias = int | NDArray[np.int64]
NO_LIMIT = 1 << 40  # a diagonal that hides no key


@dataclass(frozen=True, slots=True)
class Band:
    """Keys j visible to query i, both counted from the tile's corner: lo <= j - i <= hi. None: no limit."""

    lo: int | None = None
    hi: int | None = None

    @property
    def kind(self) -> str:
        """full, causal (square, the diagonal from corner to corner), or band."""
        if self.lo is None and self.hi is None:
            return "full"
        return "causal" if self.lo is None and self.hi == 0 else "band"


FULL, CAUSAL = Band(), Band(hi=0)


class Tile(NamedTuple):
    """One kernel call: local queries `q` against local keys `k`, the pairs of `band` visible."""

    q: slice
    k: slice
    band: Band = FULL

    @property
    def rows(self) -> int:
        return self.q.stop - self.q.start

    @property
    def columns(self) -> int:
        return self.k.stop - self.k.start

    def area(self) -> int:
        """Visible (query, key) pairs."""
        lo = -NO_LIMIT if self.band.lo is None else self.band.lo
        return int(band_area(self.rows, self.columns, lo, NO_LIMIT if self.band.hi is None else self.band.hi))


def band_area(rows: Counts, columns: Counts, lo: Counts, hi: Counts, step: int = 1) -> NDArray[np.int64]:
    """Pairs (i, j) of rectangles of rows x columns with lo <= j - step * i <= hi, exactly; -NO_LIMIT and NO_LIMIT hide
    none. Numbers or arrays."""
    return np.maximum(0, _pairs_below(rows, columns, hi, step) - _pairs_below(rows, columns, np.subtract(lo, 1), step))


def _pairs_below(rows: Counts, columns: Counts, limit: Counts, step: int) -> NDArray[np.int64]:
    """Pairs (i, j) of rectangles of rows x columns with j - step * i <= limit."""
    # Row i holds clamp(step * i + limit + 1, 0, columns) of them: zero first, then an arithmetic rise, then full rows.
    rows, columns, limit = (np.asarray(each, dtype=np.int64) for each in (rows, columns, limit))
    first = np.clip(-(limit // step), 0, rows)  # first row with at least one
    full = np.clip(-((limit + 1 - columns) // step), first, rows)  # first row with all of them
    rising = full - first
    return rising * (step * first + limit + 1) + step * rising * (rising - 1) // 2 + (rows - full) * columns


def trim(rows: int, columns: int, lo: int | None, hi: int | None) -> Tile | None:
    """The smallest tile that holds the band of a rows x columns rectangle, or None when it is empty.

    Limits that cut nothing become None, so a tile is `full` exactly when all its pairs are visible.
    """
    q_start = 0 if hi is None else max(0, -hi)
    q_stop = rows if lo is None else min(rows, columns - lo)
    k_start = 0 if lo is None else max(0, lo + q_start)
    k_stop = columns if hi is None else min(columns, q_stop + hi)
    if q_start >= q_stop or k_start >= k_stop or (lo is not None and hi is not None and lo > hi):
        return None
    shift = q_start - k_start
    lo = None if lo is None else lo + shift
    hi = None if hi is None else hi + shift
    if lo is not None and lo <= -(q_stop - q_start - 1):
        lo = None
    if hi is not None and hi >= k_stop - k_start - 1:
        hi = None
    return Tile(slice(q_start, q_stop), slice(k_start, k_stop), Band(lo, hi))


def row_blocks(band: Band, rows: int, columns: int, block_rows: int) -> Iterator[Tile]:
    """A tile in blocks of at most `block_rows` queries, each against only the span of keys that its queries see.

    The blocks follow each other and hold every row of the tile. They compute fewer than rows x block_rows
    hidden pairs for each side on which `band` has a limit, for any number of keys.
    """
    for start in range(0, rows, block_rows):
        stop = min(start + block_rows, rows)
        lo, hi = (None if limit is None else limit + start for limit in (band.lo, band.hi))
        block = trim(stop - start, columns, lo, hi)
        assert block is not None, "trimming left rows that see no key"
        assert block.rows == stop - start, "trimming left rows that see no key"
        yield block._replace(q=slice(start, stop))
