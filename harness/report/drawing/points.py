"""The rows of a figure as panels, series and points.

A point is every trial of one series, panel and length; where these are several (seeds, pooled settings) it has their
median, and their range. What a reader could not tell apart is pooled or left out, and a sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from harness.metrics.intervals import Interval, TwoRounds
from harness.report.digits import decimals_of, rounded
from harness.report.drawing.looks import MAX_SERIES, Look, looks_of
from harness.report.footnotes import footnotes_of
from harness.report.results import UPSTREAM, Row, setting_names, spread_of
from harness.report.slow_baselines import marked, slow_baselines, slow_sentence
from harness.report.variants import (
    is_subject,
    panel_name,
    panel_of,
    pooled,
    series_of,
    setting_of,
    setup_name,
    setup_of,
    setups_of,
    varying_settings,
)

MAX_PANELS = 8
MAX_GROUPS = 12  # set-ups of one report that have figures
IN_CSV = "results.csv has every trial"


class FigureRows(list[Row]):
    """The rows of one figure: those of a set-up, or of several that differ in their mask alone."""

    note = ""  # a sentence about what has no figure


def groups_of(rows: Sequence[Row]) -> list[FigureRows]:
    """What figures are drawn of: each set-up, but for three or more that differ in their mask alone, which share one.

    Of more than MAX_GROUPS, those with the most measured trials.
    """
    alike: dict[tuple[object, ...], list[list[Row]]] = {}
    for setup in setups_of(rows):
        run, experiment, task, model, dtype, _, shape = setup_of(setup[0])
        alike.setdefault((run, experiment, task, model, dtype, shape), []).append(setup)
    groups = []
    for members in alike.values():
        groups += (
            [FigureRows(chain.from_iterable(members))] if len(members) > 2 else [FigureRows(setup) for setup in members]
        )
    if len(groups) > MAX_GROUPS:
        most = sorted(groups, key=lambda group: -_measured(group))[:MAX_GROUPS]
        left = len(groups) - MAX_GROUPS
        groups = [group for group in groups if any(group is one for one in most)]
        for group in groups:
            group.note = f"{left} more set-ups of these records, with fewer trials, have no figure; {IN_CSV}."
    return groups


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
        values = [row[column] for row in self.rows if row.get(column) is not None]
        if len(values) > 1:
            return (min(values), max(values)) if min(values) < max(values) else None
        if not values:
            return None
        row = next(row for row in self.rows if row.get(column) is not None)
        median, iqr = row["step_seconds_median"], row["step_seconds_iqr"]
        spread = spread_of(row)
        if spread is None:
            if not iqr:
                return None
            half = iqr / median / 2
            return values[0] * (1 - half), values[0] * (1 + half)
        low, high = sorted(spread) if isinstance(spread, TwoRounds) else (spread.low, spread.high)
        if column == "step_seconds_median":
            return low, high
        return values[0] * median / high, values[0] * median / low

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


def range_text(values: Iterable[float | None], scale: float = 1.0) -> str:
    """From the smallest to the largest of the values that there are: `12.1 to 40.3`, or one number."""
    found = [value * scale for value in values if value is not None]
    return " to ".join(dict.fromkeys((number_text(min(found)), number_text(max(found)))))


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


def laid_out(rows: Sequence[Row]) -> FigureLayout:
    """Panels, series and points of `rows`, at most MAX_PANELS and MAX_SERIES of them."""
    notes = [note] if (note := getattr(rows, "note", "")) else []
    several = len({row["mask"] for row in rows}) > 1
    keys = {id(row): (row["mask"] if several else "", *panel_of(row)) for row in rows}
    panels: dict[tuple[str, int, int, int], list[Row]] = {key: [] for key in sorted(set(keys.values()))}
    for row in rows:
        panels[keys[id(row)]].append(row)
    if len(panels) > MAX_PANELS:
        most = sorted(panels, key=lambda key: -_measured(panels[key]))[:MAX_PANELS]
        notes.append(f"{MAX_PANELS} of {len(panels)} parallel sizes are drawn, those with the most trials; {IN_CSV}.")
        panels = {key: group for key, group in panels.items() if key in most}
    shown = [row for group in panels.values() for row in group]
    series, pooling = _series(shown)
    notes += [pooling] if pooling else []
    slow = slow_baselines(rows)
    series = [(marked(name, any(id(row) in slow for row in group)), group) for name, group in series]
    notes += [sentence] if (sentence := slow_sentence(slow.values())) else []
    order = {id(row): (place, name) for place, (name, group) in enumerate(series) for row in group}
    several_sizes = len({key[1:] for key in panels}) > 1
    return FigureLayout(
        panels=[
            Panel(title=_panel_title(key, several_sizes, len(panels)), points=_points(group, order))
            for key, group in panels.items()
        ],
        looks=looks_of(series),
        notes=notes,
        footnotes=footnotes_of([row for _, group in series for row in group]),
    )


def _points(rows: Sequence[Row], order: dict[int, tuple[int, str]]) -> list[SeriesPoint]:
    found: dict[tuple[int, int, str], list[Row]] = {}
    for row in rows:
        if id(row) in order:
            found.setdefault((row["seq_len"], *order[id(row)]), []).append(row)
    return [
        SeriesPoint(series=name, seq_len=seq_len, rows=members) for (seq_len, _, name), members in sorted(found.items())
    ]


def _panel_title(key: tuple[str, int, int, int], several_sizes: bool, panels: int) -> str:
    mask, *sizes = key
    size = panel_name((sizes[0], sizes[1], sizes[2])) if several_sizes else ""
    return ", ".join(filter(None, (mask, size))) if panels > 1 else ""


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
    sentences = []
    if dropped:
        sentences.append(f"Pooled over {', '.join(dropped)}: each point is a median; {IN_CSV}.")
    if len(found) > MAX_SERIES:
        sentences.append(f"{MAX_SERIES} of {len(found)} series are drawn, those with the most trials; {IN_CSV}.")
        most = sorted(found, key=lambda item: -_measured(item[1]))[:MAX_SERIES]
        found = [item for item in found if any(item is one for one in most)]
    return found, " ".join(sentences)


def memory_column(rows: Iterable[Row]) -> str:
    """The allocator's peak where a trial ran on a GPU, else the resident set of the host."""
    return "peak_memory_gib" if any(row["peak_memory_gib"] for row in rows) else "peak_rss_gib"


def configuration_of(row: Row) -> tuple[object, ...]:
    """Everything that was chosen but the seed and the steps; a figure pools trials with equal ones."""
    kept = (name for name in setting_names(row) if name != "seed" and not name.startswith("steps"))
    return tuple(row[name] for name in kept)


def _measured(rows: Iterable[Row]) -> int:
    return sum(row["status"] == "ok" for row in rows)
