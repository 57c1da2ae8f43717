"""The tables that every run can have: all trials, those without a number, attention against float64.

Methods side by side are in `comparison`, losses side by side in `agreement`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from harness.base.lengths import format_length
from harness.metrics.throughput import FORMULAS
from harness.report import variants
from harness.report.digits import measured, spread_text, supported
from harness.report.results import Row, grouped, spread_of
from harness.report.speedup import TWO_VALUES, marked, slow_baselines, slow_sentence
from harness.report.tables.table import Table, number, significant, table_of, text
from harness.report.variants import (
    Setup,
    masks_of,
    models_of,
    on_cpu,
    panel_name,
    panel_of,
    pooled,
    setup_of,
    setups_of,
    varying_settings,
)

if TYPE_CHECKING:
    from rich.table import Table as RichTable

CPU_TIMES = (
    "Times on a CPU do not tell which method is faster on GPUs: ranks share cores and memory there; what such trials "
    "show is whether the methods agree."
)

CHECKED = ("out", "dq", "dk", "dv")  # tensors of task attention compared with float64, as the worker names them


class TrialRow(Row):
    """A trial's row with what tables print of its place: its series, model and mask where there are several, sizes."""

    def __init__(self, row: Row, **printed: object) -> None:
        super().__init__(row | printed)
        self.row = row


def lines_of(rows: Sequence[Row]) -> list[TrialRow]:
    """Every row as a line, in order."""
    placed = zip(rows, series_names(rows), models_of(rows), masks_of(rows), strict=True)
    return [
        TrialRow(row, shown_name=name, shown_model=model, shown_mask=mask, shown_parallel=panel_name(panel_of(row)))
        for row, name, model, mask in placed
    ]


TASK, MODEL, MASK = text("task", "task"), text("model", "shown_model"), text("mask", "shown_mask")
NAME, PARALLEL = text("method", "shown_name"), text("parallel", "shown_parallel")
TOKENS = number("tokens", "seq_len", format_length)
PLACE = (NAME, TASK, MODEL, MASK, TOKENS, PARALLEL)


def unit_of(rows: Sequence[Row]) -> str:
    """What speeds are counted per: `GPU`, or `rank` where all ranks are processes on a CPU."""
    return "rank" if rows and all(map(on_cpu, rows)) else "GPU"


def per_unit(words: str, rows: Sequence[Row]) -> str:
    """A formula or note of speeds in the unit of the rows."""
    return words.replace("/GPU", f"/{unit_of(rows)}")


def speed_of(row: Row) -> float | None:
    """Tokens per second and rank, with the interval that the steps give it."""
    speed, spread = row["tokens_per_gpu_per_second"], spread_of(row)
    if speed is None or spread is None:
        return measured(speed)
    return measured(speed, spread.inverse_times(speed * row["step_seconds_median"]))


def results_table(rows: Sequence[Row]) -> Table:
    """One line per trial: where it stands, its speed, memory, traffic and loss, or its status and reason."""
    unit, seeds = unit_of(rows), len({row["seed"] for row in rows}) > 1
    columns = (
        *PLACE,
        text("status", "status"),
        number("step ms", lambda line: measured(line["step_seconds_median"], spread_of(line)), supported(1e3),
               group="time"),
        number("interval ms", spread_of, lambda spread: spread_text(spread.scaled(1e3)), group="time"),
        number("spread ms", "step_seconds_iqr", significant(2, 1e3), group="time"),
        number("forward ms", "forward_seconds_median", significant(3, 1e3), group="time"),
        number(f"tok/s/{unit}", speed_of, supported(), group="speed"),
        number(f"TFLOP/s/{unit}", "tflops_per_gpu", significant(3), group="speed"),
        number("MFU %", "mfu", significant(3, 100), group="speed"),
        number("ceiling %", "mfu_ceiling", significant(3, 100), group="speed"),
        number("HFU %", "hfu", significant(3, 100), group="speed"),
        number("peak GiB", "peak_memory_gib", significant(3), group="memory"),
        number("host GiB", "peak_rss_gib", significant(3), group="memory"),
        number("sent MiB", "sent_gib_per_gpu", significant(3, 1024), group="memory"),
        number("loss", "loss", significant(6), group="training"),
        number("grad norm", "grad_norm", significant(5), group="training"),
        number("n", "samples", group="time"),
        number("rounds", "rounds", group="time"),
        *(text(header, value, group="provenance") for header, value in (
            ("ran", "ran"), ("kernel", "chosen_kernel"), ("caveats", "caveats"))),
        text("reason", "reason"),
        *(text(header, value, group="provenance") for header, value in (
            ("seed", lambda line: line["seed"] if seeds else None),
            ("started (UTC)", lambda line: (line["started_at"] or "")[:19].replace("T", " ") or None),
            ("commit", lambda line: (line["commit"] or "")[:10] or None), ("driver", "driver"))),
    )  # fmt: skip
    table = table_of(
        "results", "All trials", columns, lines_of(rows), note=_note(rows), trials=rows,
        marked=lambda line: line["status"] not in ("ok", "refused"),
    )  # fmt: skip
    return table or Table(name="results", title="All trials", columns=(), rows=())


def speed_by_length(rows: Sequence[Row]) -> Table | None:
    """Methods down, sequence lengths across, speeds inside; None where one length was run."""
    title = f"Tokens per second and {unit_of(rows)}"
    note = f"{title}, the median over trials of equal settings; a word says how a trial ended instead."
    return _by_length(rows, "speed_by_length", f"{title}, by length", supported(), note, measured_speed)


def memory_by_length(rows: Sequence[Row]) -> Table | None:
    """Methods down, sequence lengths across, peaks of memory inside; None where one length was run, or on a CPU."""
    return _by_length(
        rows, "memory_by_length", "Peak memory in GiB, by length", significant(3),
        "Peak per GPU, maximum over ranks, the median over trials of equal settings; a word says how a trial ended "
        "instead.",
        lambda group: pooled(group, "peak_memory_gib"),
    )  # fmt: skip


def measured_speed(rows: Sequence[Row]) -> float | None:
    """The speed of one trial with its interval, the median of several."""
    measured = [row for row in rows if row["status"] == "ok"]
    return speed_of(measured[0]) if len(measured) == 1 else pooled(rows, "tokens_per_gpu_per_second")


def _by_length(
    rows: Sequence[Row],
    name: str,
    title: str,
    form: Callable[[Any], str],
    note: str,
    value: Callable[[Sequence[Row]], float | None],
) -> Table | None:
    lengths, measured = sorted({row["seq_len"] for row in rows}), False
    places = grouped(lines_of(rows), lambda line: (setup_of(line.row), panel_of(line.row), line["shown_name"]))
    for lines in places.values():
        for length, alike in grouped(lines, lambda line: line["seq_len"]).items():
            lines[0][f"at {length}"] = or_status(value(alike), alike)
            measured = measured or value(alike) is not None
    if len(lengths) < 2 or not measured:
        return None
    runs = len({row["run"] for row in rows}) > 1
    columns = (
        text("run", lambda line: line["run"] if runs else None),
        *(TASK, MODEL, MASK, PARALLEL, NAME),
        *(number(format_length(length), f"at {length}", form) for length in lengths),
    )
    return table_of(name, title, columns, [lines[0] for lines in places.values()], note=note)


def or_status(value: float | None, rows: Sequence[Row]) -> float | str | None:
    """The value, or how the trials ended that gave none."""
    return value if value is not None else "/".join(sorted({row["status"] for row in rows} - {"ok"})) or None


def _note(rows: Sequence[Row]) -> str:
    tasks = sorted({row["task"] for row in rows}, reverse=True)
    intervals = any(row["step_seconds_low"] is not None for row in rows)
    about = FORMULAS["step_seconds_low"] if intervals else "No trial has three rounds, so there are no intervals"
    if any(row["rounds"] == 2 for row in rows):
        about += f"; {TWO_VALUES}"
    formulas = [FORMULAS[f"tflops_per_gpu ({task})"] for task in tasks]
    sentences = ["Times are medians over n measured steps", about, *formulas, FORMULAS["mfu"]]
    return per_unit(". ".join(sentences) + ".", rows)


def problems_table(rows: Sequence[Row]) -> Table | None:
    """Every trial that gave no number, with its reason; None when there is none."""
    lost = [line for line in lines_of(rows) if line["status"] != "ok"]
    wrong = " Trials that are wrong have figures, which count for nothing: they compute something else."
    return table_of(
        "problems", "Trials without a number",
        (text("trial", "trial_id"), TASK, NAME, TOKENS, PARALLEL, text("status", "status"), text("reason", "reason")),
        lost, trials=[line.row for line in lost], marked=lambda line: line["status"] != "refused",
        note="Out of memory (oom, host_oom) and refused say something about the method; the other statuses say that "
        "something went wrong." + (wrong if any(line["status"] == "wrong" for line in lost) else ""),
    )  # fmt: skip


def accuracy_table(rows: Sequence[Row]) -> Table | None:
    """Error of attention against dense float64 where the workers measured it; None when none did."""
    checked = [line for line in lines_of(rows) if line["status"] == "ok" and errors_of(line)]
    errors = [number(f"{tensor} error", f"extra_error.{tensor}", difference) for tensor in CHECKED]
    return table_of(
        "accuracy", "Attention against a dense float64 run",
        (NAME, TOKENS, PARALLEL, text("dtype", "dtype"), *errors), checked,
        note="Relative error of the whole output and of the gradients of q, k and v: ‖a − b‖ ÷ ‖b‖, Frobenius norms.",
    )  # fmt: skip


def errors_of(row: Row) -> dict[str, float]:
    """Of an attention trial, by tensor: how far it is from the dense float64 run; empty where none was made."""
    found = {tensor: row.get(f"extra_error.{tensor}") for tensor in CHECKED if row["task"] == "attention"}
    return {tensor: error for tensor, error in found.items() if error is not None}


def difference(value: float) -> str:
    """A relative difference: `7.5e-07`, and 0 for none."""
    return f"{value:.1e}" if value else "0"


def series_names(rows: Sequence[Row]) -> list[str]:
    """The series name of every row, in order; what varies is judged within the row's own set-up. Native baselines that
    are slower than their originals are marked."""
    slow, groups = slow_baselines(rows), setups_of(rows)
    members = [row for group in groups for row in group]
    names = dict(zip(map(id, members), chain.from_iterable(map(variants.series_names, groups)), strict=True))
    return [marked(names[id(row)], id(row) in slow) for row in rows]


def varying_by_setup(rows: Sequence[Row]) -> dict[Setup, list[str]]:
    """The settings that vary within each set-up."""
    return {setup_of(group[0]): varying_settings(group) for group in setups_of(rows)}


# Columns of the table of all trials that a terminal has room for.
_SHOWN = (
    "task", "model", "mask", "tokens", "parallel", "step ms", "tok/s/GPU", "tok/s/rank", "TFLOP/s/GPU", "MFU %",
    "peak GiB", "loss",
)  # fmt: skip


def terminal_table(rows: Sequence[Row]) -> RichTable:
    """The compact table that `burst run` ends with: one line per trial, with the names and digits of the report."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    every = results_table(rows)
    headers = [column.header for column in every.columns]
    places = [(header, headers.index(header)) for header in _SHOWN if header in headers]
    explained = slow_sentence(slow_baselines(rows).values())
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, caption=Text(explained) if explained else None)
    table.add_column("method", overflow="fold")  # gives way first: an ablation's names are long
    for header, place in places:
        numeric = every.columns[place].numeric
        table.add_column(header, justify="right" if numeric else "left", no_wrap=header != "mask", overflow="fold")
    table.add_column("status", overflow="fold")
    for row, texts in zip(rows, every.texts(), strict=True):
        ok = row["status"] == "ok"
        style = "green" if ok else "yellow" if row["status"] == "refused" else "red"
        # Text, not str: a reason may hold brackets, which rich would read as markup.
        status = Text(row["status"] if ok else f"{row['status']}: {row['reason'] or 'no reason recorded'}", style=style)
        table.add_row(Text(texts[0]), *(Text(texts[place]) for _, place in places), status)
    return table
