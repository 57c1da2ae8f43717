"""Where the time of a step goes, from the trials that were run with `--profile`: times and shares per category."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from harness.base.lengths import format_length
from harness.report.drawing.looks import COLOURS, GRID, INK, MUTED, SPARE, mixed
from harness.report.drawing.notes import samples_note
from harness.report.drawing.points import IN_CSV, Layout, Point, laid_out
from harness.report.drawing.sheet import SCREEN, Form, Sheet, in_both_forms, sheet, value_axis
from harness.report.results import Row
from harness.report.tables.particular import HEADERS
from harness.report.tables.table import significant

SPAN = "extra_profile.span_seconds"
SECONDS = "extra_profile.seconds."
MAX_BARS = 24
LEAST_SHARE = 0.004  # of every step: categories below it are one
PRINTED_SHARE = 0.07  # a share is printed on its part of a bar from here on
REST = "rest"

# Colours of the palette, whose distances are tested; hatched is what is computed a second time.
_FILLS = {
    "attention_forward": COLOURS["loongtrain_double_ring"], "attention_backward": COLOURS["burst"],
    "attention_recomputed": COLOURS["loongtrain_double_ring"], "matmul": COLOURS["megatron_cp"],
    "recomputed": COLOURS["ring"], "lm_head": SPARE[1], "optimizer": COLOURS["megatron_tp"],
    "other_compute": COLOURS["ulysses"], "merge": SPARE[2], "communication": SPARE[3],
    "copies": COLOURS["loongtrain_usp"], "idle": "#d5d9de", REST: COLOURS["torch_cp"],
}  # fmt: skip
_AGAIN = ("attention_recomputed", "recomputed")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bar:
    """One traced step: seconds per category, of the trial whose step is the median of its point."""

    label: str
    seconds: Mapping[str, float]

    @property
    def span(self) -> float:
        return sum(self.seconds.values())


class TimeBreakdown:
    title = "Where a step's time goes"
    place = 25

    def applies(self, rows: Sequence[Row]) -> bool:
        return any(row.get(SPAN) for row in rows)

    def draw(self, rows: Sequence[Row]) -> Sheet:
        traced = [row for row in rows if row.get(SPAN)]
        layout = laid_out(traced)
        bars = [_bar(point, panel.title, layout) for panel in layout.panels for point in panel.points]
        notes = [
            "Of the rank whose events span the longest time; every instant belongs to one category, the first of the "
            "legend that runs then, so communication and copies are what no computation hides.",
            *layout.notes,
            samples_note(traced),
        ]
        if len(bars) > MAX_BARS:
            notes.append(f"{MAX_BARS} of {len(bars)} traced steps are drawn, the longest ones; {IN_CSV}.")
            longest = sorted(bars, key=lambda bar: -bar.span)[:MAX_BARS]
            bars = [bar for bar in bars if any(bar is one for one in longest)]
        bars, small = _without_small(bars)
        if small:
            notes.append(f"Rest: {', '.join(_name(name) for name in small)}.")
        draw = _draw_categories if len(bars) == 1 else _draw_steps
        return in_both_forms(partial(draw, bars=bars, title=self.title, about=layout.about, notes=notes))


def _bar(point: Point, panel: str, layout: Layout) -> _Bar:
    """The bar of a point, labelled by what tells it from others."""
    ranked = sorted(point.rows, key=lambda row: row["step_seconds_median"] or row[SPAN])
    row = ranked[(len(ranked) - 1) // 2]
    several = len({one.seq_len for one in layout.points}) > 1
    parts = [point.series] if len(layout.looks) > 1 else []
    parts += [format_length(point.seq_len)] if several or not parts else []
    parts += [panel] if len(layout.panels) > 1 else []
    return _Bar(label=", ".join(parts), seconds={name: row.get(f"{SECONDS}{name}") or 0.0 for name in HEADERS})


def _without_small(bars: Sequence[_Bar]) -> tuple[list[_Bar], list[str]]:
    """Bars with the categories that take next to no time of any step added up, and the names of these."""
    met = [name for name in HEADERS if any(bar.seconds[name] for bar in bars)]
    small = [name for name in met if all(bar.seconds[name] < LEAST_SHARE * bar.span for bar in bars)]
    if len(small) < 2:
        small = []
    found = []
    for bar in bars:
        seconds = {name: bar.seconds[name] for name in met if name not in small}
        if small:
            seconds[REST] = sum(bar.seconds[name] for name in small)
        found.append(_Bar(label=bar.label, seconds=seconds))
    return found, small


def _draw_steps(form: Form, *, bars: Sequence[_Bar], title: str, about: str, notes: Sequence[str]) -> Sheet:
    """A stacked bar per step: seconds on the left, shares on the right."""
    wide, thick = (4.6, 0.34) if form is SCREEN else (3.0, 0.2)
    figure, [[left, right]] = sheet(
        form,
        rows=1,
        widths=[wide, wide],
        height=0.75 + thick * len(bars),
        title=title,
        about=about,
        notes=notes,
        legend=[Patch(label=_name(name), **_face(name)) for name in bars[0].seconds],
        sharey="all",
    )
    unit, scale = ("s", 1.0) if max(bar.span for bar in bars) >= 1 else ("ms", 1e3)
    for place, bar in enumerate(bars):
        _stack(left, place, bar.seconds, scale, form, printed=False)
        _stack(right, place, bar.seconds, 100 / bar.span, form, printed=True)
        left.annotate(
            significant(3)(bar.span * scale), (bar.span * scale, place), xytext=(3, 0), textcoords="offset points",
            va="center", fontsize=form.number, color=INK,
        )  # fmt: skip
    left.set_yticks(range(len(bars)), [textwrap.fill(bar.label, 26 if form.paper else 44) for bar in bars])
    left.set_ylim(len(bars) - 0.5, -0.5)
    value_axis(left, [bar.span * scale for bar in bars], across=True, bars=True, room=1.14)
    right.set_xlim(0, 100)
    left.set_xlabel(f"step ({unit})", fontsize=form.label, color=MUTED)
    right.set_xlabel("share of the step (%)", fontsize=form.label, color=MUTED)
    for ax in (left, right):
        ax.grid(visible=False, axis="y")
        ax.grid(axis="x", color=GRID, linewidth=0.8)
    return figure


def _stack(ax: Axes, place: int, seconds: Mapping[str, float], scale: float, form: Form, *, printed: bool) -> None:
    edge, whole = 0.0, sum(seconds.values())
    for name, value in seconds.items():
        ax.barh(place, value * scale, 0.74, left=edge, **_face(name))
        if printed and value >= PRINTED_SHARE * whole:
            label = ax.text(
                edge + value * scale / 2, place, f"{value * scale:.0f}", ha="center", va="center",
                fontsize=form.number, color=INK,
            )  # fmt: skip
            label.set_path_effects([withStroke(linewidth=2.0, foreground="white")])
        edge += value * scale


def _draw_categories(form: Form, *, bars: Sequence[_Bar], title: str, about: str, notes: Sequence[str]) -> Sheet:
    """One step alone: a bar per category, with its time and its share."""
    [bar] = bars
    unit, scale = ("s", 1.0) if bar.span >= 1 else ("ms", 1e3)
    wide, thick = (6.3, 0.27) if form is SCREEN else (2.7, 0.17)
    figure, [[ax]] = sheet(
        form,
        rows=1,
        widths=[wide],
        height=0.6 + thick * len(bar.seconds),
        title=f"{title}: {significant(3)(bar.span * scale)} {unit} at {bar.label}",
        about=about,
        notes=notes,
        legend=[],
    )
    for place, (name, value) in enumerate(bar.seconds.items()):
        ax.barh(place, value * scale, 0.74, **_face(name))
        ax.annotate(
            f"{significant(3)(value * scale)} {unit} · {value / bar.span:.1%}", (value * scale, place), xytext=(3, 0),
            textcoords="offset points", va="center", fontsize=form.number, color=INK,
        )  # fmt: skip
    ax.set_yticks(range(len(bar.seconds)), [_name(name) for name in bar.seconds])
    ax.set_ylim(len(bar.seconds) - 0.5, -0.5)
    value_axis(
        ax, [value * scale for value in bar.seconds.values()], across=True, bars=True, room=1.9 if form.paper else 1.3
    )
    ax.set_xlabel(f"time of the step ({unit})", fontsize=form.label, color=MUTED)
    ax.grid(visible=False, axis="y")
    ax.grid(axis="x", color=GRID, linewidth=0.8)
    return figure


def _face(category: str) -> dict[str, Any]:
    if category in _AGAIN:
        return {
            "facecolor": mixed(_FILLS[category], 0.6),
            "hatch": "////",
            "edgecolor": _FILLS[category],
            "linewidth": 0.0,
        }
    return {"facecolor": _FILLS[category], "linewidth": 0.0}


def _name(category: str) -> str:
    return HEADERS.get(category, category).removesuffix(" %")


FIGURE = TimeBreakdown()
