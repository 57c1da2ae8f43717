"""Native baselines that are slower than the system they are written after, which every table and figure marks.

A comparison with a native baseline says something about the system only where it is as fast as the system itself. The
ratio is formed where both ran in one run with equal settings, by their steps and rounds (`harness.report.speedup`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from baselines.originals import ORIGINALS
from harness.base.lengths import format_length
from harness.report.results import Row
from harness.report.speedup import Speedup, point_of, speedup, times
from harness.report.tables.table import Table
from harness.report.variants import on_cpu, panel_name, panel_of

LEAST = 0.97  # of its original's speed: below it a native baseline is marked
MARK = "†"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowBaseline:
    """One native baseline at one point."""

    native: str
    original: str
    found: Speedup  # of the native baseline over the original: below LEAST
    first: Row

    @property
    def text(self) -> str:
        """`megatron_cp 0.91× (0.902 to 0.915) of megatron_lm_upstream at 64K tokens, CP 4`."""
        place = f"{format_length(self.first['seq_len'])} tokens, {panel_name(panel_of(self.first))}"
        return f"{self.native} {times(self.found.value)} ({self.found.between}) of {self.original} at {place}"


def slow_baselines(rows: Iterable[Row]) -> dict[int, SlowBaseline]:
    """Of the rows on GPUs, those of native baselines below LEAST of an original, by `id`; with the lowest ratio."""
    measured = [row for row in rows if row["status"] == "ok" and not on_cpu(row)]
    found: dict[int, SlowBaseline] = {}
    points: dict[tuple[object, ...], dict[str, list[Row]]] = {}
    for row in measured:
        points.setdefault(point_of(row), {}).setdefault(row["method"], []).append(row)
    for native, originals in ORIGINALS.items():
        ours = {point: methods[native] for point, methods in points.items() if native in methods}
        for original in originals if ours else ():
            theirs = _by_point(points, original.method, original.schedules)
            for point, group in ours.items():
                key = _without_schedule(point) if original.schedules else point
                ratio = speedup(group, theirs.get(key, ()))
                if ratio is None or ratio.value >= LEAST:
                    continue
                baseline = SlowBaseline(native=native, original=original.method, found=ratio, first=group[0])
                for row in group:
                    before = found.get(id(row))
                    if before is None or ratio.value < before.found.value:
                        found[id(row)] = baseline
    return found


def _by_point(
    points: Mapping[tuple[object, ...], Mapping[str, list[Row]]], method: str, schedules: Sequence[str]
) -> dict[tuple[object, ...], list[Row]]:
    """Trials of `method` by point; where it stands for a native baseline with some schedules, those, by the rest."""
    if not schedules:
        return {point: methods[method] for point, methods in points.items() if method in methods}
    found: dict[tuple[object, ...], list[Row]] = {}
    for point, methods in points.items():
        group = [row for row in methods.get(method, ()) if row["schedule"] in schedules]
        if group:
            found.setdefault(_without_schedule(point), []).extend(group)
    return found


def _without_schedule(point: tuple[object, ...]) -> tuple[object, ...]:
    run, experiment, settings = point
    return (
        run,
        experiment,
        tuple(item for item in cast(tuple[tuple[str, object], ...], settings) if item[0] != "schedule"),
    )


def marked(name: str, slow: bool) -> str:
    """A name in a table, legend or sentence, marked where its trial is of a slow native baseline."""
    return f"{name} {MARK}" if slow else name


def slow_sentence(slow: Iterable[SlowBaseline]) -> str:
    """What the mark means, with the lowest ratio of each baseline and original; empty where nothing is marked."""
    worst: dict[tuple[str, str], SlowBaseline] = {}
    points: dict[tuple[str, str], set[int]] = {}
    for baseline in slow:
        key = (baseline.native, baseline.original)
        points.setdefault(key, set()).add(id(baseline.first))
        if key not in worst or baseline.found.value < worst[key].found.value:
            worst[key] = baseline
    if not worst:
        return ""
    texts = [
        baseline.text + (f", the lowest of {len(points[key])} points" if len(points[key]) > 1 else "")
        for key, baseline in worst.items()
    ]
    return f"{MARK} Native baseline below {LEAST:g} of its original's speed: {'; '.join(texts)}."


def with_mark_explained(table: Table, sentence: str) -> Table:
    """The table with the sentence below it, where one of its cells or headers is marked."""
    cells = [column.header for column in table.columns] + [cell for row in table.rows for cell in row]
    if not sentence or not any(isinstance(cell, str) and MARK in cell for cell in cells):
        return table
    return replace(table, note=f"{table.note} {sentence}".strip())
