"""LM head and loss in their forms side by side: time, memory beyond what any form holds, error."""

from __future__ import annotations

from collections.abc import Sequence

from harness.base.lengths import format_length
from harness.metrics.throughput import FORMULAS
from harness.report.results import Row
from harness.report.tables.table import Column, Table, significant, without_empty_columns
from harness.report.variants import panel_name, panel_of

_CHECKED = ("loss", "dhidden", "dweight")  # compared with float64, as the worker names them


def form_of(row: Row) -> str:
    """How the loss is formed: plain, with all logits at once, or fused by the named library."""
    return str(row["loss_kernel"]) if row["lm_head_fusion"] else "plain"


def head_table(rows: Sequence[Row]) -> Table | None:
    """Every trial of task lm_head, the forms of one problem below each other; None when there is none."""
    lines = sorted((row for row in rows if row["task"] == "lm_head"), key=_problem)
    if not lines:
        return None
    columns = (
        Column(header="head"),
        Column(header="tokens per rank", form=format_length, numeric=True),
        Column(header="parallel"),
        Column(header="dtype"),
        Column(header="z-loss"),
        Column(header="form"),
        Column(header="ms", form=significant(3, 1e3), numeric=True),
        Column(header="forward ms", form=significant(3, 1e3), numeric=True),
        Column(header="TFLOP/s/GPU", form=significant(3), numeric=True),
        Column(header="peak GiB", form=significant(3), numeric=True),
        Column(header="GiB beyond", form=significant(3), numeric=True),
        Column(header="loss", form=significant(6), numeric=True),
        *(Column(header=f"{name} error", form="{:.1e}".format, numeric=True) for name in _CHECKED),
        Column(header="tile"),
    )
    return without_empty_columns(
        Table(
            name="lm_head",
            title="LM head and loss, form by form",
            columns=columns,
            rows=tuple(_line(row) for row in lines),
            trials=tuple(lines),
            note=f"{FORMULAS['tflops_per_gpu (lm_head)']}. The fused forms but cce form the gradients in the forward. "
            "GiB beyond = peak memory less hidden states and weight, their gradients, and the labels. Errors are "
            "relative to a plain float64 run, ‖a − b‖ ÷ ‖b‖, the worst rank's.",
            marked=frozenset(i for i, row in enumerate(lines) if row["status"] not in ("ok", "refused")),
        )
    )


def _problem(row: Row) -> tuple[object, ...]:
    return (row["run"], row["experiment"], row["model"], row["dtype"], row["z_loss"], panel_of(row), row["seq_len"])


def _line(row: Row) -> tuple[object, ...]:
    peak, held = row["peak_memory_gib"], row.get("extra_held_gib")
    return (
        f"{row['model']}, {row['model.vocab']} × {row['model.hidden']}",
        row["seq_len"] * row["batch_size"] // row["cp_size"],
        panel_name(panel_of(row)),
        row["dtype"],
        row["z_loss"] or None,
        form_of(row),
        row["step_seconds_median"] if row["status"] == "ok" else row["status"],
        row["forward_seconds_median"],
        row["tflops_per_gpu"],
        peak,
        peak - held if peak is not None and held is not None else None,
        row["loss"],
        *(row.get(f"extra_error.{name}") for name in _CHECKED),
        row.get("chosen_tile"),
    )
