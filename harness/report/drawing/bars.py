"""Horizontal bars, each with its name and its value beside it, in groups below one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle

from harness.report.drawing.looks import INK, MUTED
from harness.report.drawing.sheet import Page, text_inches, wrapped

_NAMES = 0.4  # most of the width that names take
_ROOM = 0.08  # inches between a bar and its value


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Bars under a title; without one they stand alone."""

    title: str
    bars: Sequence[Bar] = field(default_factory=tuple)


def paint_bars(page: Page, groups: Sequence[Bars], unit: str = "") -> None:
    """All groups in one panel, on one scale from 0; `unit` stands above them where it is given."""
    form, every = page.form, [bar for group in groups for bar in group.bars]
    size, left = form.small, 0.12
    names, above = 0.0, 0.0
    if form.narrow:
        above = 0.15
    else:
        names = min(_NAMES * form.width, max(text_inches(bar.name, size, bold=bar.strong) for bar in every)) + 0.1
    step, wide = (0.33 if form.narrow else 0.25), page.right - left - names
    whiskers: list[list[tuple[float, float]]] = []
    ceilings: list[list[tuple[float, float]]] = []
    texts = max(text_inches(bar.text, size, bold=True) for bar in every) + _ROOM + 0.02
    most = max(
        (end for bar in every for end in (bar.value, bar.ceiling, *(bar.ends or ())) if end is not None), default=0.0
    )
    scale = max(0.25 * wide, wide - texts) / (most or 1.0)  # inches of a unit
    lines = [[bar.name] if form.narrow else wrapped(bar.name, names - 0.1, size, bold=bar.strong) for bar in every]
    heads = sum(0.3 for group in groups if group.title) + (0.2 if unit else 0.0)
    height = heads + sum(max(step, 0.15 * len(of) + 0.06) for of in lines)
    ax = page.panel(0.0, left + names, wide, height)
    ax.set_axis_off()
    ax.set_xlim(0, wide)
    ax.set_ylim(height, 0)
    y, names_of = 0.0, iter(lines)
    if unit:
        ax.text(-names, 0.1, unit, fontsize=size, color=MUTED, va="center")
        y += 0.2
    for group in groups:
        if group.title:
            ax.text(-names, y + 0.18, group.title, fontsize=size, color=INK, va="center", fontweight="bold")
            y += 0.3
        for bar in group.bars:
            name = next(names_of)
            tall = max(step, 0.15 * len(name) + 0.06)
            middle = y + above + (tall - above) / 2
            weight = "bold" if bar.strong else "normal"
            for place, line in enumerate(name):
                at = y + 0.08 if form.narrow else middle + 0.15 * (place - (len(name) - 1) / 2)
                ax.text(-names, at, line, fontsize=size, color=INK, va="center", fontweight=weight)
            end = (bar.value or 0.0) * scale
            if bar.value is not None:
                page.tip(ax.add_patch(_face(bar, end, middle)), bar.tip)
            if bar.ends and bar.value is not None:
                low, high = (one * scale for one in bar.ends)
                whiskers += [
                    [(low, middle), (high, middle)],
                    *([(x, middle - 0.03), (x, middle + 0.03)] for x in (low, high)),
                ]
                end = max(end, high)
            if bar.ceiling is not None:
                ceilings.append([(bar.ceiling * scale, middle - 0.1), (bar.ceiling * scale, middle + 0.1)])
                end = max(end, bar.ceiling * scale)
            ax.text(
                end + _ROOM, middle, bar.text, fontsize=size, va="center", fontweight=weight,
                color=INK if bar.value is not None else MUTED,
            )  # fmt: skip
            y += tall
    ax.add_collection(LineCollection(whiskers, colors=INK, linewidths=0.9))
    ax.add_collection(LineCollection(ceilings, colors=INK, linewidths=1.8))


def _face(bar: Bar, width: float, middle: float) -> Rectangle:
    tall = 0.15
    if bar.dashed or bar.hatch:
        return Rectangle(
            (0, middle - tall / 2), width, tall, facecolor="none", edgecolor=bar.colour, linewidth=0.9,
            hatch=bar.hatch or None, linestyle=(0, (3, 2)) if bar.dashed else "-",
        )  # fmt: skip
    return Rectangle((0, middle - tall / 2), width, tall, facecolor=bar.colour, alpha=bar.alpha, linewidth=0)
