"""The sheet a figure is drawn on, in its two forms: with title and notes for screens, bare and narrow for papers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation, NullLocator

from harness.report.drawing.looks import GRID, INK, MUTED

COLUMN_INCHES, PAGE_INCHES = 3.35, 7.0  # one column, and both, of a paper with two


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Sizes of one form; fonts in points."""

    paper: bool
    label: float  # of axes
    tick: float
    number: float  # printed at a bar
    legend: float
    panel: float  # title of a panel
    line_inches: float  # panels side by side take no more
    bar_inches: float
    panel_inches: float  # the least width of a panel
    height: float  # of a panel


SCREEN = Form(
    paper=False, label=9, tick=8.5, number=7, legend=8.8, panel=9.5, line_inches=11.0, bar_inches=0.21,
    panel_inches=1.7, height=3.1,
)  # fmt: skip
PAPER = Form(
    paper=True, label=8, tick=7.5, number=7, legend=7.5, panel=8, line_inches=PAGE_INCHES - 0.6, bar_inches=0.145,
    panel_inches=1.25, height=1.75,
)  # fmt: skip


class Sheet(Figure):
    """A figure that knows its caption and how to draw itself for a paper."""

    caption = ""
    for_paper: Callable[[], Sheet] | None = None


def in_both_forms(draw: Callable[[Form], Sheet]) -> Sheet:
    """The figure that `draw` makes for a screen; the paper's form is drawn only where it is written to a file."""
    sheet = draw(SCREEN)
    sheet.for_paper = lambda: draw(PAPER)
    return sheet


def sheet(
    form: Form,
    *,
    rows: int,
    widths: Sequence[float],
    title: str,
    about: str,
    notes: Sequence[str],
    legend: Sequence[Artist],
    height: float | None = None,
    sharex: Literal["none", "all", "col"] = "none",
    sharey: Literal["none", "all", "row"] = "all",
) -> tuple[Sheet, list[list[Axes]]]:
    """An empty sheet around a grid of panels, `widths` by `height` inches each: title, set-up (`about`), legend, notes.

    For a paper it is one column wide, or two where the panels need them, and has the legend alone; the rest is its
    caption. Built without pyplot, so that drawing leaves no global state and needs no display.
    """
    panel_height = form.height if height is None else height
    if form.paper:
        width = COLUMN_INCHES if sum(widths) + 0.6 <= COLUMN_INCHES * 1.08 else PAGE_INCHES
        lines, heading, described = [], [], []
    else:
        width = max(7.2, sum(widths) + 0.9)
        lines = [line for sentence in notes for line in textwrap.wrap(sentence, int(width * 17.5))]
        heading = textwrap.wrap(title, int(width * 9.2))
        described = textwrap.wrap(about, int(width * 14))
    columns, keys = _keys(legend, width, form)
    head = 0.05 if form.paper else 0.14 + 0.25 * len(heading) + 0.19 * len(described)
    key_height = keys * (form.legend * 1.6 / 72) + (0.1 if keys else 0.0)
    foot = 0.12 + 0.145 * len(lines) if lines else 0.02
    total = head + key_height + panel_height * rows + foot

    figure = Sheet(figsize=(width, total), layout="constrained", facecolor="white")
    figure.caption = " ".join(text if text.endswith(".") else f"{text}." for text in (title, about, *notes) if text)
    FigureCanvasAgg(figure)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0.005, foot / total, 0.99, 1 - (foot + head + key_height) / total), wspace=0.03, hspace=0.06)

    left, top = 0.12 / width, 1 - 0.1 / total
    if heading:
        figure.text(left, top, "\n".join(heading), va="top", fontsize=12.5, fontweight="bold", color=INK)
        figure.text(left, top - 0.25 * len(heading) / total, "\n".join(described), va="top", fontsize=8.8, color=MUTED)
    if legend:
        figure.legend(
            handles=list(legend), loc="upper left", ncols=columns, frameon=False, fontsize=form.legend,
            bbox_to_anchor=(0.02 / width if form.paper else left - 0.05 / width, 1 - head / total),
            handlelength=2.2 if form.paper else 2.4, columnspacing=1.3, borderpad=0.1, labelcolor=INK,
        ).set_in_layout(False)  # fmt: skip
    if lines:
        figure.text(left, 0.08 / total, "\n".join(lines), va="bottom", fontsize=7, color=MUTED, linespacing=1.35)

    grid = figure.subplots(
        rows, len(widths), sharex=sharex, sharey=sharey, squeeze=False, width_ratios=[max(one, 0.01) for one in widths]
    )
    axes = [list(line) for line in grid]
    for line in axes:
        for ax in line:
            _dress(ax, form)
    return figure, axes


def _keys(legend: Sequence[Artist], width: float, form: Form) -> tuple[int, int]:
    """Columns of the legend, and the lines it takes; labels too long for the sheet are wrapped."""
    if not legend:
        return 1, 0
    for key in legend:
        label = str(key.get_label())
        wide = text_inches(label, form.legend)
        key.set_label(textwrap.fill(label, max(20, int(len(label) * min(1.0, (width - 0.7) / wide)))))
    texts = [str(key.get_label()).split("\n") for key in legend]
    longest = max(text_inches(line, form.legend) for text in texts for line in text)
    columns = max(1, min(len(legend), int((width - 0.1) / (longest + 4.6 * form.legend / 72))))
    tallest = -(-len(legend) // columns)  # a legend fills column by column
    lines = max(sum(map(len, texts[start : start + tallest])) for start in range(0, len(texts), tallest))
    return columns, lines


@lru_cache(maxsize=4096)
def text_inches(text: str, points: float) -> float:
    """Width of one line of text in a font of this size."""
    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=points), ismath=False)
    return float(width) / 72


def panel_title(ax: Axes, text: str, inches: float, form: Form) -> None:
    """The title of a panel, in a smaller font or wrapped where it is wider than the panel."""
    size = form.panel
    while text_inches(text, size) > 0.88 * inches and size > form.number:
        size -= 0.5
    room = int(len(text) * min(1.0, 0.88 * inches / text_inches(text, size)))
    ax.set_title(textwrap.fill(text, max(8, room)), fontsize=size, color=INK, fontweight="bold")


def _dress(ax: Axes, form: Form) -> None:
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(MUTED)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.tick_params(axis="both", which="both", length=0, labelsize=form.tick, colors=INK)


def value_axis(
    ax: Axes, values: Sequence[float], *, across: bool = False, bars: bool = False, room: float = 1.1
) -> None:
    """Scale of an axis of values (`across`: the horizontal one): from 0, or logarithmic where they span over 1 : 30.

    Bars always stand on 0. Ticks read 12,000 rather than 1.2e4.
    """
    above = [value for value in values if value > 0]
    axis = ax.xaxis if across else ax.yaxis
    limits = ax.set_xlim if across else ax.set_ylim
    if above and not bars and max(above) > 30 * min(above):
        (ax.set_xscale if across else ax.set_yscale)("log")
        limits(min(above) / 1.5, max(above) * 1.5)
        axis.set_minor_locator(NullLocator())
        if max(above) > 1e7 or min(above) < 1e-4:
            axis.set_major_formatter(LogFormatterSciNotation())
            return
    else:
        limits(0, max(above, default=0.0) * room or 1.0)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def length_axis(ax: Axes, lengths: Sequence[int], text: Callable[[int], str], most: int = 8) -> None:
    """A logarithmic horizontal axis with a tick at each length; where there are over `most`, at every second."""
    ax.set_xscale("log", base=2)
    kept = sorted(lengths)
    while len(kept) > most:
        kept = kept[::-1][::2][::-1]  # the longest stays
    ax.set_xticks(kept, [text(length) for length in kept])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(min(lengths) / 1.25, max(lengths) * 1.25)
