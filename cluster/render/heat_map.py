"""A matrix of speeds between nodes, as the HTML page draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WEAK, _GOOD = (214, 69, 65), (245, 245, 240)  # of the worst cell, and of the median and above


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One pair: what stands in its field, and its colour."""

    text: str
    colour: str  # CSS


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatMap:
    """Rows and columns are the same nodes in the same order."""

    title: str
    nodes: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def heat_map(
    title: str, nodes: Sequence[str], speeds: Mapping[frozenset[str], float | None], median: float | None
) -> HeatMap:
    """`speeds` by pair; None for a pair that failed, absent for one that was not tried. Red is far below the median."""
    rows = tuple(tuple(_cell(one, other, speeds, median) for other in nodes) for one in nodes)
    return HeatMap(title=title, nodes=tuple(nodes), rows=rows)


def _cell(one: str, other: str, speeds: Mapping[frozenset[str], float | None], median: float | None) -> Cell:
    pair = frozenset((one, other))
    if one == other or pair not in speeds:
        return Cell(text="", colour="#ffffff")
    speed = speeds[pair]
    if speed is None:
        return Cell(text="failed", colour="#999999")
    share = min(1.0, speed / median) if median else 1.0
    # Half of the median and less is as red as it gets.
    weight = max(0.0, 2 * share - 1)
    colour = ", ".join(str(round(weak + (good - weak) * weight)) for weak, good in zip(_WEAK, _GOOD, strict=True))
    return Cell(text=f"{speed:.3g}", colour=f"rgb({colour})")
