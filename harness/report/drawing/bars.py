"""Grouped bars: one group per sequence length, in it one bar per series."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from harness.base.lengths import format_length
from harness.report.drawing.looks import INK, Look
from harness.report.drawing.points import Measure, Panel, Point
from harness.report.drawing.sheet import Form
from harness.report.speedup import TOO_WIDE
from harness.report.tables.table import significant

GROUP_GAP = 0.9  # between groups, in bars


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Where the bars of a panel stand, counted in bars from its left edge. Only what was planned takes room."""

    bars: list[tuple[float, Point]]  # middle of each
    ticks: list[tuple[float, int]]  # middle of each group, and its sequence length
    width: float


def arrange(panel: Panel) -> Places:
    """A group for each length of the panel, in it a bar for each series planned there."""
    bars: list[tuple[float, Point]] = []
    ticks: list[tuple[float, int]] = []
    edge = GROUP_GAP / 2
    for seq_len in panel.lengths:
        present = [point for point in panel.points if point.seq_len == seq_len]
        bars += [(edge + slot + 0.5, point) for slot, point in enumerate(present)]
        ticks.append((edge + len(present) / 2, seq_len))
        edge += len(present) + GROUP_GAP
    return Places(bars=bars, ticks=ticks, width=edge - GROUP_GAP / 2)


def draw_bars(ax: Axes, places: Places, looks: dict[str, Look], measure: Measure, form: Form, *, room: float) -> None:
    """Bars of one panel, `room` bars wide, so that bars are equally wide in all panels."""
    for x, point in places.bars:
        _draw_bar(ax, x, point, looks[point.series], measure, form)
    ax.set_xticks([x for x, _ in places.ticks], [format_length(seq_len) for _, seq_len in places.ticks])
    margin = max(0.0, (room - places.width) / 2)
    ax.set_xlim(-margin, places.width + margin)


def _draw_bar(ax: Axes, x: float, point: Point, look: Look, measure: Measure, form: Form) -> None:
    value = point.value(measure.column)
    floor = ax.get_ylim()[0]
    if value is None:
        _label(ax, x, floor, point.lost, form)
        return
    height = value * measure.scale
    ax.bar(x, height, 0.9, **look.bar)
    top, whisker = height, point.whisker(measure.column) if measure.timed else None
    if whisker:
        low, high = (end * measure.scale for end in whisker)
        top = height if point.too_wide(measure.column) else high
        ax.errorbar(
            x, height, yerr=[[height - low], [high - height]], color=INK, elinewidth=0.9, capsize=1.8, capthick=0.9
        )
    best = point.value(measure.ceiling)
    if best is not None:
        ax.plot([x - 0.45, x + 0.45], [best * measure.scale] * 2, color=INK, linewidth=1.6)
    lost = sorted({row["status"] for row in point.rows} - {"ok"})
    wide = [TOO_WIDE] if measure.timed and point.too_wide(measure.column) else []
    text = " ".join([significant(3)(height), *wide, *lost])
    # Above the bar the number would read as the ceiling's, so it stands inside where there is a ceiling.
    _label(ax, x, top if best is None else floor, text, form, halo=best is not None)


def _label(ax: Axes, x: float, y: float, text: str, form: Form, halo: bool = False) -> None:
    label = ax.annotate(
        text, (x, y), xytext=(0, 2.5), textcoords="offset points", rotation=90, ha="center", va="bottom",
        fontsize=form.number, color=INK,
    )  # fmt: skip
    if halo:
        label.set_path_effects([withStroke(linewidth=2.2, foreground="white")])
