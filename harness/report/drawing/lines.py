"""Lines against sequence length, on a logarithmic axis: one per series."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from harness.base.lengths import format_length
from harness.report.drawing.looks import INK, Look
from harness.report.drawing.points import Measure, Panel, Point
from harness.report.drawing.sheet import Form, length_axis
from harness.report.speedup import TOO_WIDE

MAX_MARKERS = 24  # points of one line; beyond, the line alone
MAX_STATUSES = 24  # points without a number whose status is printed
_CEILING_DASHES = ("-", "--", ":", "-.")


def draw_lines(
    ax: Axes, panel: Panel, looks: dict[str, Look], measure: Measure, ceilings: dict[str, str], form: Form
) -> None:
    """Every series of a panel, the `ceilings` by kernel, and at the foot the status of each point without a number."""
    length_axis(ax, panel.lengths, format_length, most=8 if not form.paper else 6)
    for kernel, dashes in ceilings.items():
        _draw_ceiling(ax, kernel, dashes, panel, measure)
    lost: list[Point] = []
    by_series: dict[str, list[Point]] = {}
    for point in panel.points:
        by_series.setdefault(point.series, []).append(point)
    for name, points in by_series.items():
        lost += [point for point in points if point.value(measure.column) is None]
        _draw_line(ax, points, looks[name], measure, form)
    _draw_statuses(ax, lost, looks, form)


def ceilings_of(points: Iterable[Point], measure: Measure) -> dict[str, str]:
    """Dashes of the ceiling of each attention kernel; one entry where they do not differ."""
    found: dict[tuple[int, float], set[str]] = {}
    kernels: set[str] = set()
    for point in points:
        if (best := point.value(measure.ceiling)) is not None:
            kernel = str(point.rows[0].get("chosen_kernel"))
            kernels.add(kernel)
            found.setdefault((point.seq_len, best), set()).add(kernel)
    if all(len(sharing) == len(kernels) for sharing in found.values()):
        return {"": "-"} if kernels else {}
    return {kernel: _CEILING_DASHES[place % len(_CEILING_DASHES)] for place, kernel in enumerate(sorted(kernels))}


def _draw_ceiling(ax: Axes, kernel: str, dashes: str, panel: Panel, measure: Measure) -> None:
    values: dict[int, float] = {}
    for point in panel.points:
        if not kernel or point.rows[0].get("chosen_kernel") == kernel:
            best = point.value(measure.ceiling)
            if best is not None:
                values[point.seq_len] = best * measure.scale
    lengths = sorted(values)
    if not lengths:
        return
    marker = "_" if len(lengths) == 1 else ""
    ax.plot(
        lengths, [values[length] for length in lengths], color=INK, linewidth=1.4, linestyle=dashes, marker=marker,
        markersize=14, zorder=2,
    )  # fmt: skip


def _draw_line(ax: Axes, points: list[Point], look: Look, measure: Measure, form: Form) -> None:
    drawn = [(point, value * measure.scale) for point in points if (value := point.value(measure.column)) is not None]
    if not drawn:
        return
    style = look.line
    if form.paper:
        style |= {"markersize": 5, "linewidth": 1.2}
    if len(drawn) > MAX_MARKERS:
        style["marker"] = ""
    lengths, values = [point.seq_len for point, _ in drawn], [value for _, value in drawn]
    ax.plot(lengths, values, zorder=3, **style)
    if not measure.timed:
        return
    ends = [point.whisker(measure.column) for point, _ in drawn]
    low = [value - end[0] * measure.scale if end else 0.0 for value, end in zip(values, ends, strict=True)]
    high = [end[1] * measure.scale - value if end else 0.0 for value, end in zip(values, ends, strict=True)]
    if any(low) or any(high):
        ax.errorbar(
            lengths, values, yerr=[[max(0.0, one) for one in low], [max(0.0, one) for one in high]], fmt="none",
            ecolor=look.colour, elinewidth=0.9, capsize=1.8, capthick=0.9, zorder=2.5,
        )  # fmt: skip
    for point, value in drawn:
        if point.too_wide(measure.column):
            ax.annotate(
                TOO_WIDE, (point.seq_len, value), xytext=(3, 3), textcoords="offset points", fontsize=form.number,
                color=INK,
            )  # fmt: skip


def _draw_statuses(ax: Axes, lost: list[Point], looks: dict[str, Look], form: Form) -> None:
    """A cross in the series' colour and the status, side by side where several points of one length have none."""
    if len(lost) > MAX_STATUSES:
        ax.annotate(
            f"{len(lost)} points without a number",
            (0.02, 0.02),
            xycoords="axes fraction",
            fontsize=form.number,
            color=INK,
        )
        return
    order = list(looks)
    for point in lost:
        here = sorted((one for one in lost if one.seq_len == point.seq_len), key=lambda one: order.index(one.series))
        place = (here.index(point) - (len(here) - 1) / 2) * (form.number + 2)
        status = ax.annotate(
            point.lost, (point.seq_len, 0), xycoords=("data", "axes fraction"), xytext=(place, 9),
            textcoords="offset points", rotation=90, ha="center", va="bottom", fontsize=form.number, color=INK,
        )  # fmt: skip
        status.set_path_effects([withStroke(linewidth=2.2, foreground="white")])
        ax.annotate(
            "×", (point.seq_len, 0), xycoords=("data", "axes fraction"), xytext=(place, 0), textcoords="offset points",
            ha="center", va="bottom", fontsize=form.number + 2, color=looks[point.series].colour, fontweight="bold",
        )  # fmt: skip
