"""How figures look: one colour per method everywhere, variants by lightness and hatching, a footer that explains.

Colours are the eight of Okabe and Ito (Color Universal Design, 2008), told apart by colour-blind readers.
"""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from harness.report.results import Row
from harness.report.variants import method_name

INK, MUTED, GRID = "#1b1f24", "#5b6470", "#dfe3e8"

_COLOURS = {
    "burst": "#d55e00",
    "ring": "#56b4e9",
    "megatron_cp": "#0072b2",
    "megatron_tp": "#cc79a7",
    "ulysses": "#009e73",
    "loongtrain_double_ring": "#e69f00",
    "loongtrain_usp": "#c9b800",
    "torch_cp": "#7a7f87",
    "flash_1gpu": "#2b2f36",
}
_SPARE = ("#8a5a44", "#6a51a3", "#35978f", "#ad1457")
_HATCHES = ("", "////", "\\\\\\\\", "xxxx", "----", "++++")  # no dots: an SVG writes out every circle of theirs
_DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = ("-", (0, (5, 2)), (0, (2, 2)), (0, (7, 2, 2, 2)), (0, (1, 1)))
_MARKERS = ("o", "s", "D", "^", "v", "P")


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Appearance of one series."""

    colour: str
    hatch: str

    @property
    def fill(self) -> tuple[float, float, float]:
        """The colour itself, paler under hatching so that the hatch is visible."""
        r, g, b = to_rgb(self.colour)
        pale = 0.45 if self.hatch else 0.0
        return (r + (1 - r) * pale, g + (1 - g) * pale, b + (1 - b) * pale)


def method_colour(method: str) -> str:
    """The colour of a method in every figure; an upstream system shares its native form's."""
    base = method.removesuffix("_upstream")
    return _COLOURS.get(base) or _SPARE[zlib.crc32(base.encode()) % len(_SPARE)]


def looks_of(series: Sequence[tuple[str, list[Row]]]) -> dict[str, Look]:
    """A look for each named series: the method's colour, and a hatch for its variant, the same for all methods.

    A variant is a choice of settings, and where a method ran several things one of these. The variant with the most
    trials is plain, since it is the one most bars show.
    """
    methods: dict[str, list[str]] = {}  # by colour: an upstream system shares its native form's
    ran: dict[str, list[str]] = {}  # names of each method with what it ran
    trials: dict[tuple[str, int, int], int] = {}
    variants: dict[str, tuple[str, int, int]] = {}
    for name, rows in series:
        method = rows[0]["method"]
        sharing = methods.setdefault(method_colour(method), [])
        if method not in sharing:
            sharing.append(method)
        named = max((method_name(row) for row in rows), key=len)  # a row that ran nothing has the method's name alone
        if named not in ran.setdefault(method, []):
            ran[method].append(named)
        variants[name] = (name.removeprefix(named), ran[method].index(named), sharing.index(method))
        trials[variants[name]] = trials.get(variants[name], 0) + len(rows)
    order = sorted(trials, key=lambda variant: -trials[variant])
    return {
        name: Look(colour=method_colour(rows[0]["method"]), hatch=_HATCHES[order.index(variants[name]) % len(_HATCHES)])
        for name, rows in series
    }


def dashes(index: int) -> str | tuple[int, tuple[int, ...]]:
    """Line style of the index-th line of one colour."""
    return _DASHES[index % len(_DASHES)]


def marker(index: int) -> str:
    """Marker of the index-th line of one colour."""
    return _MARKERS[index % len(_MARKERS)]


def patches(looks: dict[str, Look]) -> list[Patch | Line2D]:
    """Legend entries of bar series."""
    return [
        Patch(facecolor=look.fill, hatch=look.hatch, edgecolor="white", linewidth=0, label=name)
        for name, look in looks.items()
    ]


def canvas(
    *,
    rows: int,
    widths: Sequence[float],
    height: float,
    title: str,
    subtitle: str,
    footer: Sequence[str],
    legend: Sequence[Patch | Line2D],
    sharey: Literal["all", "row"] = "all",
) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure with a title, legend and footer around a grid of panels, `widths` by `height` inches each.

    Built without pyplot, so that drawing leaves no global state and needs no display.
    """
    width = max(7.2, sum(widths) + 0.9)
    text_columns = int(width * 17.5)
    notes = [line for sentence in footer for line in textwrap.wrap(sentence, text_columns)]
    heading = textwrap.wrap(title, int(width * 9.2))
    about = textwrap.wrap(subtitle, int(width * 14))

    longest = max((len(str(entry.get_label())) for entry in legend), default=1)
    legend_columns = max(1, min(len(legend), int((width - 0.2) / (0.085 * longest + 0.55))))
    legend_rows = -(-len(legend) // legend_columns)

    head = 0.14 + 0.25 * len(heading) + 0.19 * len(about) + 0.23 * legend_rows + 0.14
    foot = 0.12 + 0.145 * len(notes)
    height = head + height * rows + foot  # of the whole figure from here on

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0.005, foot / height, 0.99, 1 - (foot + head) / height), wspace=0.03, hspace=0.06)

    left, top = 0.12 / width, 1 - 0.12 / height
    figure.text(left, top, "\n".join(heading), va="top", fontsize=12.5, fontweight="bold", color=INK)
    top -= 0.25 * len(heading) / height
    figure.text(left, top, "\n".join(about), va="top", fontsize=8.8, color=MUTED)
    top -= (0.19 * len(about) + 0.02) / height
    if legend:
        figure.legend(
            handles=list(legend), loc="upper left", bbox_to_anchor=(left - 0.05 / width, top), ncols=legend_columns,
            frameon=False, fontsize=8.8, handlelength=1.5, columnspacing=1.3, borderpad=0.1, labelcolor=INK,
        ).set_in_layout(False)  # fmt: skip
    figure.text(left, 0.08 / height, "\n".join(notes), va="bottom", fontsize=7, color=MUTED, linespacing=1.35)

    grid = figure.subplots(rows, len(widths), sharey=sharey, squeeze=False, width_ratios=list(widths))
    axes = [list(line) for line in grid]
    for line in axes:
        for ax in line:
            _dress(ax)
    return figure, axes


def _dress(ax: Axes) -> None:
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(MUTED)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.tick_params(axis="both", which="both", length=0, labelsize=8.5, colors=INK)


def plain_numbers(ax: Axes) -> None:
    """Ticks of the value axis as 12,000 rather than 1.2e4."""
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def peak_note(rows: Sequence[Row]) -> str:
    """Footer sentence on the peak behind MFU, or why there is none."""
    peaks = sorted({(row["gpu"] or "GPU", row["peak_tflops"]) for row in rows if row.get("peak_tflops")})
    if peaks:
        return "; ".join(f"Peak: {peak:,.0f} TFLOP/s dense bf16 ({gpu})" for gpu, peak in peaks) + "."
    devices = " and ".join(sorted({row["gpu"] for row in rows if row["gpu"]})) or "this device"
    return f"Peak: none known for {rows[0]['dtype']} on {devices}, so no MFU."


def samples_note(rows: Sequence[Row]) -> str:
    """Footer sentence on how many measured steps stand behind each number."""
    counts = sorted({row["samples"] for row in rows if row["samples"]})
    if not counts:
        return "No trial was measured."
    steps = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seeds = len({row["seed"] for row in rows})
    pooling = f" for each of {seeds} seeds (median over seeds)" if seeds > 1 else ""
    return f"n = {steps} measured steps per trial, warm-up excluded{pooling}."
