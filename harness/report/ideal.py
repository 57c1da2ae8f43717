"""Attention beside two limits: the time of one GPU divided by the number of ranks, and the bound of the link.

Both are formed from the trials of one run: the ideal is the time of the trial with cp_size 1 over the number of ranks;
where nodes are joined by a slow link, its speed was measured in the trial that is judged. A trial with cp_size 1 on all
ranks is the whole problem on every GPU at once, as slow as the slowest: what the GPUs reach together before anything is
shared. Ranks on a CPU share its cores, so there is no ideal of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.attention.planning.cost_model import Workload, link_bound_seconds
from engine.settings import BYTES_OF
from harness.base.lengths import format_length
from harness.report.results import Row, setting_names
from harness.report.summary import series_names
from harness.report.tables import Column, Table, significant, without_empty_columns
from harness.report.variants import panel_name, panel_of, pooled

# What sharing the problem out may change; everything else must be equal for a trial to be the ideal of another.
_SHARING = frozenset({
    "method", "cp_size", "tp_size", "world_size", "layout", "schedule", "backward", "exchange", "grad_comm_dtype",
    "emulate_nodes", "seed",
})  # fmt: skip

NOTE = (
    "ideal = seconds of the trial with cp_size 1 on one GPU ÷ ranks; at once = the same on every GPU at the same time, "
    "the slowest; bound = the ideal, or the bytes the best schedule sends between nodes ÷ the link's speed measured in "
    "the trial, whichever is more, for forward and for backward"
)


def ideal_table(rows: Sequence[Row]) -> Table | None:
    """Percentage of the ideal, and of the link's bound, that shared attention reaches; None without a cp_size of 1."""
    attention = [row for row in rows if row["task"] == "attention" and row["status"] == "ok" and row["gpu"] != "cpu"]
    unshared: dict[tuple[Any, ...], list[Row]] = {}  # by problem and ranks that work on it at once, each on all of it
    for row in attention:
        if row["cp_size"] == 1:
            unshared.setdefault((_problem(row), row["world_size"]), []).append(row)
    names = series_names(attention)
    lines = []
    for row, name in zip(attention, names, strict=True):
        whole = unshared.get((_problem(row), 1))
        if row["cp_size"] == 1 or whole is None:
            continue
        seconds = {column: pooled(whole, column) for column in ("step_seconds_median", "forward_seconds_median")}
        ideal = seconds["step_seconds_median"] / row["world_size"] if seconds["step_seconds_median"] else None
        together = pooled(unshared.get((_problem(row), row["world_size"]), []), "step_seconds_median")
        at_once = together / row["world_size"] if together else None
        bound = _bound(row, seconds)
        step = row["step_seconds_median"]
        lines.append(
            (
                name,
                row["seq_len"],
                panel_name(panel_of(row)),
                row["nodes"],
                1e3 * step,
                1e3 * ideal if ideal else None,
                ideal / step if ideal else None,
                1e3 * at_once if at_once else None,
                at_once / step if at_once else None,
                row.get("extra_across_gib_per_second"),
                bound / step if bound else None,
            )
        )
    if not lines:
        return None
    columns = (
        Column(header="method"),
        Column(header="tokens", form=format_length, numeric=True),
        Column(header="parallel"),
        Column(header="nodes", numeric=True),
        Column(header="ms", form=significant(3), numeric=True),
        Column(header="ideal ms", form=significant(3), numeric=True),
        Column(header="% of ideal", form=significant(3, 100), numeric=True),
        Column(header="at once ms", form=significant(3), numeric=True),
        Column(header="% of at once", form=significant(3, 100), numeric=True),
        Column(header="link GiB/s", form=significant(3), numeric=True),
        Column(header="% of bound", form=significant(3, 100), numeric=True),
    )
    return without_empty_columns(
        Table(
            name="ideal", title="Attention beside the ideal, forward and backward", columns=columns, rows=tuple(lines),
            note=NOTE,
        )
    )  # fmt: skip


def share_of_ideal(row: Row, rows: Sequence[Row]) -> float | None:
    """Ideal seconds of shared attention over its own; None without the trial of `rows` that gives the ideal."""
    if row["task"] != "attention" or row["cp_size"] == 1 or row["gpu"] == "cpu" or not row["step_seconds_median"]:
        return None
    whole = [
        other
        for other in rows
        if (other["task"], other["seq_len"], other["cp_size"], other["world_size"])
        == ("attention", row["seq_len"], 1, 1)
        and _problem(other) == _problem(row)
    ]
    seconds = pooled(whole, "step_seconds_median")
    return seconds / row["world_size"] / row["step_seconds_median"] if seconds else None


def _problem(row: Row) -> tuple[Any, ...]:
    """Key of trials that compute the same attention with the same kernel, in one run."""
    settings = tuple((name, row[name]) for name in setting_names(row) if name not in _SHARING)
    return (row["run"], row["experiment"], settings, row.get("chosen_kernel"))


def _bound(row: Row, whole: Mapping[str, float | None]) -> float | None:
    """Seconds that the link between nodes allows at best; None on one node or unequal ones, or without a figure."""
    across, nodes = row.get("extra_across_gib_per_second"), row["nodes"] or 1
    step, forward = whole["step_seconds_median"], whole["forward_seconds_median"]
    ranks = row["cp_size"]
    if across is None or nodes < 2 or ranks % nodes or step is None or forward is None:
        return None
    tokens = row["seq_len"] // ranks * row["batch_size"]
    share = Workload(
        cp_size=ranks,
        node_size=ranks // nodes,
        heads=row["model.heads"],
        kv_heads=row["model.kv_heads"],
        query_bytes=tokens * row["model.heads"] * row["model.head_dim"] * BYTES_OF[row["dtype"]],
        gradient_factor=1.0,
        forward_flops=0.0,
        rows=tokens,
    )
    return link_bound_seconds(share, forward / row["world_size"], (step - forward) / row["world_size"], across)
