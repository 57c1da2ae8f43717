"""Speed against memory at one length: burst under budgets of memory as a line, other systems as points.

Drawn of the longest sequence at which configurations of burst differ in memory. The title compares trials of one
run alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.ticker import FuncFormatter, MaxNLocator

from harness.base.lengths import format_length
from harness.metrics.hardware import hardware_for
from harness.metrics.intervals import Interval
from harness.report.drawing.looks import INK, MUTED, PAPER
from harness.report.drawing.notes import samples_note, whisker_note
from harness.report.drawing.points import FigureLayout, SeriesPoint, configuration_of, laid_out, number_text
from harness.report.drawing.sheet import FigureSize, Page, Sheet, text_inches, wrapped
from harness.report.footnotes import kernel_in_words
from harness.report.results import Row
from harness.report.speedup import Speedup, speedup
from harness.report.variants import is_subject, on_cpu, panel_of, subject_name

MEMORY, SPEED = "peak_memory_gib", "tokens_per_gpu_per_second"
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
        layout = laid_out(here)
        spots = _spots(layout)
        lost = sorted({f"{point.series} ({point.lost})" for point in layout.points if _at(point) is None})
        dates = sorted({str(row["started_at"])[:10] for row in here if row["started_at"]})
        notes = [
            _same_kernel(spots),
            samples_note(here),
            whisker_note([point.rows for point in layout.points]),
            *layout.notes,
            *([f"Without a point: {', '.join(lost)}."] if lost else []),
            *(["The speeds do not start at 0."] if _zoomed(spots) else []),
            *([f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."] if dates else []),
        ]
        unit = "tokens/s" if here[0]["world_size"] == 1 else "tokens/s per GPU"
        return Sheet(
            title=_title(spots), about=_about(here), notes=[note for note in notes if note],
            footnotes=layout.footnotes, plot=lambda page: _paint(page, spots, unit),
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


def shows_all(rows: Sequence[Row]) -> bool:
    """Whether this figure shows the speed and the memory of every trial, so that no other need do so."""
    return len({(row["seq_len"], row["mask"], panel_of(row)) for row in rows}) == 1 and bool(_shown(rows))


def _shown(rows: Sequence[Row]) -> list[Row]:
    """The rows of the longest sequence of the most ranks with a choice of memory; none where no length has one."""
    if rows[0]["task"] != "train" or all(map(on_cpu, rows)):
        return []
    places: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        places.setdefault((row["seq_len"], row["world_size"]), []).append(row)
    for place in sorted(places, reverse=True):
        found: dict[object, float] = {}
        own = [row for row in places[place] if is_subject(row)]
        for row in own:
            if row.get(MEMORY) and row.get(SPEED):
                found[configuration_of(row)] = row[MEMORY]
        measured = sum(bool(row.get(SPEED)) for row in places[place])
        one_set_up = len({(row["run"], row["settings"]) for row in own}) == len({row["run"] for row in own})
        if len(found) > 1 < measured - 1 and one_set_up and max(found.values()) > APART * min(found.values()):
            return places[place]
    return []


def _at(point: SeriesPoint) -> tuple[float, float] | None:
    memory, speed = point.value(MEMORY), point.value(SPEED)
    return None if memory is None or speed is None else (memory, speed)


def _spots(layout: FigureLayout) -> list[_PlottedConfiguration]:
    """All configurations with both numbers, by memory. The first that was planned says whose line it begins."""
    found = []
    own = subject_name(row for point in layout.points for row in point.rows)
    planned = [point for point in layout.points if point.own and _at(point) and _budget(point.rows[0])]
    kernels = Counter(_kernel(point) for point in planned)
    for point in layout.points:
        if at := _at(point):
            label = point.series
            if point in planned:
                label = _budget(point.rows[0])
                if _kernel(point) != kernels.most_common(1)[0][0]:
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


def _kernel(point: SeriesPoint) -> str:
    return str(point.rows[0].get("chosen_kernel") or "")


def _budget(row: Row) -> str:
    """The budget that a trial was planned for: `24 GiB`, `all of the GPU`; empty for a trial set by hand."""
    if row.get("checkpoint.plan") != "auto":
        return ""
    hardware = hardware_for(row["gpu"])
    budget = row.get("memory") or ""
    if not budget or (hardware and budget == f"{hardware.memory_gib:g}GiB"):
        return "all of the GPU"
    return re.sub(r"(?<=\d)(?=[A-Za-z])", " ", budget)


def _about(rows: Sequence[Row]) -> str:
    row = rows[0]
    model = row["model"].upper() if re.fullmatch(r"\d+(\.\d+)?b", row["model"]) else row["model"]
    gpu = str(row["gpu"]).removeprefix("NVIDIA ")
    devices = f"one {gpu}" if row["world_size"] == 1 else f"{row['world_size']} × {gpu}"
    length = format_length(row["seq_len"]).upper()
    setup = f"{model} model, one sequence of {length} tokens, {row['mask']} mask, {row['dtype']}, {devices}"
    return f"{setup}. Top left is best."


def _title(spots: Sequence[_PlottedConfiguration]) -> str:
    """What the least memory buys that is still faster than the fastest other system of the same run."""
    line = _line(spots)
    best = _rival(spots)
    if best is not None:
        found = [(spot, ratio) for spot in line if _one_run(spot, best) and (ratio := _ratio(spot, best))]
        for verdict in ("faster", "faster in both rounds", "not distinguishable"):
            for spot, ratio in found:
                if ratio.verdict == verdict:
                    return _compared(spot, best, ratio)
        if found:
            return _compared(*max(((spot, best, ratio) for spot, ratio in found), key=lambda one: one[2].value))
    first, last, own = line[0], line[-1], _own(line)
    least, most = number_text(first.memory), number_text(last.memory)
    if first is last:
        return f"{own}: {number_text(first.speed)} tokens/s in {least} GiB, fastest and least"
    beyond = _ratio(last, first)
    if beyond is None or beyond.verdict == "not distinguishable":
        return f"{own}: no difference in speed between {least} and {most} GiB"
    slower = 100 * (1 - 1 / beyond.value)
    return f"{own}: in {least} GiB {slower:.{0 if slower >= 1 else 1}f}% slower than in {most} GiB"


def _own(line: Sequence[_PlottedConfiguration]) -> str:
    return subject_name(row for spot in line for row in spot.point.rows)


def _rival(spots: Sequence[_PlottedConfiguration]) -> _PlottedConfiguration | None:
    """The fastest other system of a run that has a trial of burst's line."""
    runs = {spot.point.rows[0]["run"] for spot in _line(spots)}
    others = [spot for spot in spots if not spot.own and spot.point.rows[0]["run"] in runs]
    return max(others, key=lambda spot: spot.speed, default=None)


def _one_run(spot: _PlottedConfiguration, other: _PlottedConfiguration) -> bool:
    return bool(spot.point.rows[0]["run"] == other.point.rows[0]["run"])


def _ratio(spot: _PlottedConfiguration, other: _PlottedConfiguration) -> Speedup | None:
    return speedup(spot.point.rows, other.point.rows)


def _same_kernel(spots: Sequence[_PlottedConfiguration]) -> str:
    """Where burst's line has another attention kernel than the system of the title: the ratio with that one's."""
    line, best = _line(spots), _rival(spots)
    if best is None or not (theirs := _kernel(best.point)) or _kernel(line[0].point) in theirs:
        return ""
    for spot in spots:
        if spot.own and _kernel(spot.point) and _kernel(spot.point) in theirs and _one_run(spot, best):
            ratio = _ratio(spot, best)
            if ratio is not None and ratio.spread is not None:
                kernel = kernel_in_words(_kernel(spot.point))
                times = " to ".join(dict.fromkeys(ratio.between.split(" to ")))
                return f"With {kernel} in both, {_own(line)} is {times} times as fast as {best.point.series}."
    return (
        f"{_own(line)} and {best.point.series} attend with different kernels, {kernel_in_words(theirs)} in the latter."
    )


def _compared(spot: _PlottedConfiguration, other: _PlottedConfiguration, found: Speedup) -> str:
    share = _share(spot.memory / other.memory)
    name, percent = other.point.series, 100 * (found.value - 1)
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


def _paint(page: Page, spots: Sequence[_PlottedConfiguration], unit: str) -> None:
    form = page.form
    left, wide, tall = 0.62, 0.0, 2.9 if not form.narrow else 3.4
    wide = page.right - left
    ax = page.panel(0.26, left, wide, tall, below=0.4)
    values = [end for spot in spots for end in (spot.speed, *(_ends(spot) or ()))]
    low = min(values) - 0.35 * (max(values) - min(values)) if _zoomed(spots) else 0.0
    ax.set_xlim(0, 1.12 * max(spot.memory for spot in spots))
    ax.set_ylim(low, max(values) + 0.16 * (max(values) - low))
    ax.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_locator(MaxNLocator(7 if not form.narrow else 5, steps=[1, 2, 2.5, 5, 10]))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    ax.annotate(unit, (0, 1), (-left * 72 + 8, 9), xycoords="axes fraction", textcoords="offset points",
                fontsize=form.small, color=MUTED)  # fmt: skip
    ax.set_xlabel("peak GPU memory, GiB", fontsize=form.small, labelpad=2)
    line = _line(spots)
    colour = next((spot.colour for spot in line), INK)
    if len(line) > 1:
        ax.plot([spot.memory for spot in line], [spot.speed for spot in line], color=colour, linewidth=2.0, zorder=2)
    whiskers = [([(spot.memory, end) for end in ends], spot.colour) for spot in spots if (ends := _ends(spot))]
    ax.add_collection(
        LineCollection([one for one, _ in whiskers], colors=[one for _, one in whiskers], linewidths=1.1, zorder=2.5),
        autolim=False,
    )
    for spot in spots:
        shade = spot.colour if spot.own else MUTED
        [drawn] = ax.plot(
            spot.memory, spot.speed, "o", color=shade, markersize=7 if spot.own else 6, markeredgecolor=PAPER,
            markeredgewidth=0.8, zorder=4 if spot.own else 3,
        )  # fmt: skip
        ends = _ends(spot)
        between = f" ({number_text(ends[0], ends)} to {number_text(ends[1], ends)})" if ends else ""
        page.tip(
            drawn,
            f"{spot.point.series}: {number_text(spot.speed, ends)}{between} {unit}, {number_text(spot.memory)} GiB",
        )
    _label(ax, spots, line, wide, tall, form)


def _zoomed(spots: Sequence[_PlottedConfiguration]) -> bool:
    """Whether the axis of speeds holds those of one method alone, which lie close together."""
    speeds = [spot.speed for spot in spots]
    return len({spot.point.rows[0]["method"] for spot in spots}) == 1 and min(speeds) > 0.6 * max(speeds)


def _ends(spot: _PlottedConfiguration) -> tuple[float, float] | None:
    ends = spot.point.whisker(SPEED)
    return None if ends is None or ends[1] > 10 * ends[0] else ends


def _line(spots: Sequence[_PlottedConfiguration]) -> list[_PlottedConfiguration]:
    """Burst's configurations that no other of it beats in memory without being slower, by memory: where several were
    planned those, and of these the ones with the kernel that most have."""
    own = [spot for spot in spots if spot.own]
    planned = [spot for spot in own if _budget(spot.point.rows[0])]
    usual = Counter(_kernel(spot.point) for spot in planned).most_common(1)
    kept: list[_PlottedConfiguration] = []
    for spot in [one for one in planned if _kernel(one.point) == usual[0][0]] if len(planned) > 1 else own:
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
    taken = [(x - 0.07, y - 0.07, x + 0.07, y + 0.07) for x, y in at.values()]
    for (x0, y0), (x1, y1) in pairwise(at[id(spot)] for spot in line):
        for part in range(1, 12):
            x, y = x0 + (x1 - x0) * part / 12, y0 + (y1 - y0) * part / 12
            taken.append((x - 0.03, y - 0.03, x + 0.03, y + 0.03))
    joints = []
    for spot in sorted(spots, key=lambda spot: (not spot.own, spot.memory)):
        words = wrapped(spot.label, 1.15 if form.narrow else wide, size, bold=spot.own)
        width = max(text_inches(word, size, bold=spot.own) for word in words) + 0.02
        x, y = at[id(spot)]
        box, near = min(
            _boxes(x, y, width, _STEP * len(words), spot.own),
            key=lambda one: _cost(one[0], taken, wide, tall) + (0.0 if one[1] else 0.03),
        )
        taken.append(box)
        for place, word in enumerate(words):
            ax.text(
                box[0] / wide, (box[3] - _STEP * (place + 0.5)) / tall, word, transform=ax.transAxes, fontsize=size,
                va="center", color=spot.colour if spot.own else INK, fontweight="bold" if spot.own else "normal",
            )  # fmt: skip
        if not near:
            end = (min(max(x, box[0]), box[2]), box[1] if box[1] > y else box[3])
            joints.append([(x / wide, y / tall), (end[0] / wide, end[1] / tall)])
    ax.add_collection(LineCollection(joints, colors=MUTED, linewidths=0.6, transform=ax.transAxes), autolim=False)


def _boxes(x: float, y: float, width: float, height: float, above: bool) -> list[tuple[_Box, bool]]:
    """Places for a name of this size around a point, the best ones first, and whether they touch it."""
    gap, middle = 0.1, y - height / 2
    near = [
        (x - width / 2, y + gap), (x + gap, middle), (x - width - gap, middle), (x - width / 2, y - gap - height),
        (x + gap, y + gap / 2), (x - width - gap / 2, y + gap / 2), (x + gap / 2, y - gap - height),
        (x - width - gap / 2, y - gap - height),
    ]  # fmt: skip
    if not above:
        near[0], near[1] = near[1], near[0]
    far = [
        (x + aside, y + up)
        for aside in (-width / 2, gap, -width - gap)
        for up in (gap + 0.16, -gap - height - 0.16, gap + 0.36, -gap - height - 0.36, gap + 0.56, -gap - height - 0.56)
    ]
    placed = [(place, True) for place in near] + [(place, False) for place in far]
    return [((left, bottom, left + width, bottom + height), touches) for (left, bottom), touches in placed]


def _cost(box: _Box, taken: Sequence[_Box], wide: float, tall: float) -> float:
    """The area that is covered twice, and much for what lies outside the panel."""
    left, bottom, right, top = box
    outside = sum(max(0.0, one) for one in (-0.5 - left, right - wide - 0.05, 0.02 - bottom, top - tall - 0.15))
    over = sum(
        max(0.0, min(right, x1) - max(left, x0)) * max(0.0, min(top, y1) - max(bottom, y0)) for x0, y0, x1, y1 in taken
    )
    return over + 10 * outside


FIGURE = SpeedMemory()
