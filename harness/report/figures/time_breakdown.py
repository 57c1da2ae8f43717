"""Where the time of a step goes, from the trials that were run with `--profile`: times and shares per category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.patches import Rectangle

from harness.base.lengths import format_length
from harness.report.drawing.bars import Bar, Bars, paint_bars
from harness.report.drawing.looks import INK, PALETTE
from harness.report.drawing.notes import samples_note
from harness.report.drawing.points import IN_CSV, Layout, Point, about, laid_out
from harness.report.drawing.sheet import Page, Sheet, text_inches
from harness.report.results import Row
from harness.report.tables.particular import HEADERS
from harness.report.tables.table import significant

SPAN = "extra_profile.span_seconds"
SECONDS = "extra_profile.seconds."
MAX_BARS = 16
LEAST_SHARE = 0.004  # of every step: categories below it are one
REST = "rest"

# Colours of the palette, whose distances are tested; hatched is what is computed a second time.
_FILLS = {
    "attention_forward": "loongtrain_double_ring", "attention_backward": "burst",
    "attention_recomputed": "loongtrain_double_ring", "matmul": "megatron_cp", "recomputed": "ring",
    "lm_head": "spare_2", "optimizer": "megatron_tp", "other_compute": "ulysses", "merge": "spare_3",
    "communication": "spare_4", "copies": "loongtrain_usp", "idle": "line", REST: "torch_cp",
}  # fmt: skip
_AGAIN = ("attention_recomputed", "recomputed")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
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
            "Of the rank whose events span the longest time; every instant belongs to one category, the first of this "
            "list that runs then, so communication and copies are what no computation hides.",
            samples_note(traced),
            *layout.notes,
        ]
        steps.sort(key=lambda step: step.span)
        if len(steps) > MAX_BARS:
            notes.append(f"{MAX_BARS} of {len(steps)} traced steps are drawn, the longest ones; {IN_CSV}.")
            steps = steps[-MAX_BARS:]
        steps, small = _without_small(steps)
        if small:
            notes.append(f"Rest: {', '.join(map(_name, small))}.")
        plot = partial(_paint_categories, step=steps[0]) if len(steps) == 1 else partial(_paint_steps, steps=steps)
        return Sheet(title=_title(steps), about=about(rows), notes=notes, plot=plot)


def _title(steps: Sequence[_Step]) -> str:
    """What takes the most of the longest step."""
    longest = steps[-1]
    name, seconds = max(longest.seconds.items(), key=lambda item: item[1])
    where = f" at {longest.label}" if longest.label else ""
    return f"{_name(name).capitalize()} takes {seconds / longest.span:.0%} of a step of {_seconds(longest.span)}{where}"


def _step(point: Point, panel: str, layout: Layout) -> _Step:
    """The step of a point, labelled by what tells it from others."""
    ranked = sorted(point.rows, key=lambda row: row["step_seconds_median"] or row[SPAN])
    row = ranked[(len(ranked) - 1) // 2]
    parts = [point.series] if len(layout.looks) > 1 else []
    parts += [f"{format_length(point.seq_len).upper()} tokens"] if len(layout.lengths) > 1 or not parts else []
    seconds = {name: row.get(f"{SECONDS}{name}") or 0.0 for name in HEADERS}
    return _Step(label=", ".join([*parts, *([panel] if panel else [])]), seconds=seconds)


def _without_small(steps: Sequence[_Step]) -> tuple[list[_Step], list[str]]:
    """Steps with the categories that take next to no time of any added up, and the names of these."""
    met = [name for name in HEADERS if any(step.seconds[name] for step in steps)]
    small = [name for name in met if all(step.seconds[name] < LEAST_SHARE * step.span for step in steps)]
    small = small if len(small) > 1 else []
    found = []
    for step in steps:
        seconds = {name: step.seconds[name] for name in met if name not in small}
        rest = {REST: sum(step.seconds[name] for name in small)} if small else {}
        found.append(_Step(label=step.label, seconds=seconds | rest))
    return found, small


def _paint_categories(page: Page, *, step: _Step) -> None:
    """One step alone: a bar for each category, with its time and its share."""
    bars = []
    for name, seconds in step.seconds.items():
        text = f"{_seconds(seconds)} · {seconds / step.span:.1%}"
        bars.append(
            Bar(
                name=_name(name), value=seconds, text=text, tip=f"{_name(name)}: {text}",
                colour=PALETTE[_FILLS[name]][0], hatch="////" if name in _AGAIN else "",
            )
        )  # fmt: skip
    paint_bars(page, [Bars(title="", bars=bars)])


def _paint_steps(page: Page, *, steps: Sequence[_Step]) -> None:
    """A stacked bar for each step, the shares of its larger parts inside and its time at its end."""
    form = page.form
    size, top = form.small, _paint_key(page, list(steps[0].seconds))
    names = 0.0 if form.narrow else min(2.4, max(text_inches(step.label, size) for step in steps)) + 0.12
    above, thick = (0.18 if form.narrow else 0.0), 0.2
    line = above + thick + 0.1
    times = max(text_inches(_seconds(step.span), size) for step in steps) + 0.1
    wide = page.right - 0.12 - names
    scale = (wide - times) / max(step.span for step in steps)
    ax = page.panel(top, 0.12 + names, wide, line * len(steps) + 0.05)
    ax.set_axis_off()
    ax.set_xlim(0, wide)
    ax.set_ylim(line * len(steps) + 0.05, 0)
    for place, step in enumerate(steps):
        y, edge = place * line + above, 0.0
        ax.text(-names, y - 0.07 if form.narrow else y + thick / 2, step.label, fontsize=size, color=INK, va="center")
        for name, seconds in step.seconds.items():
            part = seconds * scale
            patch = ax.add_patch(_patch(name, edge, y, part, thick))
            share = f"{seconds / step.span:.0%}"
            page.tip(patch, f"{step.label}, {_name(name)}: {_seconds(seconds)}, {share}".removeprefix(", "))
            if part > text_inches(share, size - 1) + 0.06:
                ax.text(
                    edge + part / 2, y + thick / 2, share, fontsize=size - 1, color=_on(name), ha="center", va="center"
                )
            edge += part
        ax.text(edge + 0.06, y + thick / 2, _seconds(step.span), fontsize=size, color=INK, va="center")


def _paint_key(page: Page, categories: Sequence[str]) -> float:
    """The categories with their colours, in as many lines as they take; returns the inches down to the bars."""
    size, wide = page.form.small, page.right - 0.12
    places, x, y = [], 0.0, 0.0
    for name in categories:
        room = text_inches(_name(name), size) + 0.36
        if x and x + room > wide:
            x, y = 0.0, y + 0.2
        places.append((name, x, y))
        x += room
    ax = page.panel(0.02, 0.12, wide, y + 0.2)
    ax.set_axis_off()
    ax.set_xlim(0, wide)
    ax.set_ylim(y + 0.2, 0)
    for name, left, top in places:
        ax.add_patch(_patch(name, left, top + 0.04, 0.13, 0.12))
        ax.text(left + 0.18, top + 0.1, _name(name), fontsize=size, color=INK, va="center")
    return y + 0.34


def _patch(category: str, left: float, top: float, width: float, height: float) -> Rectangle:
    colour = PALETTE[_FILLS[category]][0]
    if category in _AGAIN:
        return Rectangle((left, top), width, height, facecolor="none", edgecolor=colour, hatch="////", linewidth=0.5)
    return Rectangle((left, top), width, height, facecolor=colour, linewidth=0)


def _on(category: str) -> str:
    """The colour of letters on a category: ink on hatches and on light faces, the ground on dark ones."""
    if category in _AGAIN:
        return INK
    red, green, blue = (int(PALETTE[_FILLS[category]][0][at : at + 2], 16) for at in (1, 3, 5))
    return INK if 0.3 * red + 0.6 * green + 0.1 * blue > 140 else PALETTE["ground"][0]


def _seconds(seconds: float) -> str:
    return f"{significant(3)(seconds)} s" if seconds >= 1 else f"{significant(3)(1e3 * seconds)} ms"


def _name(category: str) -> str:
    return HEADERS.get(category, category).removesuffix(" %")


FIGURE = TimeBreakdown()
