"""Grouped bars: one panel per parallel size, one group per sequence length, one bar per series.

Every planned trial has its place: where the number is missing stands the status that explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from harness.base.lengths import format_length
from harness.report.figures._style import (
    INK,
    MUTED,
    Look,
    canvas,
    looks_of,
    patches,
    peak_note,
    plain_numbers,
    samples_note,
)
from harness.report.results import Row
from harness.report.tables import significant
from harness.report.variants import panel_name, panel_of, pooled, series_of, setup_name

PANELS_PER_LINE = 4
LINE_INCHES = 11.0  # wider figures are scaled down on a page until their labels cannot be read
BAR_INCHES, GROUP_GAP = 0.21, 0.9  # the gap between groups is in bars
LEAST_PANEL_INCHES = 1.7  # room for a title such as `CP 4 × TP 2, 16 ranks`


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bar:
    """One bar's place: the trials behind it and its middle, counted in bars from the left edge of its panel."""

    series: str
    point: list[Row]
    x: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Panel:
    """The bars of one parallel size. Only what was planned takes room: a series swept over less leaves no hole."""

    rows: list[Row]
    bars: list[_Bar]
    ticks: list[tuple[float, int]]  # middle of each group, and its sequence length
    width: float  # in bars

    @property
    def inches(self) -> float:
        return max(LEAST_PANEL_INCHES, BAR_INCHES * self.width)


def draw_bars(
    rows: Sequence[Row],
    *,
    column: str,
    title: str,
    unit: str,
    notes: Sequence[str],
    scale: float = 1.0,
    ceiling: str | None = None,
    spread: bool = False,
) -> Figure:
    """Bars of `column` x `scale`, in `unit`.

    `ceiling` names a column drawn as a tick above each bar: what the hardware's kernels would allow. `spread` draws
    the interquartile range of the step time, for columns proportional to it or to its inverse.
    """
    series = series_of(rows)
    looks = looks_of(series)
    panels = [
        _arrange([row for row in rows if panel_of(row) == panel], series) for panel in sorted(set(map(panel_of, rows)))
    ]
    columns = _columns([panel.inches for panel in panels])
    footer = [*notes, f"{peak_note(rows)} {samples_note(rows)}"]
    if spread:
        footer.append("Whiskers: interquartile range of the step time, as a share of its median.")
    if ceiling and any(row.get(ceiling) for row in rows):
        footer.append("Black ticks: the same work at this hardware's measured kernel speeds, nothing exposed.")
    widths = [max(panel.inches for panel in panels[place::columns]) for place in range(columns)]
    figure, axes = canvas(
        rows=-(-len(panels) // columns),
        widths=widths,
        height=3.1,
        title=title,
        subtitle=setup_name(rows),
        footer=footer,
        legend=patches(looks),
    )
    cells = [ax for line in axes for ax in line]
    for ax in cells[len(panels) :]:
        ax.set_visible(False)
    for index, (ax, panel) in enumerate(zip(cells, panels, strict=False)):
        for bar in panel.bars:
            _draw_bar(ax, bar, looks[bar.series], column, scale, ceiling, spread)
        ax.set_xticks([x for x, _ in panel.ticks], [format_length(seq_len) for _, seq_len in panel.ticks])
        margin = (widths[index % columns] / BAR_INCHES - panel.width) / 2  # so that bars are equally wide everywhere
        ax.set_xlim(-margin, panel.width + margin)
        ax.set_title(panel_name(panel_of(panel.rows[0])), fontsize=9.5, color=INK, fontweight="bold")
        ax.set_xlabel("sequence length (tokens)", fontsize=8.5, color=MUTED)
        if index % columns == 0:
            ax.set_ylabel(unit, fontsize=9, color=INK)
        plain_numbers(ax)

    points = [bar.point for panel in panels for bar in panel.bars]
    heights = [(pooled(point, column) or 0.0) * (1 + (_half_spread(point) if spread else 0.0)) for point in points]
    heights += [pooled(point, ceiling) or 0.0 for point in points if ceiling]
    # Room for the upright number above the tallest bar.
    cells[0].set_ylim(0, max(heights) * scale * 1.24 or 1.0)
    return figure


def _arrange(rows: list[Row], series: Sequence[tuple[str, list[Row]]]) -> _Panel:
    """Give each planned trial of one panel its place: a group per sequence length, in it a bar per series."""
    names = {id(row): name for name, group in series for row in group}
    bars: list[_Bar] = []
    ticks: list[tuple[float, int]] = []
    edge = GROUP_GAP / 2
    for seq_len in sorted({row["seq_len"] for row in rows}):
        points: dict[str, list[Row]] = {}
        for row in rows:
            if row["seq_len"] == seq_len:
                points.setdefault(names[id(row)], []).append(row)
        present = [name for name, _ in series if name in points]
        bars += [_Bar(series=name, point=points[name], x=edge + slot + 0.5) for slot, name in enumerate(present)]
        ticks.append((edge + len(present) / 2, seq_len))
        edge += len(present) + GROUP_GAP
    return _Panel(rows=rows, bars=bars, ticks=ticks, width=edge - GROUP_GAP / 2)


def _columns(inches: Sequence[float]) -> int:
    """As many panels side by side as fit a line."""
    for columns in range(min(len(inches), PANELS_PER_LINE), 1, -1):
        if sum(max(inches[column::columns]) for column in range(columns)) <= LINE_INCHES:
            return columns
    return 1


def _draw_bar(ax: Axes, bar: _Bar, look: Look, column: str, scale: float, ceiling: str | None, spread: bool) -> None:
    x, point = bar.x, bar.point
    value = pooled(point, column)
    if value is None:
        _label(ax, x, 0.0, _why_absent(point), look.colour)
        return
    height = value * scale
    ax.bar(x, height, 0.9, color=look.fill, hatch=look.hatch, edgecolor="white", linewidth=0)
    whisker = _half_spread(point) if spread else 0.0
    if whisker:
        ax.errorbar(x, height, yerr=height * whisker, color=INK, elinewidth=0.9, capsize=1.8, capthick=0.9)
    top = height * (1 + whisker)
    best = pooled(point, ceiling) if ceiling else None
    if best is not None:
        ax.plot([x - 0.45, x + 0.45], [best * scale] * 2, color=INK, linewidth=1.6)
    lost = sorted({row["status"] for row in point if row["status"] != "ok"})
    text = " ".join([significant(3)(height), *lost])
    # Above the bar the number would read as the ceiling's, so it stands inside where there is a ceiling.
    if best is None:
        _label(ax, x, top, text, INK)
    else:
        _label(ax, x, 0.0, text, INK, halo=True)


def _label(ax: Axes, x: float, y: float, text: str, colour: str, halo: bool = False) -> None:
    label = ax.annotate(
        text, (x, y), xytext=(0, 2.5), textcoords="offset points", rotation=90, ha="center", va="bottom",
        fontsize=7, color=colour,
    )  # fmt: skip
    if halo:
        label.set_path_effects([withStroke(linewidth=2.2, foreground="white")])


def _why_absent(point: Sequence[Row]) -> str:
    statuses = sorted({row["status"] for row in point})
    return "not measured" if statuses == ["ok"] else "/".join(status for status in statuses if status != "ok")


def _half_spread(point: Sequence[Row]) -> float:
    """Half the interquartile range of the step time as a share of its median; 0 where it is not known."""
    iqr, median = pooled(point, "step_seconds_iqr"), pooled(point, "step_seconds_median")
    return iqr / median / 2 if iqr and median else 0.0
