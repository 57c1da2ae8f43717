"""The tables of a report that every run can have. The sentences above them are in `harness.report.headline`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from harness.base.errors import UsageError, nearest
from harness.base.lengths import format_length
from harness.metrics.throughput import FORMULAS
from harness.report.agreement import LIMIT, Agreement, agreements
from harness.report.results import Row, method_rank, setting_names
from harness.report.tables import Column, Table, significant, without_empty_columns
from harness.report.variants import (
    OWN_METHOD,
    Setup,
    masks_of,
    models_of,
    panel_name,
    panel_of,
    pooled,
    series_name,
    settings_name,
    setup_of,
    setups_of,
    varying_settings,
)

CPU_TIMES = (
    "Times on a CPU do not tell which method is faster on GPUs: ranks share cores and memory there; what such trials "
    "show is whether the methods agree."
)

_CHECKED = ("out", "dq", "dk", "dv")  # tensors of task attention compared with float64, as the worker names them


def results_table(rows: Sequence[Row]) -> Table:
    """One line per trial: where it stands, its speed, memory, traffic and loss, or its status and reason."""
    names, models, masks = series_names(rows), models_of(rows), masks_of(rows)
    columns = (
        Column(header="task"),
        Column(header="model"),
        Column(header="mask"),
        Column(header="method"),
        Column(header="tokens", form=format_length, numeric=True),
        Column(header="parallel"),
        Column(header="status"),
        Column(header="step ms", form=significant(3, 1e3), numeric=True),
        Column(header="spread ms", form=significant(2, 1e3), numeric=True),
        Column(header="forward ms", form=significant(3, 1e3), numeric=True),
        Column(header="tok/s/GPU", form=significant(4), numeric=True),
        Column(header="TFLOP/s/GPU", form=significant(3), numeric=True),
        Column(header="MFU %", form=significant(3, 100), numeric=True),
        Column(header="ceiling %", form=significant(3, 100), numeric=True),
        Column(header="HFU %", form=significant(3, 100), numeric=True),
        Column(header="peak GiB", form=significant(3), numeric=True),
        Column(header="host GiB", form=significant(3), numeric=True),
        Column(header="sent MiB", form=significant(3, 1024), numeric=True),
        Column(header="loss", form=significant(6), numeric=True),
        Column(header="grad norm", form=significant(5), numeric=True),
        Column(header="n", numeric=True),
        Column(header="ran"),
        Column(header="kernel"),
        Column(header="reason"),
    )
    lines = tuple(
        (
            row["task"],
            models[index],
            masks[index],
            names[index],
            row["seq_len"],
            panel_name(panel_of(row)),
            row["status"],
            row["step_seconds_median"],
            row["step_seconds_iqr"],
            row["forward_seconds_median"],
            row["tokens_per_gpu_per_second"],
            row["tflops_per_gpu"],
            row["mfu"],
            row["mfu_ceiling"],
            row["hfu"],
            row["peak_memory_gib"],
            row["peak_rss_gib"],
            row["sent_gib_per_gpu"],
            row["loss"],
            row["grad_norm"],
            row["samples"],
            row["ran"],
            row.get("chosen_kernel"),
            row["reason"],
        )
        for index, row in enumerate(rows)
    )
    tasks = sorted({row["task"] for row in rows}, reverse=True)
    formulas = [FORMULAS[f"tflops_per_gpu ({task})"] for task in tasks]
    return without_empty_columns(
        Table(
            name="results",
            title="All trials",
            columns=columns,
            rows=lines,
            note=". ".join(["Times are medians over n measured steps", *formulas, FORMULAS["mfu"]]) + ".",
            marked=frozenset(index for index, row in enumerate(rows) if row["status"] not in ("ok", "refused")),
        )
    )


def comparison_table(rows: Sequence[Row], baseline: str | None = None) -> Table | None:
    """Methods side by side at equal task, length, parallel sizes and settings, with speed-ups over `baseline`.

    A speed-up is the baseline's median step over the method's, within one run only: runs differ in too much else.
    None when no more than one method was planned. Without `baseline`, `baseline_of` chooses.
    """
    methods = sorted({row["method"] for row in rows}, key=method_rank)
    points = _contested_points(rows)
    if not points:
        return None
    baseline = baseline if baseline is not None and baseline in methods else baseline_of(rows)
    shown = [row for by_method in points for group in by_method.values() for row in group]
    shared_cores = any(on_cpu(row) for row in shown)
    ran = {
        method: sorted({row["ran"] for row in shown if row["method"] == method and row["ran"]}) for method in methods
    }
    several = [method for method in methods if len(ran[method]) > 1]  # a column each says which

    varying = varying_by_setup(rows)
    challengers = [method for method in methods if method != baseline]
    columns = (
        Column(header="run"),
        Column(header="task"),
        Column(header="tokens", form=format_length, numeric=True),
        Column(header="parallel"),
        Column(header="settings"),
        *(Column(header=f"{method} ran") for method in several),
        *(Column(header=f"{method} tok/s/GPU", form=significant(4), numeric=True) for method in methods),
        *(Column(header=f"{method} ÷ {baseline}", form=_times, numeric=True) for method in challengers),
    )
    several_runs = len({row["run"] for row in rows}) > 1
    lines = []
    for by_method in points:
        first = next(iter(by_method.values()))[0]
        reference = pooled(by_method.get(baseline, ()), "step_seconds_median")
        settings = settings_name(first, varying[setup_of(first)])
        lines.append(
            (
                first["run"] if several_runs else None,
                first["task"],
                first["seq_len"],
                panel_name(panel_of(first)),
                settings or None,
                *(
                    "; ".join(dict.fromkeys(row["ran"] or "" for row in by_method.get(method, ())))
                    for method in several
                ),
                *(_number_or_status(by_method.get(method, ())) for method in methods),
                *(_speedup(reference, by_method.get(method, ())) for method in challengers),
            )
        )
    return without_empty_columns(
        Table(
            name="comparison",
            title=f"Methods side by side, and speed-up over {baseline}",
            columns=columns,
            rows=tuple(lines),
            note=f"{FORMULAS['tokens_per_gpu_per_second']}. "
            f"Speed-up = median step of {baseline} ÷ median step of the method, same run and settings only."
            + "".join(f" {method} ran: {ran[method][0]}." for method in methods if len(ran[method]) == 1)
            + (f" {CPU_TIMES}" if shared_cores else ""),
        )
    )


def agreement_table(rows: Sequence[Row]) -> Table | None:
    """Loss and gradient norm of every training trial against the first ok trial that computes the same function."""
    found = agreements(rows)
    if not found:
        return None
    names = {id(row): name for row, name in zip(rows, series_names(rows), strict=True)}

    def label(row: Row) -> str:
        return f"{names[id(row)]}, {panel_name(panel_of(row))}"

    columns = (
        Column(header="trial"),
        Column(header="tokens", form=format_length, numeric=True),
        Column(header="dtype"),
        Column(header="loss", form=significant(6), numeric=True),
        Column(header="grad norm", form=significant(5), numeric=True),
        Column(header="loss difference", form=_difference, numeric=True),
        Column(header="grad norm difference", form=_difference, numeric=True),
        Column(header="reference"),
        Column(header="verdict"),
    )
    lines = tuple(
        (
            label(pair.row),
            pair.row["seq_len"],
            pair.row["dtype"],
            pair.row["loss"],
            pair.row["grad_norm"],
            pair.loss if pair.row is not pair.reference else None,
            pair.grad_norm if pair.row is not pair.reference else None,
            label(pair.reference) if pair.row is not pair.reference else None,
            _verdict(pair),
        )
        for pair in found
    )
    return without_empty_columns(
        Table(
            name="agreement",
            title="Do the methods compute the same thing?",
            columns=columns,
            rows=lines,
            note="Differences are |a − b| ÷ max(|a|, |b|), the largest over all steps both trials ran. fp32 and fp64 "
            f"must stay within {LIMIT:.0e}; narrower types round more and are shown without a verdict. "
            f"{FORMULAS['loss'].capitalize()}.",
            marked=frozenset(index for index, pair in enumerate(found) if pair.agrees is False),
        )
    )


def accuracy_table(rows: Sequence[Row]) -> Table | None:
    """Error of attention against dense float64 where the workers measured it; None when none did."""
    measured = [
        (row, name)
        for row, name in zip(rows, series_names(rows), strict=True)
        if row["status"] == "ok" and any(row.get(f"extra_error.{tensor}") is not None for tensor in _CHECKED)
    ]
    if not measured:
        return None
    columns = (
        Column(header="method"),
        Column(header="tokens", form=format_length, numeric=True),
        Column(header="parallel"),
        Column(header="dtype"),
        *(Column(header=f"{tensor} error", form=_difference, numeric=True) for tensor in _CHECKED),
    )
    lines = tuple(
        (
            name,
            row["seq_len"],
            panel_name(panel_of(row)),
            row["dtype"],
            *(row.get(f"extra_error.{tensor}") for tensor in _CHECKED),
        )
        for row, name in measured
    )
    return Table(
        name="accuracy",
        title="Attention against a dense float64 run",
        columns=columns,
        rows=lines,
        note="Relative error of the whole output and of the gradients of q, k and v: ‖a − b‖ ÷ ‖b‖, Frobenius norms.",
    )


def problems_table(rows: Sequence[Row]) -> Table | None:
    """Every trial that gave no number, with its reason; None when there is none."""
    lost = [(row, name) for row, name in zip(rows, series_names(rows), strict=True) if row["status"] != "ok"]
    if not lost:
        return None
    columns = (
        Column(header="trial"),
        Column(header="task"),
        Column(header="method"),
        Column(header="tokens", form=format_length, numeric=True),
        Column(header="parallel"),
        Column(header="status"),
        Column(header="reason"),
    )
    lines = tuple(
        (
            row["trial_id"], row["task"], name, row["seq_len"], panel_name(panel_of(row)), row["status"], row["reason"],
        )
        for row, name in lost
    )  # fmt: skip
    return Table(
        name="problems",
        title="Trials without a number",
        columns=columns,
        rows=lines,
        note="Out of memory (oom, host_oom) and refused say something about the method; the other statuses say that "
        "something went wrong.",
        marked=frozenset(index for index, (row, _) in enumerate(lost) if row["status"] != "refused"),
    )


def series_names(rows: Sequence[Row]) -> list[str]:
    """The series name of every row, in order; what varies is judged within the row's own set-up."""
    varying = varying_by_setup(rows)
    return [series_name(row, varying[setup_of(row)]) for row in rows]


def varying_by_setup(rows: Sequence[Row]) -> dict[Setup, list[str]]:
    """The settings that vary within each set-up."""
    return {setup_of(group[0]): varying_settings(group) for group in setups_of(rows)}


def on_cpu(row: Row) -> bool:
    """Whether a trial's ranks were processes on a CPU."""
    return row["gpu"] in (None, "cpu")


def baseline_of(rows: Sequence[Row]) -> str:
    """The method that others are compared with: of those other than ours the one measured at the most points, and of
    several the fastest there (geometric mean of its times over the fastest one's)."""
    methods = sorted({row["method"] for row in rows}, key=method_rank)
    others = [method for method in methods if method != OWN_METHOD] or methods
    behind: dict[str, list[float]] = {method: [] for method in others}  # log of the time over the fastest other's
    for by_method in _contested_points(rows):
        seconds = {method: pooled(group, "step_seconds_median") for method, group in by_method.items()}
        found = {method: value for method in others if (value := seconds.get(method))}
        for method, value in found.items():
            behind[method].append(math.log(value / min(found.values())))
    return min(others, key=lambda method: (-len(behind[method]), statistics.fmean(behind[method] or [0.0])))


def known_baseline(baseline: str | None, rows: Sequence[Row]) -> str | None:
    """The baseline that was asked for. Raises UsageError when no trial of `rows` ran it."""
    methods = sorted({row["method"] for row in rows}, key=method_rank)
    if baseline is not None and methods and baseline not in methods:
        raise UsageError(
            f"--baseline {baseline}: no trial of these records is of that method; {nearest(baseline, methods)}"
        )
    return baseline


def _contested_points(rows: Sequence[Row]) -> list[dict[str, list[Row]]]:
    """Trials by method at every point where more than one method was planned."""
    points: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        points.setdefault(_point_of(row), {}).setdefault(row["method"], []).append(row)
    return [by_method for by_method in points.values() if len(by_method) > 1]


def _point_of(row: Row) -> tuple[Any, ...]:
    """Key of trials whose speeds may be compared: same run, and equal settings but for the method and the seed."""
    settings = tuple((name, row[name]) for name in setting_names(row) if name not in ("method", "seed"))
    return (row["run"], row["experiment"], settings)


def _number_or_status(rows: Sequence[Row]) -> float | str | None:
    value = pooled(rows, "tokens_per_gpu_per_second")
    return value if value is not None else "/".join(sorted({row["status"] for row in rows})) or None


def _speedup(reference: float | None, rows: Sequence[Row]) -> float | None:
    seconds = pooled(rows, "step_seconds_median")
    return reference / seconds if reference and seconds else None


def _verdict(pair: Agreement) -> str:
    if pair.row is pair.reference:
        return "reference"
    return {True: "agrees", False: "differs", None: "not bound"}[pair.agrees]


def _times(value: float) -> str:
    return f"{value:.2f}×"


def _difference(value: float) -> str:
    return f"{value:.1e}" if value else "0"
