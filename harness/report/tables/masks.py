"""Attention under several masks: does its cost follow the mask's area, the visible (query, key) pairs?"""

from __future__ import annotations

from collections.abc import Sequence

from engine.attention.masks import parse_mask
from harness.base.lengths import format_length
from harness.report.results import Row
from harness.report.tables.table import Column, Table, significant, without_empty_columns
from harness.report.variants import method_name, panel_name, panel_of
from harness.report.weak_forms import marked, weak_forms


def mask_table(rows: Sequence[Row]) -> Table | None:
    """Trials of task attention by kernel, mask and length, with the cost of a visible pair; None for a single mask."""
    ok = [row for row in rows if row["task"] == "attention" and row["status"] == "ok"]
    if len({row["mask"] for row in ok}) < 2:
        return None
    columns = (
        Column(header="method"),
        Column(header="kernel"),
        Column(header="mask"),
        Column(header="parallel"),
        Column(header="tokens", form=format_length, numeric=True),
        Column(header="pairs", form="{:.3g}".format, numeric=True),
        Column(header="% of full", form=significant(3, 100), numeric=True),
        Column(header="ms", form=significant(3, 1e3), numeric=True),
        Column(header="forward ms", form=significant(3, 1e3), numeric=True),
        Column(header="ns per pair", form=significant(3, 1e9), numeric=True),
        Column(header="peak GiB", form=significant(3), numeric=True),
        Column(header="host GiB", form=significant(3), numeric=True),
    )
    ordered, weak = sorted(ok, key=_problem), weak_forms(rows)
    return without_empty_columns(
        Table(
            name="masks",
            title="Cost of attention against the mask's area",
            columns=columns,
            rows=tuple(_line(row, id(row) in weak) for row in ordered),
            trials=tuple(ordered),
            note="pairs = visible (query, key) pairs of one sequence; ms = forward + backward; ns per pair = seconds "
            "of forward + backward × ranks ÷ (pairs × sequences × query heads), the same at every length where time "
            "follows the mask's area. Host memory is the process's peak, interpreter and libraries included.",
        )
    )


def _problem(row: Row) -> tuple[object, ...]:
    return (row["run"], row["experiment"], row["method"], str(_kernel(row)), panel_of(row), row["mask"], row["seq_len"])


def _kernel(row: Row) -> object:
    return row.get("chosen_kernel") or row["kernel"]


def _line(row: Row, weak: bool) -> tuple[object, ...]:
    pairs, step = parse_mask(row["mask"]).area(row["seq_len"]), row["step_seconds_median"]
    sequences = row["batch_size"] * row["dp_size"]
    return (
        marked(method_name(row), weak),
        _kernel(row),
        row["mask"],
        panel_name(panel_of(row)),
        row["seq_len"],
        pairs,
        pairs / row["seq_len"] ** 2,
        step,
        row["forward_seconds_median"],
        step * row["world_size"] / (pairs * sequences * row["model.heads"]) if pairs else None,
        row["peak_memory_gib"],
        row["peak_rss_gib"],
    )
