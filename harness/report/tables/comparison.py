"""Methods at equal points: the speed of each, its ratio to the best other one, and whether they can be told apart.

Ratios are of speeds here, so above 1 the method named first is faster. Runs are never mixed, and of a run whole rounds
are resampled (`harness.metrics.intervals`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.base.errors import UsageError, nearest
from harness.base.lengths import format_length
from harness.metrics.intervals import ROUNDS_FOR_INTERVAL
from harness.metrics.throughput import FORMULAS
from harness.report.results import Row, method_rank
from harness.report.speedup import TWO_VALUES, Point, Speedup, contested_points, rounds_of, spread_text, times
from harness.report.tables.table import Column, Table, significant, without_empty_columns
from harness.report.tables.trials import CPU_TIMES, varying_by_setup
from harness.report.variants import masks_of, models_of, on_cpu, panel_name, panel_of, pooled, settings_name, setup_of
from harness.report.weak_forms import BELOW_ORIGINAL, WeakForm, marked, weak_forms


def comparison_table(rows: Sequence[Row], baseline: str | None = None) -> Table | None:
    """Methods at equal points: the speed of each, and that of ours (where it is absent the fastest's) over the best
    other one's; with `baseline`, that of every method over its own.

    None where no point has two methods. A baseline that no trial ran is ignored: of several runs some may lack it.
    """
    methods = sorted({row["method"] for row in rows}, key=method_rank)
    points = contested_points(rows)
    if not points:
        return None
    baseline = baseline if baseline in methods else None
    shown = [row for point in points for group in point.by_method.values() for row in group]
    methods = [method for method in methods if any(method in point.by_method for point in points)]
    ran = {
        method: sorted({row["ran"] for row in shown if row["method"] == method and row["ran"]}) for method in methods
    }
    several = [method for method in methods if len(ran[method]) > 1]  # a column each says which

    firsts = [point.first for point in points]
    varying = varying_by_setup(rows)
    several_runs = len({row["run"] for row in rows}) > 1
    places = [
        (
            first["run"] if several_runs else None,
            first["task"],
            model,
            mask,
            first["seq_len"],
            panel_name(panel_of(first)),
            settings_name(first, varying[setup_of(first)]) or None,
        )
        for first, model, mask in zip(firsts, models_of(firsts), masks_of(firsts), strict=True)
    ]
    weak = weak_forms(rows)
    beside, sets = _beside_best_other(points, weak) if baseline is None else _beside_baseline(points, baseline, methods)
    columns = (
        Column(header="run"),
        Column(header="task"),
        Column(header="model"),
        Column(header="mask"),
        Column(header="tokens", form=format_length, numeric=True),
        Column(header="parallel"),
        Column(header="settings"),
        *(Column(header=f"{method} ran") for method in several),
        *(Column(header=f"{method} tok/s/GPU", form=significant(4), numeric=True) for method in methods),
        *beside,
        Column(header=BELOW_ORIGINAL),
    )
    lines = tuple(
        (
            *place,
            *("; ".join(dict.fromkeys(row["ran"] or "" for row in point.by_method.get(name, ()))) for name in several),
            *(_number_or_status(point.by_method.get(method, ())) for method in methods),
            *cells,
            _weak_here(point, weak),
        )
        for place, point, cells in zip(places, points, sets, strict=True)
    )
    return without_empty_columns(
        Table(
            name="comparison",
            title=f"Methods against {baseline or 'the best other one'}",
            columns=columns,
            rows=lines,
            note=_note(points, [method for method in methods if len(ran[method]) == 1], ran),
        )
    )


def known_baseline(baseline: str | None, rows: Sequence[Row]) -> str | None:
    """The baseline that was asked for. Raises UsageError when no trial of `rows` ran it."""
    methods = sorted({row["method"] for row in rows}, key=method_rank)
    if baseline is not None and methods and baseline not in methods:
        raise UsageError(
            f"--baseline {baseline}: no trial of these records is of that method; {nearest(baseline, methods)}"
        )
    return baseline


def _beside_best_other(
    points: Sequence[Point], weak: Mapping[int, WeakForm]
) -> tuple[list[Column], list[tuple[object, ...]]]:
    """Columns and cells of the comparison with the best other method, which they name."""
    subjects = {subject for point in points if (subject := point.subject())}
    one = next(iter(subjects)) if len(subjects) == 1 else ""
    columns = [
        Column(header="method"),
        Column(header="best other"),
        Column(header=f"{one or 'method'} ÷ best other", form=times, numeric=True),
        Column(header="interval", form=spread_text, numeric=True),
        Column(header="verdict"),
    ]
    sets: list[tuple[object, ...]] = []
    for point in points:
        subject = point.subject()
        other = point.best_other(subject) if subject else None
        found = point.speedup(subject, other) if subject and other else None
        shown = [method and _marked(point, method, weak) for method in (subject, other)]
        sets.append((None if one else shown[0], shown[1], *_cells(found)))
    return columns, sets


def _beside_baseline(
    points: Sequence[Point], baseline: str, methods: Sequence[str]
) -> tuple[list[Column], list[tuple[object, ...]]]:
    """Columns and cells of every other method's comparison with `baseline`."""
    challengers = [method for method in methods if method != baseline]
    columns = [
        column
        for method in challengers
        for column in (
            Column(header=f"{method} ÷ {baseline}", form=times, numeric=True),
            Column(header=f"{method} interval", form=spread_text, numeric=True),
            Column(header=f"{method} verdict"),
        )
    ]
    sets = [
        tuple(cell for method in challengers for cell in _cells(point.speedup(method, baseline))) for point in points
    ]
    return columns, sets


def _marked(point: Point, method: str, weak: Mapping[int, WeakForm]) -> str:
    return marked(method, any(id(row) in weak for row in point.by_method[method]))


def _weak_here(point: Point, weak: Mapping[int, WeakForm]) -> str | None:
    """The point's native forms below LEAST of their originals, with the ratios."""
    rows = [row for group in point.by_method.values() for row in group if id(row) in weak]
    return "; ".join(dict.fromkeys(marked(weak[id(row)].text, True) for row in rows)) or None


def _cells(found: Speedup | None) -> tuple[object, ...]:
    return (None, None, None) if found is None else (found.value, found.spread, found.text)


def _note(points: Sequence[Point], alone: Sequence[str], ran: dict[str, list[str]]) -> str:
    """How the table's numbers are formed, what each method of `alone` ran everywhere, and what they cannot say."""
    shown = [row for point in points for group in point.by_method.values() for row in group]
    measured = [row for row in shown if row["status"] == "ok"]
    sentences = [
        FORMULAS["tokens_per_gpu_per_second"],
        "÷ = speed over speed, by the medians of all measured steps, same run and settings only",
    ]
    rounds = {len(rounds_of(group)) for point in points for group in point.by_method.values()}
    if max(rounds) >= ROUNDS_FOR_INTERVAL:
        sentences.append(
            "interval = 95% interval of that ratio, whole rounds resampled, those of both methods in pairs; "
            "faster and slower mean that it excludes 1"
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
        some = "1 line compares" if mixed == 1 else f"{mixed} lines compare"
        sentences.append(f"{some} records of different commits")
    sentences += [f"{method} ran: {ran[method][0]}" for method in alone]
    text = ". ".join(sentences) + "."
    return f"{text} {CPU_TIMES}" if any(on_cpu(row) for row in shown) else text


def _commits_differ(point: Point) -> bool:
    return len({row["commit"] for group in point.by_method.values() for row in group if row["status"] == "ok"}) > 1


def _number_or_status(rows: Sequence[Row]) -> float | str | None:
    value = pooled(rows, "tokens_per_gpu_per_second")
    return value if value is not None else "/".join(sorted({row["status"] for row in rows})) or None
