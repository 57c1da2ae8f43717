"""The work of one ring step: which rectangles of (queries x keys) a rank computes, and the band visible inside each.

Every mask the engine knows is, between two runs of positions, a union of bands `lo <= key - query <= hi`. A `Tile` is
a rectangle of local indices with such a band, already trimmed so that each of its rows sees at least one key: no kernel
is given an empty row, and none has to know about layouts or global positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.attention.geometry.layout import Segment


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


@dataclass(frozen=True, slots=True)
class Tile:
    """Local query rows [q_start, q_stop) against local keys [k_start, k_stop), `band` visible."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    band: Band = FULL

    @property
    def rows(self) -> int:
        return self.q_stop - self.q_start

    @property
    def columns(self) -> int:
        return self.k_stop - self.k_start

    @property
    def q(self) -> slice:
        return slice(self.q_start, self.q_stop)

    @property
    def k(self) -> slice:
        return slice(self.k_start, self.k_stop)

    def shifted(self, q_offset: int, k_offset: int) -> Tile:
        """The same rectangle at another corner."""
        q_start, q_stop = self.q_start + q_offset, self.q_stop + q_offset
        return Tile(q_start, q_stop, self.k_start + k_offset, self.k_stop + k_offset, self.band)

    def area(self) -> int:
        """Visible (query, key) pairs."""
        return band_area(self.rows, self.columns, self.band.lo, self.band.hi)


def _pairs_below(rows: int, columns: int, limit: int, step: int) -> int:
    """Pairs (i, j) of a rows x columns rectangle with j - step * i <= limit."""
    # Row i holds clamp(step * i + limit + 1, 0, columns) of them: zero first, then an arithmetic rise, then full rows.
    first = max(0, -(limit // step))  # first row with at least one
    full = max(first, -((limit + 1 - columns) // step))  # first row with all of them
    first, full = min(first, rows), min(full, rows)
    rising = full - first
    start = step * first + limit + 1
    return rising * start + step * rising * (rising - 1) // 2 + (rows - full) * columns


def band_area(rows: int, columns: int, lo: int | None, hi: int | None, step: int = 1) -> int:
    """Pairs (i, j) of a rows x columns rectangle with lo <= j - step * i <= hi, exactly."""
    upper = rows * columns if hi is None else _pairs_below(rows, columns, hi, step)
    lower = 0 if lo is None else _pairs_below(rows, columns, lo - 1, step)
    return max(0, upper - lower)


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
    return Tile(q_start, q_stop, k_start, k_stop, Band(lo, hi))


def segment_tile(q: Segment, k: Segment, left: int | None, right: int | None) -> Tile | None:
    """Band -left <= key position - query position <= right between two runs of equal step, in local indices."""
    assert q.step == k.step, "layouts have segments of one step"
    distance, step = k.start - q.start, q.step
    lo = None if left is None else -((left + distance) // step)  # ceil((-left - distance) / step)
    hi = None if right is None else (right - distance) // step
    return trim(q.count, k.count, lo, hi)


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
        yield block.shifted(start, 0)


def square_causal(tile: Tile) -> list[Tile]:
    """A causal tile with rows below its diagonal, as a square causal one and a full one.

    Kernels place the diagonal of an oblong causal tile differently; for a square one they agree.
    """
    if tile.band != CAUSAL or tile.rows == tile.columns:
        return [tile]
    assert tile.rows > tile.columns, "trimming left columns no row sees"
    middle = tile.q_start + tile.columns
    below = Tile(middle, tile.q_stop, tile.k_start, tile.k_stop)
    return [Tile(tile.q_start, middle, tile.k_start, tile.k_stop, CAUSAL), below]


def without_upper_bands(tile: Tile) -> list[Tile]:
    """A tile limited by a diagonal above only, as full and square causal tiles, which every kernel knows."""
    hi = tile.band.hi
    if tile.band.lo is not None or hi is None:
        return [tile]
    assert hi >= 0, "trimming left rows that see no key"
    if hi == 0:
        return square_causal(tile)
    # The first hi columns are visible to all rows; the rest of the diagonal starts in the corner.
    middle = tile.k_start + hi
    past = Tile(tile.q_start, tile.q_stop, tile.k_start, middle)
    return [past, *square_causal(Tile(tile.q_start, tile.q_stop, middle, tile.k_stop, CAUSAL))]


def join(tiles: list[Tile]) -> list[Tile]:
    """Join full tiles that share a whole edge, along the keys and then along the queries, in any order.

    One large kernel call is faster than two small ones.
    """
    if len(tiles) < 2:
        return tiles
    strips: list[Tile] = []
    for tile in sorted((tile for tile in tiles if tile.band == FULL), key=lambda t: (t.q_start, t.q_stop, t.k_start)):
        if strips and strips[-1].q == tile.q and strips[-1].k_stop == tile.k_start:
            strips[-1] = replace(strips[-1], k_stop=tile.k_stop)
        else:
            strips.append(tile)
    joined: list[Tile] = []
    for tile in sorted(strips, key=lambda t: (t.k_start, t.k_stop, t.q_start)):
        if joined and joined[-1].k == tile.k and joined[-1].q_stop == tile.q_start:
            joined[-1] = replace(joined[-1], q_stop=tile.q_stop)
        else:
            joined.append(tile)
    return joined + [tile for tile in tiles if tile.band != FULL]
