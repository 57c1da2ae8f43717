"""Where the time of a step goes, from the trials that were run with `--profile`: time and share of each category."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from harness.report.drawing.charts import Bar, Bars, paint_bars
from harness.report.drawing.looks import PALETTE
from harness.report.drawing.points import (
    IN_CSV,
    FigureLayout,
    Panel,
    SeriesPoint,
    about,
    laid_out,
    samples_note,
    span_of,
)
from harness.report.drawing.sheet import Sheet
from harness.report.results import Row
from harness.report.tables.particular import HEADERS, SPAN, seconds_by_category
from harness.report.tables.table import significant

MAX_STEPS = 6
LEAST_SHARE = 0.01  # of its step: a category below it is part of the rest
_WORK = ("attention_forward", "attention_backward", "attention_recomputed", "matmul", "recomputed", "lm_head")


class TimeBreakdown:
    def place(self, rows: Sequence[Row]) -> int:
        return 30

    def draw(self, rows: Sequence[Row]) -> Sheet | None:
        traced = [row for row in rows if row.get(SPAN)]
        if not traced:
            return None
        layout = laid_out(traced)
        steps = [_step(point, panel, layout) for panel in layout.panels for point in panel.points]
        steps.sort(key=lambda step: sum(step[1].values()))
        notes = [
            "Of the rank whose events span the longest time. Every instant belongs to one category, to communication "
            "and copies only where nothing is computed. Hatched: computed a second time.",
            samples_note(traced),
            *layout.notes,
        ]
        if len(steps) > MAX_STEPS:
            notes.append(f"{MAX_STEPS} of {len(steps)} traced steps are drawn, the longest ones; {IN_CSV}.")
        return Sheet(
            title=_title(*steps[-1]), about=about(rows), notes=notes, footnotes=layout.footnotes,
            plot=partial(paint_bars, groups=[_group(*step) for step in steps[-MAX_STEPS:]]),
        )  # fmt: skip


def _title(label: str, seconds: dict[str, float]) -> str:
    """What takes the most of the longest step."""
    name, longest = max(seconds.items(), key=lambda item: item[1])
    span, where = sum(seconds.values()), f" at {label}" if label else ""
    return f"{_name(name).capitalize()} takes {longest / span:.0%} of a step of {_time(span)}{where}"


def _step(point: SeriesPoint, panel: Panel, layout: FigureLayout) -> tuple[str, dict[str, float]]:
    """What tells a traced step from others, and its seconds per category; of several trials the median one's."""
    ranked = sorted(point.rows, key=lambda row: row["step_seconds_median"] or row[SPAN])
    series = point.series if len(layout.looks) > 1 else ""
    length = span_of([point.seq_len]) if len(layout.lengths) > 1 or not series else ""
    label = ", ".join(filter(None, (series, length, panel.title)))
    return label, seconds_by_category(ranked[(len(ranked) - 1) // 2])


def _group(label: str, seconds: dict[str, float]) -> Bars:
    """A bar for each category of a step, the longest first, the small ones as the rest."""
    span = sum(seconds.values())
    shown = sorted(((value, name) for name, value in seconds.items() if value >= LEAST_SHARE * span), reverse=True)
    rest = span - sum(value for value, _ in shown)
    bars = []
    for value, category in [*shown, *([(rest, "rest")] if rest else [])]:
        text = f"{value / span:.1%} · {_time(value)}"
        bars.append(
            Bar(
                name=_name(category), value=value / span, text=text, tip=f"{label}, {_name(category)}: {text}",
                colour=PALETTE["burst" if category in _WORK else "muted"][0], alpha=0.7,
                hatch="////" if category in ("attention_recomputed", "recomputed") else "",
            )
        )  # fmt: skip
    return Bars(title=f"{label}: {_time(span)}", bars=bars)


def _time(seconds: float) -> str:
    return f"{significant(3)(seconds)} s" if seconds >= 1 else f"{significant(3)(1e3 * seconds)} ms"


def _name(category: str) -> str:
    return HEADERS.get(category, category).removesuffix(" %")


FIGURES = {"time_breakdown": TimeBreakdown()}
