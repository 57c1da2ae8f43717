"""Speed against memory at one length: burst under budgets of memory as a line, other systems as points.

Drawn of the longest sequence at which configurations of burst differ in memory. The title compares trials of one
run alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.ticker import FuncFormatter, MaxNLocator

from harness.metrics.hardware import hardware_for
from harness.metrics.intervals import Interval
from harness.report.drawing.charts import STEPS
from harness.report.drawing.looks import INK, MUTED, PAPER
from harness.report.drawing.points import (
    FigureLayout,
    SeriesPoint,
    configuration_of,
    laid_out,
    number_text,
    samples_note,
    span_of,
    whisker_note,
    whole_text,
)
from harness.report.drawing.sheet import FigureSize, Page, Sheet, text_inches, wrapped
from harness.report.results import Row, grouped
from harness.report.speedup import Speedup, speedup
from harness.report.variants import (
    first_kernel,
    is_subject,
    kernel_in_words,
    on_cpu,
    panel_of,
    pooled,
    setting_text,
    subject_name,
)

MEMORY, SPEED = "peak_memory_gib", "tokens_per_gpu_per_second"
MAX_POINTS = 24  # each with its name beside it; of more, those that are beaten are left out
APART = 1.03  # memory of the largest configuration over that of the smallest, to be a choice
_SHARES = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 8: "an eighth", 10: "a tenth"}
_STEP = 0.16  # inches between lines of text
_Box = tuple[float, float, float, float]  # left, bottom, right, top


class SpeedMemory:
    def place(self, rows: Sequence[Row]) -> int:
        """First where it shows every trial, else behind the speeds of all lengths."""
        return 5 if shows_all(rows) else 20

    def draw(self, rows: Sequence[Row]) -> Sheet | None:
        if not (here := _shown(rows)):
            return None
        kept, beaten = _unbeaten(here)
        layout = laid_out(kept, pooling=False)  # the median of several settings is a point of none
        spots = _spots(layout)
        lost = sorted({f"{point.series} ({point.lost})" for point in layout.points if _at(point) is None})
        dates = sorted({str(row["started_at"])[:10] for row in here if row["started_at"]})
        notes = [
            _same_kernel(spots),
            samples_note(here),
            whisker_note([point.rows for point in layout.points]),
            *layout.notes,
            f"Without a point: {', '.join(lost)}." if lost else "",
            f"{beaten} configurations that take more memory and are slower than others of their method are left out."
            if beaten
            else "",
            "The speeds do not start at 0." if _zoomed(spots) else "",
            f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}." if dates else "",
        ]
        unit = "tokens/s" if here[0]["world_size"] == 1 else "tokens/s per GPU"
        return Sheet(
            title=_title(spots), about=_about(here[0]), notes=list(filter(None, notes)), footnotes=layout.footnotes,
            plot=partial(_paint, spots=spots, unit=unit),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlottedConfiguration:
    """One configuration: where it stands and what is written beside it."""

    point: SeriesPoint
    memory: float
    speed: float
    label: str
    colour: str

    @property
    def own(self) -> bool:
        return self.point.own

    @property
    def name(self) -> str:
        """Of another system, in sentences."""
        return _short(self.point.series)

    @property
    def run(self) -> str:
        return str(self.point.rows[0]["run"])

    @property
    def kernel(self) -> str:
        return _kernel(self.point)

    @property
    def planned(self) -> bool:
        """Whether it was planned for a budget of memory."""
        return bool(_budget(self.point.rows[0]))

    def beside(self, other: _PlottedConfiguration) -> Speedup | None:
        """Its speed over another's; None for trials of two runs."""
        return speedup(self.point.rows, other.point.rows) if self.run == other.run else None


def shows_all(rows: Sequence[Row]) -> bool:
    """Whether this figure shows the speed and the memory of every trial, so that no other need do so."""
    return len({(row["seq_len"], row["mask"], panel_of(row)) for row in rows}) == 1 and bool(_shown(rows))


def _shown(rows: Sequence[Row]) -> list[Row]:
    """The rows of the longest sequence of the most ranks with a choice of memory; none where no length has one."""
    if rows[0]["task"] != "train" or all(map(on_cpu, rows)):
        return []
    for _, here in sorted(grouped(rows, lambda row: (row["seq_len"], row["world_size"])).items(), reverse=True):
        own = [row for row in here if is_subject(row)]
        found = {configuration_of(row): row[MEMORY] for row in own if row.get(MEMORY) and row.get(SPEED)}
        measured = sum(bool(row.get(SPEED)) for row in here)
        one_set_up = len({(row["run"], row["settings"]) for row in own}) == len({row["run"] for row in own})
        if len(found) > 1 < measured - 1 and one_set_up and max(found.values()) > APART * min(found.values()):
            return here
    return []


def _unbeaten(rows: list[Row]) -> tuple[list[Row], int]:
    """Where there are more than MAX_POINTS configurations, those that no other one of their method beats in memory and
    speed; and how many the others are. The fastest and the smallest of each method stay, and so does burst's line."""
    found = grouped(rows, configuration_of)
    if len(found) <= MAX_POINTS:
        return rows, 0
    at = {
        key: (memory, speed)
        for key, group in found.items()
        if (memory := pooled(group, MEMORY)) is not None and (speed := pooled(group, SPEED)) is not None
    }
    beaten = {
        key
        for key, (memory, speed) in at.items()
        for other, (less, more) in at.items()
        if less < memory and more > speed and found[key][0]["method"] == found[other][0]["method"]
    }
    return [row for row in rows if configuration_of(row) not in beaten], len(beaten)


def _at(point: SeriesPoint) -> tuple[float, float] | None:
    memory, speed = point.value(MEMORY), point.value(SPEED)
    return None if memory is None or speed is None else (memory, speed)


def _spots(layout: FigureLayout) -> list[_PlottedConfiguration]:
    """All configurations with both numbers, by memory. The first that was planned says whose line it begins."""
    own = subject_name(row for point in layout.points for row in point.rows)
    planned = [point for point in layout.points if point.own and _at(point) and _budget(point.rows[0])]
    usual = Counter(map(_kernel, planned)).most_common(1)
    found = []
    for point in layout.points:
        if at := _at(point):
            label = _short(point.series)
            if point in planned:
                label = ", ".join([_budget(point.rows[0]), *_by_hand(point)])
                if _kernel(point) != usual[0][0]:
                    label = f"{own} with {kernel_in_words(_kernel(point)) or 'another kernel'}"
            elif point.own and all(one.own for one in layout.points):
                label = label.partition(", ")[2] or label
            colour = layout.looks[point.series].colour
            found.append(_PlottedConfiguration(point=point, memory=at[0], speed=at[1], label=label, colour=colour))
    found.sort(key=lambda spot: spot.memory)
    first = next((place for place, spot in enumerate(found) if spot.point in planned), None)
    if first is not None and not (words := found[first].label).startswith(own):
        found[first] = replace(found[first], label=f"{own} {'in' if words[:1].isdigit() else 'with'} {words}")
    return found


def _short(series: str) -> str:
    """A system's name without the word for its authors' settings, of which it is the default that none names."""
    return series.replace(", upstream default", "").replace(", upstream ", ", ")


def _kernel(point: SeriesPoint) -> str:
    return str(point.rows[0].get("chosen_kernel") or "")


def _budget(row: Row) -> str:
    """The budget that a trial was planned for: `24 GiB`, `all of the GPU`; empty for a trial set by hand."""
    if row.get("checkpoint.plan") != "auto":
        return ""
    hardware, budget = hardware_for(row["gpu"]), row.get("memory")
    if not budget or (hardware and budget == f"{hardware.memory_gib:g}GiB"):
        return "all of the GPU"
    return setting_text("memory", budget)


def _by_hand(point: SeriesPoint) -> list[str]:
    """What its name tells beside the budget and the kernel, and no planner chose: `gradient_offload on`."""
    row = point.rows[0]
    said = {setting_text(name, row.get(name)) for name in ("memory", "kernel", "checkpoint.plan")}
    return [told for told in point.series.split(", ")[1:] if told not in said]


def _about(row: Row) -> str:
    model = row["model"].upper() if re.fullmatch(r"\d+(\.\d+)?b", row["model"]) else row["model"]
    gpu = str(row["gpu"]).removeprefix("NVIDIA ")
    devices = f"one {gpu}" if row["world_size"] == 1 else f"{row['world_size']} × {gpu}"
    setup = f"{model} model, one sequence of {span_of([row['seq_len']])}, {row['mask']} mask, {row['dtype']}, {devices}"
    return f"{setup}. Top left is best."


def _title(spots: Sequence[_PlottedConfiguration]) -> str:
    """What the least memory buys that is still faster than the fastest other system of the same run."""
    line, best = _line(spots), _rival(spots)
    found = [(spot, ratio) for spot in line if best and (ratio := spot.beside(best))]
    if best and found:
        for verdict in ("faster", "faster in both rounds", "not distinguishable"):
            for spot, ratio in found:
                if ratio.verdict == verdict:
                    return _compared(spot, best, ratio) + _kernels(spot, best)
        spot, ratio = max(found, key=lambda one: one[1].value)
        return _compared(spot, best, ratio) + _kernels(spot, best)
    first, last, own = line[0], line[-1], _own(line)
    least, most = number_text(first.memory), number_text(last.memory)
    if first is last:
        return f"{own}: {number_text(first.speed)} tokens/s in {least} GiB, fastest and least"
    beyond = speedup(last.point.rows, first.point.rows)
    if beyond is None or beyond.verdict == "not distinguishable":
        return f"{own}: no difference in speed between {least} and {most} GiB"
    slower = 100 * (1 - 1 / beyond.value)
    return f"{own}: in {least} GiB {slower:.{0 if slower >= 1 else 1}f}% slower than in {most} GiB"


def _own(line: Sequence[_PlottedConfiguration]) -> str:
    return subject_name(row for spot in line for row in spot.point.rows)


def _rival(spots: Sequence[_PlottedConfiguration]) -> _PlottedConfiguration | None:
    """The fastest other system of a run that has a trial of burst's line."""
    runs = {spot.run for spot in _line(spots)}
    others = [spot for spot in spots if not spot.own and spot.run in runs]
    return max(others, key=lambda spot: spot.speed, default=None)


def _same_kernel(spots: Sequence[_PlottedConfiguration]) -> str:
    """Where burst's line has another attention kernel than the system of the title: the ratio with that one's."""
    line, best = _line(spots), _rival(spots)
    if best is None or not best.kernel or line[0].kernel in best.kernel:
        return ""
    for spot in spots:
        if spot.own and spot.kernel and spot.kernel in best.kernel and (ratio := spot.beside(best)) and ratio.spread:
            times = " to ".join(dict.fromkeys(ratio.between.split(" to ")))
            kernel = kernel_in_words(spot.kernel)
            where = f"{_own(line)} in {spot.memory:.0f} GiB"
            return f"With {kernel} in both, {where} is {times} times as fast as {best.name}."
    theirs = kernel_in_words(best.kernel)
    return f"{_own(line)} and {best.name} attend with different kernels, {theirs} in the latter."


def _kernels(spot: _PlottedConfiguration, other: _PlottedConfiguration) -> str:
    """The attention kernels of both, where they are known and differ: a title without them would hide half of it."""
    if not spot.kernel or not other.kernel or spot.kernel in other.kernel:
        return ""
    return f", {kernel_in_words(spot.kernel)} beside {kernel_in_words(first_kernel(other.kernel))}"


def _compared(spot: _PlottedConfiguration, other: _PlottedConfiguration, found: Speedup) -> str:
    share = _share(spot.memory / other.memory)
    name, percent = other.name, 100 * (found.value - 1)
    if not isinstance(found.spread, Interval):
        rounds = "two rounds" if found.spread else "one round"
        return f"{_own([spot])} at {found.value:.2f} times the speed of {name} in {share} ({rounds})"
    if found.verdict == "not distinguishable":
        return f"As fast as {name}, in {share}"
    ends = sorted(abs(100 * (end - 1)) for end in (found.spread.low, found.spread.high))
    digits = 0 if ends[0] >= 1 else 1
    between = " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in ends))
    if digits == 0 and ends[1] - ends[0] < 1:
        between = f"{abs(percent):.0f}"
    return f"{between}% {'faster' if percent > 0 else 'slower'} than {name}, in {share}"


def _share(ratio: float) -> str:
    """Of the other's memory, in words: `a fifth of its memory`."""
    for parts, words in _SHARES.items():
        if abs(ratio * parts - 1) <= 0.04:
            return f"{words} of its memory"
    if ratio < 0.97:
        return f"{ratio:.0%} of its memory"
    return "the same memory" if ratio <= 1.03 else f"{ratio:.1f} times its memory"


def _paint(page: Page, *, spots: Sequence[_PlottedConfiguration], unit: str) -> None:
    form, left, line = page.form, 0.62, _line(spots)
    wide, tall = page.right - left, 3.4 if form.narrow else 2.9
    ax = page.panel(0.26, left, wide, tall, below=0.4)
    values = [end for spot in spots for end in (spot.speed, *(_ends(spot) or ()))]
    low = min(values) - 0.35 * (max(values) - min(values)) if _zoomed(spots) else 0.0
    ax.set_xlim(0, 1.12 * max(spot.memory for spot in spots))
    ax.set_ylim(low, max(values) + 0.16 * (max(values) - low))
    for axis, ticks in ((ax.xaxis, 5 if form.narrow else 7), (ax.yaxis, 4)):
        axis.set_major_locator(MaxNLocator(ticks, steps=STEPS))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    ax.annotate(unit, (0, 1), (-left * 72 + 8, 9), xycoords="axes fraction", textcoords="offset points",
                fontsize=form.small, color=MUTED)  # fmt: skip
    ax.set_xlabel("peak GPU memory, GiB", fontsize=form.small, labelpad=2)
    if len(line) > 1:
        at = [spot.memory for spot in line], [spot.speed for spot in line]
        ax.plot(*at, color=line[0].colour, linewidth=2.0, zorder=2)
    for spot in spots:
        if ends := _ends(spot):
            ax.vlines(spot.memory, *ends, colors=spot.colour, linewidths=1.1, zorder=2.5)
        [drawn] = ax.plot(
            spot.memory, spot.speed, "o", color=spot.colour if spot.own else MUTED, markersize=7 if spot.own else 6,
            markeredgecolor=PAPER, markeredgewidth=0.8, zorder=4 if spot.own else 3,
        )  # fmt: skip
        speed = f"{whole_text(spot.speed, ends)} {unit}"
        page.tip(drawn, f"{spot.point.series}: {speed}, {number_text(spot.memory)} GiB")
    _label(ax, spots, line, wide, tall, form)


def _zoomed(spots: Sequence[_PlottedConfiguration]) -> bool:
    """Whether the axis of speeds holds those of one method alone, which lie close together."""
    speeds = [spot.speed for spot in spots]
    return len({spot.point.rows[0]["method"] for spot in spots}) == 1 and min(speeds) > 0.6 * max(speeds)


def _ends(spot: _PlottedConfiguration) -> tuple[float, float] | None:
    return spot.point.drawn_whisker(SPEED)


def _line(spots: Sequence[_PlottedConfiguration]) -> list[_PlottedConfiguration]:
    """Burst's configurations that no other of it beats in memory without being slower, by memory: where several were
    planned those, and of these the ones with the kernel that most have."""
    own = [spot for spot in spots if spot.own]
    planned = [spot for spot in own if spot.planned]
    if len(planned) > 1:
        [(usual, _)] = Counter(spot.kernel for spot in planned).most_common(1)
        own = [spot for spot in planned if spot.kernel == usual]
    kept: list[_PlottedConfiguration] = []
    for spot in own:
        if not kept or spot.speed > kept[-1].speed:
            kept.append(spot)
    return kept


def _label(
    ax: Axes,
    spots: Sequence[_PlottedConfiguration],
    line: Sequence[_PlottedConfiguration],
    wide: float,
    tall: float,
    form: FigureSize,
) -> None:
    """A name beside each point, where it covers the fewest names, points and pieces of the line; one that found no room
    beside its point is joined to it."""
    size = form.small
    to_axes = ax.transScale + ax.transLimits
    at = {id(spot): to_axes.transform((spot.memory, spot.speed)) * (wide, tall) for spot in spots}
    taken = [_around(x, y, 0.07) for x, y in at.values()]
    for start, end in pairwise(at[id(spot)] for spot in line):  # pieces of the line
        taken += [_around(x, y, 0.03) for x, y in np.linspace(start, end, 13)[1:-1]]
    joints = []
    for spot in sorted(spots, key=lambda spot: (not spot.own, spot.memory)):
        words = wrapped(spot.label, 1.15 if form.narrow else wide, size, bold=spot.own)
        width = max(text_inches(word, size, bold=spot.own) for word in words) + 0.02
        x, y = at[id(spot)]
        near, far = _places(x, y, width, _STEP * len(words), spot.own)
        cost = {box: _cost(box, taken, wide, tall) + (0.0 if box in near else 0.03) for box in (*near, *far)}
        box = min(cost, key=lambda one: cost[one])
        taken.append(box)
        for place, word in enumerate(words):
            ax.text(
                box[0] / wide, (box[3] - _STEP * (place + 0.5)) / tall, word, transform=ax.transAxes, fontsize=size,
                va="center", color=spot.colour if spot.own else INK, fontweight="bold" if spot.own else "normal",
            )  # fmt: skip
        if box not in near:
            nearest = (min(max(x, box[0]), box[2]), box[1] if box[1] > y else box[3])
            joints.append([(x / wide, y / tall), (nearest[0] / wide, nearest[1] / tall)])
    ax.add_collection(LineCollection(joints, colors=MUTED, linewidths=0.6, transform=ax.transAxes), autolim=False)


def _around(x: float, y: float, half: float) -> _Box:
    return (x - half, y - half, x + half, y + half)


def _places(x: float, y: float, width: float, height: float, above: bool) -> tuple[list[_Box], list[_Box]]:
    """Places for a name of this size that touch a point, the best ones first, and such that do not."""
    gap = 0.1
    right, left, middle = x + gap, x - width - gap, x - width / 2
    over, beside, under = y + gap, y - height / 2, y - gap - height
    near = [(middle, over), (right, beside)] if above else [(right, beside), (middle, over)]
    near += [(left, beside), (middle, under), (right, y + gap / 2), (left + gap / 2, y + gap / 2)]
    near += [(x + gap / 2, under), (left + gap / 2, under)]
    shifts = [shift for away in (0.16, 0.36, 0.56) for shift in (over + away, under - away)]
    far = list(product((middle, right, left), shifts))
    boxes = [[(at, low, at + width, low + height) for at, low in places] for places in (near, far)]
    return boxes[0], boxes[1]


def _cost(box: _Box, taken: Sequence[_Box], wide: float, tall: float) -> float:
    """The area that is covered twice, and much for what lies outside the panel."""
    left, bottom, right, top = box
    outside = sum(max(0.0, one) for one in (-0.5 - left, right - wide - 0.05, 0.02 - bottom, top - tall - 0.15))
    over = sum(
        max(0.0, min(right, x1) - max(left, x0)) * max(0.0, min(top, y1) - max(bottom, y0)) for x0, y0, x1, y1 in taken
    )
    return over + 10 * outside


FIGURES = {"speed_memory": SpeedMemory()}
