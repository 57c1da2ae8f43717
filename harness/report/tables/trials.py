"""The tables of a report that every run can have: all trials, those without a number, agreement, accuracy.

Methods side by side are in `comparison`, the sentences above the tables in `harness.report.headline`.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.base.lengths import format_length
from harness.metrics.intervals import Interval, TwoRounds
from harness.metrics.throughput import FORMULAS
from harness.report import variants
from harness.report.results import Row, spread_of
from harness.report.speedup import TWO_VALUES, spread_text
from harness.report.tables.agreement import LIMIT, Agreement, agreements
from harness.report.tables.table import Column, Table, significant, without_empty_columns
from harness.report.variants import (
    Setup,
    masks_of,
    models_of,
    panel_name,
    panel_of,
    setup_of,
    setups_of,
    varying_settings,
)
from harness.report.weak_forms import marked, weak_forms

CPU_TIMES = (
    "Times on a CPU do not tell which method is faster on GPUs: ranks share cores and memory there; what such trials "
    "show is whether the methods agree."
)

CHECKED = ("out", "dq", "dk", "dv")  # tensors of task attention compared with float64, as the worker names them


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
        Column(header="interval ms", form=_interval_ms, numeric=True),
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
        Column(header="rounds", numeric=True),
        Column(header="ran"),
        Column(header="kernel"),
        Column(header="caveats"),
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
            spread_of(row),
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
            row["rounds"],
            row["ran"],
            row.get("chosen_kernel"),
            row.get("caveats"),
            row["reason"],
        )
        for index, row in enumerate(rows)
    )
    tasks = sorted({row["task"] for row in rows}, reverse=True)
    formulas = [FORMULAS[f"tflops_per_gpu ({task})"] for task in tasks]
    intervals = any(row["step_seconds_low"] is not None for row in rows)
    about = FORMULAS["step_seconds_low"] if intervals else "No trial has three rounds, so there are no intervals"
    if any(row["rounds"] == 2 for row in rows):
        about += f"; {TWO_VALUES}"
    return without_empty_columns(
        Table(
            name="results",
            title="All trials",
            columns=columns,
            rows=lines,
            note=". ".join(["Times are medians over n measured steps", about, *formulas, FORMULAS["mfu"]]) + ".",
            marked=frozenset(index for index, row in enumerate(rows) if row["status"] not in ("ok", "refused")),
        )
    )


def agreement_table(rows: Sequence[Row]) -> Table | None:
    """Loss and gradient norm of every training trial against the first ok trial that computes the same function; None
    where no two trials do. A trial that nothing is held against has no line."""
    found = agreements(rows)
    held = {id(pair.reference) for pair in found if pair.row is not pair.reference}
    found = [pair for pair in found if id(pair.reference) in held]
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
        if row["status"] == "ok" and any(row.get(f"extra_error.{tensor}") is not None for tensor in CHECKED)
    ]
    if not measured:
        return None
    columns = (
        Column(header="method"),
        Column(header="tokens", form=format_length, numeric=True),
        Column(header="parallel"),
        Column(header="dtype"),
        *(Column(header=f"{tensor} error", form=_difference, numeric=True) for tensor in CHECKED),
    )
    lines = tuple(
        (
            name,
            row["seq_len"],
            panel_name(panel_of(row)),
            row["dtype"],
            *(row.get(f"extra_error.{tensor}") for tensor in CHECKED),
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
    wrong = " Trials that are wrong have figures, which count for nothing: they compute something else."
    return Table(
        name="problems",
        title="Trials without a number",
        columns=columns,
        rows=lines,
        note="Out of memory (oom, host_oom) and refused say something about the method; the other statuses say that "
        "something went wrong." + (wrong if any(row["status"] == "wrong" for row, _ in lost) else ""),
        marked=frozenset(index for index, (row, _) in enumerate(lost) if row["status"] != "refused"),
    )


def series_names(rows: Sequence[Row]) -> list[str]:
    """The series name of every row, in order; what varies is judged within the row's own set-up. Native forms that are
    slower than their originals are marked."""
    weak = weak_forms(rows)
    names = {
        id(row): name
        for group in setups_of(rows)
        for row, name in zip(group, variants.series_names(group), strict=True)
    }
    return [marked(names[id(row)], id(row) in weak) for row in rows]


def varying_by_setup(rows: Sequence[Row]) -> dict[Setup, list[str]]:
    """The settings that vary within each set-up."""
    return {setup_of(group[0]): varying_settings(group) for group in setups_of(rows)}


def _verdict(pair: Agreement) -> str:
    if pair.row is pair.reference:
        return "reference"
    return {True: "agrees", False: "differs", None: "not bound"}[pair.agrees]


def _interval_ms(spread: Interval | TwoRounds) -> str:
    return spread_text(spread, significant(3, 1e3))


def _difference(value: float) -> str:
    return f"{value:.1e}" if value else "0"
