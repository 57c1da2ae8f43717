"""Peak memory against speed: what less memory costs, per configuration, with the Pareto frontier.

At one length a point is a configuration, and a line joins those that differ in the value of one setting. At several
lengths a line joins one series, and a grey one all series of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from harness.base.lengths import format_length
from harness.metrics.throughput import FORMULAS
from harness.report.drawing.by_length import columns_of_panels
from harness.report.drawing.looks import INK, MUTED, line_key
from harness.report.drawing.notes import samples_note, whisker_note
from harness.report.drawing.points import Layout, Panel, Point, laid_out, memory_column, trades_memory
from harness.report.drawing.sheet import SCREEN, Form, Sheet, in_both_forms, panel_title, sheet, value_axis
from harness.report.results import Row, sortable
from harness.report.speedup import TOO_WIDE
from harness.report.tables.table import plain
from harness.report.variants import varying_settings

_FRONTIER: dict[str, Any] = {"color": MUTED, "linewidth": 1.1, "linestyle": (0, (4, 2))}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axes:
    """Columns drawn. A larger speed is better; a larger `memory` is not."""

    memory: str
    speed: str
    unit: str  # of the speed
    device: str  # `GPU` or `rank`

    def at(self, point: Point) -> tuple[float, float] | None:
        """Memory and speed of a point; None without both."""
        memory, speed = point.value(self.memory), point.value(self.speed)
        return None if memory is None or speed is None else (memory, speed)


class MemoryTime:
    title = "Peak memory against speed"
    place = 15

    def applies(self, rows: Sequence[Row]) -> bool:
        return trades_memory(rows)

    def draw(self, rows: Sequence[Row]) -> Sheet:
        layout = laid_out(rows)
        memory = memory_column(rows)
        device = "GPU" if memory == "peak_memory_gib" else "rank"
        train = rows[0]["task"] == "train"
        speed = "tokens_per_gpu_per_second" if train or device == "rank" else "tflops_per_gpu"
        unit = f"TFLOP/s per {device}" if speed == "tflops_per_gpu" else f"tokens/s per {device}"
        formula = FORMULAS[speed if speed in FORMULAS else f"tflops_per_gpu ({rows[0]['task']})"]
        missing = sorted({f"{point.series} ({point.lost})" for point in layout.points if point.value(speed) is None})
        notes = [
            f"P{FORMULAS[memory][1:]}. {formula}.",
            "Ringed: on the Pareto frontier, no configuration of the same length and parallel size is faster with less "
            "memory.",
            *layout.notes,
            samples_note(rows),
            whisker_note([point.rows for point in layout.points]),
            *([f"Without a point: {', '.join(missing)}."] if missing else []),
        ]
        return in_both_forms(
            partial(
                _draw,
                layout=layout,
                drawn=_Axes(memory=memory, speed=speed, unit=unit, device=device),
                swept=_swept(rows),
                title=f"{self.title}, task {rows[0]['task']}",
                notes=[note for note in notes if note],
            )
        )


def _draw(form: Form, *, layout: Layout, drawn: _Axes, swept: str, title: str, notes: Sequence[str]) -> Sheet:
    several = len({point.seq_len for point in layout.points}) > 1
    panels = [panel for panel in layout.panels if any(drawn.at(point) for point in panel.points)]
    wide = (5.6 if len(panels) == 1 else 3.3) if form is SCREEN else (2.7 if len(panels) == 1 else 2.0)
    columns = columns_of_panels([wide] * len(panels), form)
    figure, axes = sheet(
        form,
        rows=-(-len(panels) // columns),
        widths=[wide] * columns,
        height=3.6 if form is SCREEN else 2.1,
        title=title,
        about=layout.about,
        notes=notes,
        legend=_legend(layout, swept, several),
        sharex="all",
    )
    cells = [ax for line in axes for ax in line]
    for ax in cells[len(panels) :]:
        ax.set_visible(False)
    found = [where for point in layout.points if (where := drawn.at(point))]
    ends = [end for point in layout.points if drawn.at(point) and not point.too_wide(drawn.speed)
            for end in point.whisker(drawn.speed) or ()]  # fmt: skip
    _scale(cells[0], [memory for memory, _ in found], across=True)
    _scale(cells[0], [*(speed for _, speed in found), *ends], across=False)
    for index, (ax, panel) in enumerate(zip(cells, panels, strict=False)):
        ax.grid(axis="x", color=ax.get_ygridlines()[0].get_color(), linewidth=0.8)
        (_draw_lengths if several else _draw_configurations)(ax, panel, layout, drawn, swept, form)
        _ring(ax, panel, drawn)
        if len(layout.panels) > 1 or not form.paper:
            panel_title(ax, panel.title, wide, form)
        if index + columns >= len(panels):
            ax.set_xlabel(f"peak memory (GiB per {drawn.device})", fontsize=form.label, color=MUTED)
        if index % columns == 0:
            ax.set_ylabel(drawn.unit, fontsize=form.label, color=INK)
    return figure


def _scale(ax: Axes, values: Sequence[float], *, across: bool) -> None:
    """From 0 or logarithmic, as for other values; around the values alone where they lie close together."""
    value_axis(ax, values, across=across)
    low, high = min(values), max(values)
    if high < 2 * low:
        margin = 0.16 * (high - low) or 0.1 * high
        (ax.set_xlim if across else ax.set_ylim)(low - margin, high + margin)


def _legend(layout: Layout, swept: str, several: bool) -> list[Artist]:
    keys: list[Artist] = []
    if len(layout.looks) > 1 and (several or not swept):
        keys += [line_key(name, look, joined=several) for name, look in layout.looks.items()]
    if several:
        keys.append(Line2D([], [], color=MUTED, linewidth=0.8, label="same length"))
    else:
        keys.append(Line2D([], [], label="Pareto frontier", **_FRONTIER))
    return keys


def _draw_lengths(ax: Axes, panel: Panel, layout: Layout, drawn: _Axes, swept: str, form: Form) -> None:
    """A line for each series over the lengths, a thin grey one for each length over the series."""
    for seq_len in panel.lengths:
        at = sorted(where for point in panel.points if point.seq_len == seq_len and (where := drawn.at(point)))
        if not at:
            continue
        ax.plot(*zip(*at, strict=True), color=MUTED, linewidth=0.8, zorder=1.5)
        ax.annotate(
            format_length(seq_len), at[-1], xytext=(6, 0), textcoords="offset points", va="center",
            fontsize=form.number, color=MUTED,
        )  # fmt: skip
    for name, look in layout.looks.items():
        at = [where for point in panel.points if point.series == name and (where := drawn.at(point))]
        if at:
            ax.plot(*zip(*at, strict=True), zorder=3, **look.line)


def _draw_configurations(ax: Axes, panel: Panel, layout: Layout, drawn: _Axes, swept: str, form: Form) -> None:
    """A point for each configuration; those of one sweep joined in the order of its values, which are printed."""
    points = [point for point in panel.points if drawn.at(point)]
    frontier = sorted(where for point in _undominated(points, drawn) if (where := drawn.at(point)))
    ax.plot(*zip(*frontier, strict=True), drawstyle="steps-post", zorder=1.5, **_FRONTIER)
    if swept:
        ordered = sorted(points, key=lambda point: sortable(point.rows[0][swept]))
        look = layout.looks[ordered[0].series]
        ax.plot(
            *zip(*(drawn.at(point) or () for point in ordered), strict=True), color=look.colour, linewidth=1.3,
            marker="o", markersize=5, zorder=3,
        )  # fmt: skip
        for point in ordered:
            ax.annotate(
                f"{swept.rsplit('.', 1)[-1]} {plain(point.rows[0][swept])}", drawn.at(point) or (0, 0), xytext=(5, -4),
                textcoords="offset points", va="top", fontsize=form.number, color=INK,
            )  # fmt: skip
    for point in points:
        memory, speed = drawn.at(point) or (0.0, 0.0)
        look = layout.looks[point.series]
        if whisker := point.whisker(drawn.speed):
            ax.errorbar(
                memory, speed, yerr=[[max(0.0, speed - whisker[0])], [max(0.0, whisker[1] - speed)]], fmt="none",
                ecolor=look.colour, elinewidth=0.9, capsize=1.8, capthick=0.9, zorder=2.5,
            )  # fmt: skip
        if point.too_wide(drawn.speed):
            ax.annotate(
                TOO_WIDE, (memory, speed), xytext=(3, 3), textcoords="offset points", fontsize=form.number, color=INK
            )
        if not swept:
            ax.plot(memory, speed, zorder=3, **look.point)


def _ring(ax: Axes, panel: Panel, drawn: _Axes) -> None:
    """A ring around each point of the frontier of its length, where it had any rival."""
    for seq_len in panel.lengths:
        here = [point for point in panel.points if point.seq_len == seq_len and drawn.at(point)]
        at = [where for point in _undominated(here, drawn) if (where := drawn.at(point))]
        if len(here) > 1:
            ax.plot(
                *zip(*at, strict=True), linestyle="none", marker="o", markersize=10, markerfacecolor="none",
                markeredgecolor=INK, markeredgewidth=0.9, zorder=4,
            )  # fmt: skip


def _undominated(points: Sequence[Point], drawn: _Axes) -> list[Point]:
    """Points that no other beats in memory without being slower, or in speed without needing more memory."""
    places = [(point, where) for point in points if (where := drawn.at(point))]
    return [
        point
        for point, (memory, speed) in places
        if not any(
            other_memory <= memory and other_speed >= speed and (other_memory, other_speed) != (memory, speed)
            for _, (other_memory, other_speed) in places
        )
    ]


def _swept(rows: Sequence[Row]) -> str:
    """The one setting in which the rows differ, where it has three numbers or more as its values; else empty."""
    varying = varying_settings(rows)
    if len(varying) != 1 or len({row["method"] for row in rows}) > 1 or len({row["ran"] for row in rows}) > 1:
        return ""
    values = {row[varying[0]] for row in rows}
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return varying[0] if numbers and 2 < len(values) < 13 else ""


FIGURE = MemoryTime()
