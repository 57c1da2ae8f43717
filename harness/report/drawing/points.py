"""The rows of a figure as panels, series and points, and the sentences below it.

A point is every trial of one series, panel and length; where these are several (seeds, pooled settings) it has their
median, and their range. What a reader could not tell apart is pooled or left out, and a sentence says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from harness.base.lengths import format_length
from harness.metrics.hardware import hardware_for
from harness.metrics.intervals import Interval, TwoRounds
from harness.metrics.throughput import OWN_GEMMS
from harness.report.digits import decimals_of, rounded
from harness.report.drawing.looks import MAX_SERIES, Look, looks_of
from harness.report.results import UPSTREAM, Row, grouped, setting_names, spread_of
from harness.report.speedup import marked, slow_baselines, slow_sentence
from harness.report.variants import (
    footnotes_of,
    is_subject,
    panel_name,
    panel_of,
    pooled,
    series_of,
    setting_of,
    setup_name,
    setup_of,
    setups_of,
    span_text,
    varying_settings,
)

MAX_PANELS = 8
MAX_GROUPS = 12  # set-ups of one report that have figures
IN_CSV = "results.csv has every trial"

_T = TypeVar("_T")


class FigureRows(list[Row]):
    """The rows of one figure: those of a set-up, or of several that differ in their mask alone."""

    note = ""  # a sentence about what has no figure


def groups_of(rows: Sequence[Row]) -> list[FigureRows]:
    """What figures are drawn of: each set-up, but for three or more that differ in their mask alone, which share one.

    Of more than MAX_GROUPS, those with the most measured trials.
    """

    def but_mask(setup: list[Row]) -> tuple[object, ...]:
        run, experiment, task, model, dtype, _, shape = setup_of(setup[0])
        return (run, experiment, task, model, dtype, shape)

    groups: list[FigureRows] = []
    for members in grouped(setups_of(rows), but_mask).values():
        groups += [FigureRows(chain.from_iterable(members))] if len(members) > 2 else map(FigureRows, members)
    kept = _most_measured(groups, MAX_GROUPS, lambda group: group)
    if len(kept) < len(groups):
        left = len(groups) - len(kept)
        for group in kept:
            group.note = f"{left} more set-ups of these records, with fewer trials, have no figure; {IN_CSV}."
    return kept


def _most_measured(items: Sequence[_T], most: int, rows: Callable[[_T], Iterable[Row]]) -> list[_T]:
    """The items with the most measured trials, at most so many, in their order."""
    counts = [sum(row["status"] == "ok" for row in rows(item)) for item in items]
    kept = sorted(range(len(items)), key=lambda place: -counts[place])[:most]
    return [items[place] for place in sorted(kept)]


def about(rows: Sequence[Row]) -> str:
    """The set-up of `rows` in words: model, dtype, mask (or how many) and device."""
    masks = len({row["mask"] for row in rows})
    first = f"{rows[0]['mask']} mask"
    return setup_name(rows) if masks == 1 else setup_name(rows).replace(first, f"{masks} masks", 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesPoint:
    """Every trial of one series at one length, in one panel."""

    series: str
    seq_len: int
    rows: list[Row]

    def value(self, column: str | None) -> float | None:
        """Median of `column` over the trials that have it; None when none has."""
        return pooled(self.rows, column) if column else None

    def whisker(self, column: str) -> tuple[float, float] | None:
        """From where to where the whisker of `column` reaches; None where there is nothing to draw.

        Of several trials their range; of one its interval over rounds, of two rounds both values, of a single round
        the interquartile range of its steps, for columns proportional to the step time or to its inverse.
        """
        measured = [row for row in self.rows if row.get(column) is not None]
        if len(measured) != 1:
            values = [row[column] for row in measured] or [0.0]
            return (min(values), max(values)) if min(values) < max(values) else None
        [row] = measured
        value, median, spread = row[column], row["step_seconds_median"], spread_of(row)
        if spread is None:
            half = row["step_seconds_iqr"] / median / 2 if row["step_seconds_iqr"] else 0.0
            return (value * (1 - half), value * (1 + half)) if half else None
        low, high = spread.ends
        return (low, high) if column == "step_seconds_median" else (value * median / high, value * median / low)

    def drawn_whisker(self, column: str, scale: float = 1.0) -> tuple[float, float] | None:
        """The same x `scale`; none where it is so wide that no axis should hold it."""
        ends = self.whisker(column)
        return None if ends is None or ends[1] > 10 * ends[0] else (ends[0] * scale, ends[1] * scale)

    @property
    def own(self) -> bool:
        return is_subject(self.rows[0])

    @property
    def upstream(self) -> bool:
        return str(self.rows[0]["method"]).endswith(UPSTREAM)

    @property
    def lost(self) -> str:
        """Statuses of the trials without a number, in words; `not measured` where every trial is ok."""
        return "/".join(sorted({row["status"] for row in self.rows} - {"ok"})) or "not measured"


def number_text(value: float, ends: tuple[float, float] | None = None) -> str:
    """A value with the digits that its whisker supports: `17,000`, `1.16`."""
    return rounded(value, decimals_between(value, ends))


def whole_text(value: float, ends: tuple[float, float] | None) -> str:
    """The value and from where to where its whisker reaches: `17,000 (16,900 to 17,100)`."""
    between = f" ({number_text(ends[0], ends)} to {number_text(ends[1], ends)})" if ends else ""
    return f"{number_text(value, ends)}{between}"


def range_text(values: Iterable[float | None], scale: float = 1.0) -> str:
    """From the smallest to the largest of the values that there are: `12.1 to 40.3`, or one number."""
    found = [value * scale for value in values if value is not None]
    return " to ".join(dict.fromkeys((number_text(min(found)), number_text(max(found)))))


def span_of(lengths: Iterable[int]) -> str:
    """`16K to 128K tokens`, as figures write lengths."""
    return span_text(lengths, lambda length: format_length(length).upper())


def decimals_between(value: float, ends: tuple[float, float] | None) -> int:
    """How many decimals of a value its whisker supports."""
    return decimals_of(value, Interval(low=ends[0], high=ends[1]) if ends and ends[0] < ends[1] else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """The points of one parallel size (and of one mask, where a figure has several)."""

    title: str
    points: list[SeriesPoint]


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureLayout:
    """The rows of a figure in their places, by the names of series."""

    panels: list[Panel]
    looks: dict[str, Look]
    notes: list[str]  # what is pooled, what is not drawn, what a mark means
    footnotes: list[str]  # what names leave out

    @property
    def points(self) -> list[SeriesPoint]:
        return [point for panel in self.panels for point in panel.points]

    @property
    def lengths(self) -> list[int]:
        return sorted({point.seq_len for point in self.points})

    @property
    def places(self) -> list[tuple[Panel, int, list[SeriesPoint]]]:
        """The points of each panel at each length, where there are some."""
        return [
            (panel, seq_len, here)
            for panel in self.panels
            for seq_len, here in grouped(panel.points, lambda point: point.seq_len).items()
        ]


def laid_out(rows: Sequence[Row], *, pooling: bool = True) -> FigureLayout:
    """Panels, series and points of `rows`, at most MAX_PANELS and MAX_SERIES of them; without `pooling` all series."""
    notes = [note] if (note := getattr(rows, "note", "")) else []
    several = len({row["mask"] for row in rows}) > 1
    panels = sorted(grouped(rows, lambda row: (row["mask"] if several else "", *panel_of(row))).items())
    kept = _most_measured(panels, MAX_PANELS, lambda panel: panel[1])
    if len(kept) < len(panels):
        notes.append(f"{MAX_PANELS} of {len(panels)} parallel sizes are drawn, those with the most trials; {IN_CSV}.")
    drawn = [row for _, group in kept for row in group]
    series, left_out = _series(drawn) if pooling else (series_of(drawn), "")
    slow = slow_baselines(rows)
    series = [(marked(name, any(id(row) in slow for row in group)), group) for name, group in series]
    notes += [note for note in (left_out, slow_sentence(slow.values())) if note]
    order = {id(row): (place, name) for place, (name, group) in enumerate(series) for row in group}
    several_sizes = len({key[1:] for key, _ in kept}) > 1

    def title(mask: str, *sizes: int) -> str:
        size = panel_name((sizes[0], sizes[1], sizes[2])) if several_sizes else ""
        return ", ".join(filter(None, (mask, size))) if len(kept) > 1 else ""

    return FigureLayout(
        panels=[Panel(title=title(*key), points=_points(group, order)) for key, group in kept],
        looks=looks_of(series),
        notes=notes,
        footnotes=footnotes_of([row for _, group in series for row in group]),
    )


def _points(rows: Sequence[Row], order: dict[int, tuple[int, str]]) -> list[SeriesPoint]:
    drawn = [row for row in rows if id(row) in order]
    found = grouped(drawn, lambda row: (row["seq_len"], *order[id(row)]))
    return [
        SeriesPoint(series=name, seq_len=seq_len, rows=members) for (seq_len, _, name), members in sorted(found.items())
    ]


def _series(rows: Sequence[Row]) -> tuple[list[tuple[str, list[Row]]], str]:
    """Series of `rows`, and a sentence about the settings pooled to have no more than MAX_SERIES of them.

    The setting with the most values is pooled first. Methods are never pooled with each other.
    """
    varying = varying_settings(rows)
    counts = {name: len({setting_of(row, name) for row in rows}) for name in varying}
    kept = sorted(varying, key=lambda name: counts[name])
    while len(found := series_of(rows, sorted(kept))) > MAX_SERIES and kept:
        kept.pop()
    dropped = [f"{name} ({counts[name]} values)" for name in varying if name not in kept]
    sentences = [f"Pooled over {', '.join(dropped)}: each point is a median; {IN_CSV}."] if dropped else []
    if len(found) > MAX_SERIES:
        sentences.append(f"{MAX_SERIES} of {len(found)} series are drawn, those with the most trials; {IN_CSV}.")
    return _most_measured(found, MAX_SERIES, lambda series: series[1]), " ".join(sentences)


def memory_column(rows: Iterable[Row]) -> str:
    """The allocator's peak where a trial ran on a GPU, else the resident set of the host."""
    return "peak_memory_gib" if any(row["peak_memory_gib"] for row in rows) else "peak_rss_gib"


def configuration_of(row: Row) -> tuple[object, ...]:
    """Everything that was chosen but the seed and the steps; a figure pools trials with equal ones."""
    kept = (name for name in setting_names(row) if name != "seed" and not name.startswith("steps"))
    return tuple(row[name] for name in kept)


# The sentences below figures: peaks, ceilings, samples, whiskers.


def peak_note(rows: Sequence[Row]) -> str:
    """The peak behind MFU, and where it is published; empty where no row has one."""
    peaks = sorted({(row["gpu"], row["peak_tflops"]) for row in rows if row.get("peak_tflops")})
    return " ".join(f"Peak: {peak:,.0f} TFLOP/s ({gpu}; {_source(gpu, 'peak_bf16_tflops')})." for gpu, peak in peaks)


def ceiling_note(rows: Sequence[Row]) -> str:
    """What the ceiling is, and where and when its kernels were measured; empty where no row has one."""
    drawn = [row for row in rows if row.get("mfu_ceiling") or row.get("tflops_ceiling")]
    if not drawn:
        return ""
    without = {row["gpu"] for row in drawn if not (row.get("ceiling_source") or "").startswith(OWN_GEMMS)}
    own = any(row["gpu"] not in without for row in drawn)
    measured = ["GEMM of the trials' own shapes, measured in them"] if own else []
    for gpu in sorted({row["gpu"] for row in drawn}):
        gemm = f"GEMM {_source(gpu, 'gemm_tflops')}; " if gpu in without else ""
        measured.append(f"{gpu}: {gemm}attention {_source(gpu, 'kernel_ceilings')}")
    return f"Ceiling: the same work at the speeds of kernels alone, no transfer exposed ({'; '.join(measured)})."


def samples_note(rows: Sequence[Row]) -> str:
    """How many steps and rounds stand behind each number."""
    counts = sorted({row["samples"] for row in rows if row["samples"]})
    if not counts:
        return "No trial was measured."
    rounds = sorted({row["rounds"] for row in rows if row["rounds"]})
    seeds = len({row["seed"] for row in rows})
    sweep = f", each with {seeds} seeds (median over seeds)" if seeds > 1 else ""
    return (
        f"n = {_from_to(counts)} measured {'step' if counts == [1] else 'steps'} per trial, warm-up excluded, in "
        f"{'one round' if rounds in ([], [1]) else f'{_from_to(rounds)} rounds'}{sweep}."
    )


def whisker_note(points: Sequence[Sequence[Row]]) -> str:
    """What whiskers are, of the trials at each point; empty where there is none."""
    single = [rows[0] for rows in points if len(rows) == 1]
    spreads = [spread_of(row) for row in single]
    several = any(len(rows) > 1 for rows in points)
    kinds = ["range of the trials at a point"] if several else []
    kinds += ["95% interval of the median over rounds"] if any(isinstance(one, Interval) for one in spreads) else []
    kinds += ["both values of two rounds"] if any(isinstance(one, TwoRounds) for one in spreads) else []
    if any(one is None and row["step_seconds_iqr"] for one, row in zip(spreads, single, strict=True)):
        where = " where there is one round" if kinds else ""
        kinds.append(f"interquartile range of the measured steps{where}")
    return f"Whiskers: {'; '.join(kinds)}." if kinds else ""


def _from_to(counts: Sequence[int]) -> str:
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _source(gpu: str, figure: str) -> str:
    hardware = hardware_for(gpu)
    return hardware.sources.get(figure, "not stated") if hardware else "not stated"
