"""Methods at equal points: the speed of each beside another's, their ratio, and whether they can be told apart.

Ratios are of speeds here, so above 1 the method named first is faster. Runs are never mixed, and of a run whole rounds
are resampled (`harness.metrics.intervals`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from harness.base.errors import UsageError, nearest
from harness.base.lengths import format_length
from harness.metrics.intervals import ROUNDS_FOR_INTERVAL
from harness.metrics.throughput import FORMULAS
from harness.report.digits import ratio_spread_text, supported
from harness.report.results import Row, method_rank
from harness.report.speedup import TWO_VALUES, SpeedupPoint, contested_points, marked, rounds_of, slow_baselines, times
from harness.report.tables.table import Table, number, table_of, text
from harness.report.tables.trials import CPU_TIMES, measured_speed, or_status, per_unit, unit_of, varying_by_setup
from harness.report.variants import (
    SUBJECT,
    footnotes_of,
    is_subject,
    masks_of,
    method_name,
    models_of,
    on_cpu,
    panel_name,
    panel_of,
    settings_name,
    setup_of,
)
from harness.spec.table import EQUAL


def comparison_table(rows: Sequence[Row], baseline: str | None = None) -> Table | None:
    """A line for every two methods at equal points: ours (where it gave no number the fastest) beside each other one,
    in the order of their speed; with `baseline`, each beside that.

    None where no point has two methods. A baseline that no trial ran is ignored: of several runs some may lack it.
    """
    points = contested_points(rows)
    if not any(row["method"] == baseline for row in rows):
        baseline = None
    firsts = [point.first for point in points]
    several_runs, several_tasks = (len({row[name] for row in firsts}) > 1 for name in ("run", "task"))
    varying, slow = varying_by_setup(rows), slow_baselines(rows)
    lines: list[dict[str, Any]] = []
    for point, first, model, mask in zip(points, firsts, models_of(firsts), masks_of(firsts), strict=True):
        names = {
            method: marked(max(map(method_name, group), key=len), any(id(row) in slow for row in group))
            for method, group in point.by_method.items()
        }
        speeds = {method: or_status(measured_speed(group), group) for method, group in point.by_method.items()}
        for method, other in _pairs(point, baseline):
            if SUBJECT in first and not is_subject(point.by_method[method][0]):
                continue  # another method was asked about
            found = point.speedup(method, other)
            lines.append({
                "run": first["run"] if several_runs else None, "task": first["task"] if several_tasks else None,
                "model": model, "mask": mask,
                "tokens": first["seq_len"], "parallel": panel_name(panel_of(first)),
                "settings": settings_name(first, varying[setup_of(first)]) or None,
                "method": names[method], "speed": speeds[method],
                "other": names[other], "other speed": speeds[other],
                "ratio": found and found.ratio, "interval": found and found.spread, "verdict": found and found.text,
            })  # fmt: skip
    unit = unit_of([row for point in points for row in point.rows])
    columns = (
        text("run", "run"), text("task", "task"), text("model", "model"), text("mask", "mask"),
        number("tokens", "tokens", format_length), text("parallel", "parallel"),
        text("method", "method"), text("beside", "other"), number("times as fast", "ratio", times),
        number("interval", "interval", ratio_spread_text), text("verdict", "verdict"),
        number(f"tok/s/{unit}", "speed", supported()), number(f"tok/s/{unit} beside", "other speed", supported()),
        text("settings", "settings"),
    )  # fmt: skip
    alike = all(row["settings"] == EQUAL for point in points for row in point.rows)
    title = "Methods at equal settings" if alike else "Methods, each with settings of its own"
    if baseline:
        title = f"Methods against {baseline}"
    note = " ".join([_note(points), *footnotes_of([row for point in points for row in point.rows])]) if points else ""
    return table_of("comparison", title, columns, lines, note=note)


def known_baseline(baseline: str | None, rows: Sequence[Row]) -> str | None:
    """The baseline that was asked for. Raises UsageError when no trial of `rows` ran it."""
    methods = sorted({row["method"] for row in rows}, key=method_rank)
    if baseline is not None and methods and baseline not in methods:
        raise UsageError(
            f"--baseline {baseline}: no trial of these records is of that method; {nearest(baseline, methods)}"
        )
    return baseline


def _pairs(point: SpeedupPoint, baseline: str | None) -> Iterator[tuple[str, str]]:
    """Which method of a point stands beside which: those with a number first, the fastest first."""
    ordered = list(dict.fromkeys([*point.measured(), *sorted(point.by_method, key=method_rank)]))
    if baseline is not None:
        yield from ((method, baseline) for method in ordered if method != baseline and baseline in ordered)
    elif subject := point.subject():
        yield from ((subject, other) for other in ordered if other != subject)


def _note(points: Sequence[SpeedupPoint]) -> str:
    """How the table's numbers are formed, and what they cannot say."""
    groups = [group for point in points for group in point.by_method.values()]
    measured = [row for group in groups for row in group if row["status"] == "ok"]
    sentences = [
        per_unit(FORMULAS["tokens_per_gpu_per_second"], [row for group in groups for row in group]),
        "times as fast = speed over speed, by the medians of all measured steps, same run and settings only",
    ]
    rounds = {len(rounds_of(group)) for group in groups}
    if max(rounds) >= ROUNDS_FOR_INTERVAL:
        sentences.append(
            "interval = 95% interval of that ratio, whole rounds resampled, those that both methods ran together in "
            "pairs; faster and slower mean that it excludes 1"
        )
    if 2 in rounds:
        sentences.append(f"interval: {TWO_VALUES}")
    if any(row["rounds"] < ROUNDS_FOR_INTERVAL for row in measured):
        sentences.append(
            f"With fewer than {ROUNDS_FOR_INTERVAL} rounds there is no interval, and a difference cannot be told from "
            "noise"
        )
    mixed = sum(_commits_differ(point) for point in points)
    if mixed:
        some = "1 point compares" if mixed == 1 else f"{mixed} points compare"
        sentences.append(f"{some} records of different commits")
    words = ". ".join(sentences) + "."
    return f"{words} {CPU_TIMES}" if any(on_cpu(row) for group in groups for row in group) else words


def _commits_differ(point: SpeedupPoint) -> bool:
    return len({row["commit"] for group in point.by_method.values() for row in group if row["status"] == "ok"}) > 1
