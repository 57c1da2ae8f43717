"""The charts of all figures: horizontal bars in groups, and lines of series, each with its name beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from harness.base.lengths import format_length
from harness.report.drawing.looks import INK, MUTED, PAPER, Look
from harness.report.drawing.sheet import Page, text_inches, wrapped

STEPS = [1, 2, 2.5, 5, 10]  # between ticks
_NAMES = 0.4  # most of the width that names of bars take
_GAP = 0.08  # inches between a bar and its value
_LINE = 0.155  # inches between lines of text
_CEILING = (0, (4, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar. Without a value `text` is the reason."""

    name: str
    value: float | None
    text: str
    tip: str
    colour: str
    alpha: float = 1.0
    hatch: str = ""  # drawn in the colour, on no face
    dashed: bool = False  # an outline alone
    strong: bool = False  # name and value in bold
    ends: tuple[float, float] | None = None  # of the whisker
    ceiling: float | None = None

    @property
    def reach(self) -> float:
        """The largest of its numbers."""
        return max(self.value or 0.0, self.ceiling or 0.0, *(self.ends or ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Bars under a title; without one they stand alone."""

    title: str
    bars: Sequence[Bar] = field(default_factory=tuple)


def paint_bars(page: Page, groups: Sequence[Bars], unit: str = "") -> None:
    """All groups in one panel, on one scale from 0; `unit` stands above them where it is given."""
    form, every = page.form, [bar for group in groups for bar in group.bars]
    size, left, names, above, step = form.small, 0.12, 0.0, 0.15, 0.33
    if not form.narrow:  # names stand beside the bars, on a phone above them
        widest = max(text_inches(bar.name, size, bold=bar.strong) for bar in every)
        names, above, step = min(_NAMES * form.width, widest) + 0.1, 0.0, 0.25
    wide = page.right - left - names
    texts = max(text_inches(bar.text, size, bold=True) for bar in every) + _GAP + 0.02
    scale = max(0.25 * wide, wide - texts) / (max(bar.reach for bar in every) or 1.0)  # inches of a unit
    lines = {
        id(bar): [bar.name] if form.narrow else wrapped(bar.name, names - 0.1, size, bold=bar.strong) for bar in every
    }
    tall = {key: max(step, 0.15 * len(name) + 0.06) for key, name in lines.items()}
    height = sum(0.3 for group in groups if group.title) + (0.2 if unit else 0.0) + sum(tall.values())
    ax = page.panel(0.0, left + names, wide, height)
    ax.set_axis_off()
    ax.set_xlim(0, wide)
    ax.set_ylim(height, 0)
    y, middles = 0.0, list[float]()
    if unit:
        ax.text(-names, 0.1, unit, fontsize=size, color=MUTED, va="center")
        y += 0.2
    for group in groups:
        if group.title:
            ax.text(-names, y + 0.18, group.title, fontsize=size, color=INK, va="center", fontweight="bold")
            y += 0.3
        for bar in group.bars:
            name, middle = lines[id(bar)], y + above + (tall[id(bar)] - above) / 2
            weight = "bold" if bar.strong else "normal"
            for place, line in enumerate(name):
                at = y + 0.08 if form.narrow else middle + 0.15 * (place - (len(name) - 1) / 2)
                ax.text(-names, at, line, fontsize=size, color=INK, va="center", fontweight=weight)
            if bar.value is not None:
                page.tip(ax.add_patch(_face(bar, bar.value * scale, middle)), bar.tip)
            ax.text(
                bar.reach * scale + _GAP, middle, bar.text, fontsize=size, va="center", fontweight=weight,
                color=INK if bar.value is not None else MUTED,
            )  # fmt: skip
            middles.append(middle)
            y += tall[id(bar)]
    if whiskers := [(middle, *bar.ends) for bar, middle in zip(every, middles, strict=True) if bar.ends]:
        heights, lows, highs = np.array(whiskers).T
        ax.hlines(heights, lows * scale, highs * scale, colors=INK, linewidths=0.9)
        for ends in (lows, highs):
            ax.vlines(ends * scale, heights - 0.03, heights + 0.03, colors=INK, linewidths=0.9)
    if ceilings := [(middle, bar.ceiling) for bar, middle in zip(every, middles, strict=True) if bar.ceiling]:
        heights, highest = np.array(ceilings).T
        ax.vlines(highest * scale, heights - 0.1, heights + 0.1, colors=INK, linewidths=1.8)


def _face(bar: Bar, width: float, middle: float) -> Rectangle:
    tall = 0.15
    if bar.dashed or bar.hatch:
        return Rectangle(
            (0, middle - tall / 2), width, tall, facecolor="none", edgecolor=bar.colour, linewidth=0.9,
            hatch=bar.hatch or None, linestyle=(0, (3, 2)) if bar.dashed else "-",
        )  # fmt: skip
    return Rectangle((0, middle - tall / 2), width, tall, facecolor=bar.colour, alpha=bar.alpha, linewidth=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlottedValue:
    """A value at a length or step, from where to where its whisker reaches, and what it shows on hover."""

    at: int
    value: float
    tip: str = ""
    ends: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesLine:
    """One series. `tip` is of the whole line, where its values have none; `lost`: lengths without a value, with the
    status that explains each."""

    name: str
    look: Look
    spots: Sequence[PlottedValue]
    strong: bool = False
    tip: str = ""
    lost: Sequence[tuple[int, str]] = field(default_factory=tuple)


@dataclass(frozen=True, kw_only=True, slots=True)
class LineAxes:
    """What the axes of lines show: values over sequence lengths, from 0 (on a logarithmic scale where they span over
    1 : 30), or over the `steps` of a run, from the smallest (on a logarithmic scale from `least`, where it is given).
    `limit` is drawn."""

    unit: str
    steps: bool = False
    least: float | None = None
    limit: float | None = None


def paint_lines(page: Page, lines: Sequence[SeriesLine], axes: LineAxes, ceiling: Mapping[int, float]) -> None:
    """All lines in one panel, with their names at their ends; `ceiling` by length."""
    form = page.form
    drawn = [line for line in lines if line.spots]
    dashed = SeriesLine(
        name="ceiling", look=Look(colour=MUTED), tip="ceiling",
        spots=[PlottedValue(at=at, value=value) for at, value in sorted(ceiling.items())],
    )  # fmt: skip
    named = [*drawn, *([dashed] if ceiling else [])]
    widest = max(text_inches(line.name, form.small, bold=line.strong) for line in drawn) + 0.14
    names = min((0.42 if form.narrow else 0.34) * form.width, widest)
    values = [end for line in named for spot in line.spots for end in (spot.value, *(spot.ends or ()))]
    labels = ["1e-00"] if axes.least else [f"{value:,.0f}" if value >= 10 else "0.00" for value in values]
    left = 0.12 + max(text_inches(label, form.small) for label in labels) + 0.08
    texts = sum(len(_wrapped(line, names, form.small)) for line in named)
    height = max(1.8 if form.narrow else 2.5, _LINE * texts)
    ax = page.panel(0.26, left, page.right - left - names, height, below=0.38)
    _scale_values(ax, axes, values)
    at = sorted({at for line in lines for at in (*(spot.at for spot in line.spots), *(at for at, _ in line.lost))})
    _scale_lengths(ax, axes, at, 4 if form.narrow else 8)
    ax.annotate(axes.unit, (0, 1), (8.6 - left * 72, 9), xycoords="axes fraction", textcoords="offset points",
                fontsize=form.small, color=MUTED)  # fmt: skip
    ax.set_xlabel("step" if axes.steps else "tokens of a sequence", fontsize=form.small, labelpad=2)
    if axes.limit is not None:
        ax.axhline(axes.limit, color=MUTED, linewidth=1, linestyle=_CEILING)
        ax.text(at[0], axes.limit * 1.2, f"limit {axes.limit:.0e}", fontsize=form.small, color=MUTED)
    if ceiling:
        [mark] = ax.plot(*_points(dashed), color=MUTED, linewidth=1.1, linestyle=_CEILING, zorder=1.5)
        page.tip(mark, dashed.tip)
    for line in sorted(drawn, key=lambda line: line.strong):
        _draw(page, ax, line)
    _lost(page, ax, lines)
    _write_names(ax, named, names, height, form.small)


def _scale_values(ax: Axes, axes: LineAxes, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    if axes.least is not None:
        ax.set_yscale("log")
        ax.set_ylim(axes.least, max(2 * high, 10 * (axes.limit or 0.0)))
        ax.yaxis.set_minor_locator(NullLocator())
    if axes.steps:
        if axes.least is None:  # as wide as the values: a loss is far from 0
            margin = 0.05 * (high - low) or 1.0
            ax.set_ylim(low - margin, high + margin)
        return
    if low > 0 and high > 30 * low:
        ax.set_yscale("log")
        ax.set_ylim(low / 1.5, high * 1.5)
    else:
        ax.set_ylim(0, high * 1.08 or 1.0)
        ax.yaxis.set_major_locator(MaxNLocator(4, steps=STEPS))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _scale_lengths(ax: Axes, axes: LineAxes, at: Sequence[int], most: int) -> None:
    if axes.steps:
        ax.set_xlim(at[0], max(at[-1], at[0] + 1))
        ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        return
    ax.set_xscale("log", base=2)
    kept = at
    while len(kept) > most:
        kept = kept[::-1][::2][::-1]  # the longest stays
    ax.set_xticks(kept, [format_length(length).upper() for length in kept])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(at[0] / 1.15, at[-1] * 1.06)


def _points(line: SeriesLine) -> tuple[list[int], list[float]]:
    return [spot.at for spot in line.spots], [spot.value for spot in line.spots]


def _draw(page: Page, ax: Axes, line: SeriesLine) -> None:
    marked = not line.tip  # a marker for each value that has a tip of its own
    [drawn] = ax.plot(
        *_points(line), color=line.look.colour, linestyle=line.look.dashes, marker=line.look.marker if marked else "",
        markersize=5, markeredgecolor=PAPER, markeredgewidth=0.6, linewidth=2.0 if line.strong else 1.4,
        zorder=4 if line.strong else 3, clip_on=not marked,
    )  # fmt: skip
    page.tip(drawn, *([spot.tip for spot in line.spots] if marked else [line.tip]))
    whiskers = [[(spot.at, end) for end in spot.ends] for spot in line.spots if spot.ends]
    ax.add_collection(LineCollection(whiskers, colors=line.look.colour, linewidths=1.0, zorder=2.5), autolim=False)


def _write_names(ax: Axes, lines: Sequence[SeriesLine], inches: float, height: float, size: float) -> None:
    """Names right of a panel of this height, `inches` wide at most, beside the ends of their lines, moved apart where
    they would overlap, each joined to its end."""
    to_axes = ax.transScale + ax.transLimits
    ends = [(line, to_axes.transform((line.spots[-1].at, line.spots[-1].value))) for line in lines]
    ends.sort(key=lambda one: -one[1][1])
    texts = [_wrapped(line, inches, size) for line, _ in ends]
    middles = _apart([at[1] * height for _, at in ends], [_LINE * len(text) for text in texts], height)
    for (line, (x, y)), text, middle in zip(ends, texts, middles, strict=True):
        for place, words in enumerate(text):
            at = middle + _LINE * ((len(text) - 1) / 2 - place)
            ax.annotate(
                words, (1, at / height), (9, 0), xycoords="axes fraction", textcoords="offset points", va="center",
                fontsize=size, annotation_clip=False, color=line.look.colour if line.strong else INK,
                fontweight="bold" if line.strong else "normal",
            )  # fmt: skip
        ax.plot((x, 1.02), (y, middle / height), color=line.look.colour, linewidth=0.7, transform=ax.transAxes,
                clip_on=False, scalex=False, scaley=False, zorder=2)  # fmt: skip


def _apart(wanted: Sequence[float], sizes: Sequence[float], height: float) -> list[float]:
    """Middles near the `wanted` ones, sorted from the top down, that do not overlap and stay beside the panel."""
    top, middles = height + 0.1, []
    for at, size in zip(wanted, sizes, strict=True):
        middles.append(min(top, at + size / 2) - size / 2)
        top = middles[-1] - size / 2
    floor = -0.1
    for place in range(len(middles) - 1, -1, -1):  # up again where the last ones fell below it
        middles[place] = max(middles[place], floor + sizes[place] / 2)
        floor = middles[place] + sizes[place] / 2
    return middles


def _lost(page: Page, ax: Axes, lines: Sequence[SeriesLine]) -> None:
    """At the foot of a length what ended without a value there: the status, with the names on hover."""
    ended: dict[int, dict[str, list[str]]] = {}
    for line in lines:
        for at, status in line.lost:
            ended.setdefault(at, {}).setdefault(status, []).append(line.name)
    for at, statuses in sorted(ended.items()):
        for row, (status, names) in enumerate(sorted(statuses.items())):
            shown = ax.annotate(
                status if len(names) == 1 else f"{len(names)} {status}", (at, 0), (0, 2 + 10 * row),
                xycoords=("data", "axes fraction"), textcoords="offset points", ha="center", va="bottom",
                fontsize=page.form.small - 1, color=MUTED,
            )  # fmt: skip
            page.tip(shown, f"{', '.join(names)}: {status}")


def _wrapped(line: SeriesLine, inches: float, size: float) -> list[str]:
    return wrapped(line.name, inches - 0.12, size, bold=line.strong)
