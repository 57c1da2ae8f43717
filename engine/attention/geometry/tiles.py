"""The work of one ring step: which rectangles of (queries x keys) a rank computes, and the band visible inside each.

Every mask the engine knows is, between two runs of positions, a union of bands `lo <= key - query <= hi`. A `Tile` is
a rectangle of local indices with such a band, already trimmed so that each of its rows sees at least one key: no kernel
is given an empty row, and none has to know about layouts or global positions.

A `Call` is what a kernel computes at once: one tile, or the tiles of many documents (`VarlenGroup`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Counts: TypeAlias = int | NDArray[np.int64]
Integers: TypeAlias = NDArray[np.int64]
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
    """A rectangle of local queries `q` and local keys `k`, the pairs of `band` visible."""

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


@dataclass(frozen=True, eq=False)
class VarlenGroup:
    """What a call shows that computes several tiles at once: sequence i has queries [q_starts[i], q_stops[i]) and keys
    [k_starts[i], k_stops[i]), counted from the call's corner, with the same band in each. Both sides ascend, and no
    token is in two sequences; queries and keys between sequences see nothing and are not seen.

    Where the band has a limit, all sequences have equally many keys more than queries: kernels count a band from the
    ends.
    """

    band: Band
    q_starts: Integers
    q_stops: Integers
    k_starts: Integers
    k_stops: Integers

    @property
    def kind(self) -> str:
        """That of the band."""
        return self.band.kind

    @cached_property
    def gapless(self) -> bool:
        """Every query and every key of the call is in a sequence."""
        sides = ((self.q_starts, self.q_stops), (self.k_starts, self.k_stops))
        return all(bool((starts[1:] == stops[:-1]).all()) for starts, stops in sides)

    @cached_property
    def longer(self) -> int:
        """How many more keys than queries each sequence has, where the band has a limit."""
        return int(self.k_stops[0] - self.k_starts[0] - self.q_stops[0] + self.q_starts[0])

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Those of all sequences, counted from the call's corner."""
        bounds = (each.tolist() for each in (self.q_starts, self.q_stops, self.k_starts, self.k_stops))
        return tuple(
            Tile(slice(top, bottom), slice(left, right), self.band)
            for top, bottom, left, right in zip(*bounds, strict=True)
        )


Visible: TypeAlias = Band | VarlenGroup


class Call(NamedTuple):
    """One kernel call: local queries `q` against local keys `k`, the pairs of `visible` shown."""

    q: slice
    k: slice
    visible: Visible

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles that it computes, in local tokens."""
        if isinstance(self.visible, Band):
            return (Tile(self.q, self.k, self.visible),)
        top, left = self.q.start, self.k.start
        return tuple(
            Tile(slice(top + q.start, top + q.stop), slice(left + k.start, left + k.stop), band)
            for q, k, band in self.visible.tiles
        )


# Tokens that a launch takes as long as: where sequences do not lie side by side, one call for all of them copies their
# rows and writes the rows between them, and several calls are launched one by one.
TOKENS_OF_LAUNCH = 4096
_MAX_BANDS = 32  # with more different bands, tiles of two bands do not become one call


def calls_of(corners: Integers, lo: Integers, hi: Integers) -> tuple[Call, ...]:
    """The fewest calls that compute tiles [q_start, q_stop, k_start, k_stop; tiles] with the bands `lo`, `hi`.

    Tiles of one band that share no query and no key become one call. A tile whose own size hides what the band of
    others would hide joins them: a document shorter than the window is a causal tile, and one of a single token a full
    one.
    """
    if len(lo) == 1:
        band = band_between(lo.item(), hi.item())
        top, bottom, left, right = corners[:, 0].tolist()
        return (Call(slice(top, bottom), slice(left, right), band),)
    bands, of, order, bounds = _grouped(corners, lo, hi)
    of, (top, bottom, left, right) = of[order], corners[:, order]
    calls = []
    for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        q_start, k_start = int(top[first]), int(left[first])
        visible: Visible = (band := bands[int(of[first])])
        if stop - first > 1:
            own = slice(first, stop)
            visible = VarlenGroup(
                band, top[own] - q_start, bottom[own] - q_start, left[own] - k_start, right[own] - k_start
            )
        calls.append(Call(slice(q_start, int(bottom[stop - 1])), slice(k_start, int(right[stop - 1])), visible))
    return tuple(calls)


def call_count(corners: Integers, lo: Integers, hi: Integers) -> int:
    """How many calls `calls_of` returns."""
    return len(lo) if len(lo) < 2 else len(_grouped(corners, lo, hi)[3]) - 1


def _grouped(corners: Integers, lo: Integers, hi: Integers) -> tuple[list[Band], Integers, Integers, Integers]:
    """The bands of the calls, and which of them each tile is computed with; the order of the tiles by calls, and where
    each call begins in it."""
    bands, of = _shared_bands(corners[1] - corners[0], corners[3] - corners[2], lo, hi)
    order = np.lexsort((corners[2], corners[0], of))
    band_of, (top, bottom, left, right) = of[order], corners[:, order]
    new, beside = np.ones(len(order) + 1, dtype=bool), np.zeros(len(order) + 1, dtype=bool)
    new[1:-1] = (band_of[1:] != band_of[:-1]) | (top[1:] < bottom[:-1]) | (left[1:] < right[:-1])
    beside[1:-1] = ~new[1:-1] & (top[1:] == bottom[:-1]) & (left[1:] == right[:-1])
    bounds = np.flatnonzero(new)
    gaps = np.add.reduceat(~beside[:-1], bounds[:-1]) - 1
    spanned = bottom[bounds[1:] - 1] - top[bounds[:-1]] + right[bounds[1:] - 1] - left[bounds[:-1]]
    torn = np.repeat(gaps * TOKENS_OF_LAUNCH < spanned, np.diff(bounds))  # whose gaps are cheaper as calls
    new[:-1] |= torn & ~beside[:-1]
    bounds = np.flatnonzero(new)
    return bands, of, order, bounds


def _shared_bands(rows: Integers, columns: Integers, lo: Integers, hi: Integers) -> tuple[list[Band], Integers]:
    """The bands of some tiles, and which of them each tile is computed with."""
    longer, causal = columns - rows, hi == 0
    if ((lo == -NO_LIMIT) & ((hi == NO_LIMIT) | (causal & (longer == 0)))).all():  # as below, in less time
        single = (rows == 1) & (columns == 1)
        return [FULL, CAUSAL], (causal | (single & causal.any())).astype(np.int64)
    banded = (lo > -NO_LIMIT) | (hi < NO_LIMIT)
    different, of = np.unique(np.stack((lo, hi, np.where(banded, longer, 0))), axis=1, return_inverse=True)
    of = of.reshape(-1)
    limits = different.T.tolist()
    bands = [band_between(*each[:2]) for each in limits]
    if 1 < len(limits) <= _MAX_BANDS:
        # The bands with most limits come last, and take what they can.
        for number in sorted(range(len(limits)), key=lambda n: sum(abs(limit) < NO_LIMIT for limit in limits[n][:2])):
            low, high, shift = limits[number]
            hidden_low = (lo == low) | ((lo == -NO_LIMIT) & (low <= 1 - rows))
            hidden_high = (hi == high) | ((hi == NO_LIMIT) & (high >= columns - 1))
            if low > -NO_LIMIT or high < NO_LIMIT:
                of = np.where(hidden_low & hidden_high & (longer == shift), number, of)
    return bands, of


@lru_cache(maxsize=1024)
def band_between(lo: int, hi: int) -> Band:
    """The band of two limits, of which -NO_LIMIT and NO_LIMIT hide none."""
    return Band(None if lo == -NO_LIMIT else lo, None if hi == NO_LIMIT else hi)


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
