"""Where the time of a step goes, from the trials that were run with `--profile`: time and share of each category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from harness.base.lengths import format_length
from harness.report.drawing.charts import Bar, Bars, paint_bars
from harness.report.drawing.looks import PALETTE
from harness.report.drawing.points import IN_CSV, FigureLayout, SeriesPoint, about, laid_out, samples_note
from harness.report.drawing.sheet import Sheet
from harness.report.results import Row
from harness.report.tables.particular import HEADERS
from harness.report.tables.table import significant

SPAN = "extra_profile.span_seconds"
SECONDS = "extra_profile.seconds."
MAX_STEPS = 6
LEAST_SHARE = 0.01  # of its step: a category below it is part of the rest
_WORK = ("attention_forward", "attention_backward", "attention_recomputed", "matmul", "recomputed", "lm_head")


@dataclass(frozen=True, kw_only=True, slots=True)
class _TracedStep:
    """One traced step: seconds per category, of the trial whose step is the median of its point."""

    label: str
    seconds: Mapping[str, float]

    @property
    def span(self) -> float:
        return sum(self.seconds.values())


class TimeBreakdown:
    def place(self, rows: Sequence[Row]) -> int:
        return 30

    def draw(self, rows: Sequence[Row]) -> Sheet | None:
        traced = [row for row in rows if row.get(SPAN)]
        if not traced:
            return None
        layout = laid_out(traced)
        steps = [_step(point, panel.title, layout) for panel in layout.panels for point in panel.points]
        notes = [
            "Of the rank whose events span the longest time. Every instant belongs to one category, to communication "
            "and copies only where nothing is computed. Hatched: computed a second time.",
            samples_note(traced),
            *layout.notes,
        ]
        steps.sort(key=lambda step: step.span)
        if len(steps) > MAX_STEPS:
            notes.append(f"{MAX_STEPS} of {len(steps)} traced steps are drawn, the longest ones; {IN_CSV}.")
        groups = [_group(step) for step in steps[-MAX_STEPS:]]
        return Sheet(
            title=_title(steps[-1]), about=about(rows), notes=notes, footnotes=layout.footnotes,
            plot=partial(paint_bars, groups=groups),
        )  # fmt: skip


def _title(step: _TracedStep) -> str:
    """What takes the most of the longest step."""
    name, seconds = max(step.seconds.items(), key=lambda item: item[1])
    where = f" at {step.label}" if step.label else ""
    return f"{_name(name).capitalize()} takes {seconds / step.span:.0%} of a step of {_time(step.span)}{where}"


def _step(point: SeriesPoint, panel: str, layout: FigureLayout) -> _TracedStep:
    """The step of a point, labelled by what tells it from others."""
    ranked = sorted(point.rows, key=lambda row: row["step_seconds_median"] or row[SPAN])
    row = ranked[(len(ranked) - 1) // 2]
    parts = [point.series] if len(layout.looks) > 1 else []
    parts += [f"{format_length(point.seq_len).upper()} tokens"] if len(layout.lengths) > 1 or not parts else []
    seconds = {name: row.get(f"{SECONDS}{name}") or 0.0 for name in HEADERS}
    return _TracedStep(label=", ".join([*parts, *([panel] if panel else [])]), seconds=seconds)


def _group(step: _TracedStep) -> Bars:
    """A bar for each category of a step, the longest first, the small ones as the rest."""
    shown = {name: seconds for name, seconds in step.seconds.items() if seconds >= LEAST_SHARE * step.span}
    bars = [_bar(name, seconds, step) for name, seconds in sorted(shown.items(), key=lambda item: -item[1])]
    rest = step.span - sum(shown.values())
    return Bars(title=f"{step.label}: {_time(step.span)}", bars=[*bars, *([_bar("rest", rest, step)] if rest else [])])


def _bar(category: str, seconds: float, step: _TracedStep) -> Bar:
    text = f"{seconds / step.span:.1%} · {_time(seconds)}"
    return Bar(
        name=_name(category),
        value=seconds / step.span,
        text=text,
        tip=f"{step.label}, {_name(category)}: {text}",
        colour=PALETTE["burst" if category in _WORK else "muted"][0],
        alpha=0.7,
        hatch="////" if category in ("attention_recomputed", "recomputed") else "",
    )


def _time(seconds: float) -> str:
    return f"{significant(3)(seconds)} s" if seconds >= 1 else f"{significant(3)(1e3 * seconds)} ms"


def _name(category: str) -> str:
    return HEADERS.get(category, category).removesuffix(" %")


FIGURES = {"time_breakdown": TimeBreakdown()}
