"""Tables that only some runs have: set-ups of the methods, where a step's time goes, masks, forms of the LM head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.attention.masks import parse_mask
from harness.base.lengths import format_length
from harness.metrics.throughput import FORMULAS
from harness.report.results import UPSTREAM, Row, cell, method_rank
from harness.report.speedup import marked, slow_baselines
from harness.report.tables.table import Table, number, significant, table_of, text
from harness.report.tables.trials import MASK, MODEL, NAME, PARALLEL, TASK, TOKENS, lines_of, unit_of
from harness.report.variants import method_name, panel_of, system_name
from harness.spec.table import EQUAL

_MS, _FORWARD_MS = (
    number("ms", "step_seconds_median", significant(3, 1e3)),
    number("forward ms", "forward_seconds_median", significant(3, 1e3)),
)
_PEAK = number("peak GiB", "peak_memory_gib", significant(3))


def set_ups_table(rows: Sequence[Row]) -> Table | None:
    """A line for each method and value of `settings`: what `as_published` and `tuned` gave it, and what no setting of
    the engine says. None where every trial ran with equal ones."""

    def key(row: Row) -> tuple[str, tuple[int, str], str, str]:
        return (row["settings"], method_rank(row["method"]), _filled(row) or "", row["settings_by_hand"] or "")

    lines = {key(row): row for row in reversed(rows) if row["settings"] != EQUAL}
    columns = (
        text("method", _system), text("settings", "settings"), text("from the table", _filled),
        text("by hand", "settings_by_hand"), text("note", "settings_notes"),
    )  # fmt: skip
    return table_of(
        "settings", "Set-ups of the methods", columns, [lines[one] for one in sorted(lines)],
        note="as_published: the set-up of the method's authors, or of the paper's artifact. tuned: what they would "
        "turn on. from the table: values of baselines/settings.yaml, where each has its source. by hand: settings "
        "that the table may fill and the experiment gave itself. note: what the original does and no setting says. "
        "Methods are compared under one value of settings, each with its own set-up.",
    )  # fmt: skip


def _system(row: Row) -> str:
    return system_name(row) if row["method"].endswith(UPSTREAM) else str(row["method"])


def _filled(row: Row) -> str | None:
    names = (row["settings_from_table"] or "").split(", ")
    return ", ".join(f"{name} {cell(row[name])}" for name in names if name) or None


_PROFILE = "extra_profile."
SPAN = f"{_PROFILE}span_seconds"
# What the worker calls a category, and how the table does; the order is that of precedence where several run at once.
HEADERS = {
    "attention_forward": "attention forward %",
    "attention_backward": "attention backward %",
    "attention_recomputed": "attention recomputed %",
    "matmul": "matmul %",
    "recomputed": "other recomputed %",
    "lm_head": "LM head %",
    "optimizer": "optimizer %",
    "other_compute": "other compute %",
    "merge": "merging %",
    "communication": "exposed communication %",
    "copies": "exposed copies %",
    "idle": "idle %",
}
_STEPS = {"extra_step": "one more", "measured_step": "the measured one"}


def seconds_by_category(row: Row) -> dict[str, float]:
    """Of a traced step."""
    return {name: row.get(f"{_PROFILE}seconds.{name}") or 0.0 for name in HEADERS}


def breakdown_table(rows: Sequence[Row]) -> Table | None:
    """A line per profiled trial; categories in which no trial spent any time have no column. None without a profile."""

    def share(category: str) -> Callable[[Row], float]:
        return lambda line: seconds_by_category(line)[category] / line[SPAN]

    lines = [line for line in lines_of(rows) if line.get(SPAN)]
    met = [name for name in HEADERS if any(seconds_by_category(line)[name] for line in lines)]
    columns = (
        NAME, TASK, MODEL, MASK, TOKENS, PARALLEL,
        number("step ms", "step_seconds_median", significant(3, 1e3)),
        text("traced step", lambda line: _STEPS[line[f"{_PROFILE}of"]]),
        number("of rank", f"{_PROFILE}rank"),
        text("on", f"{_PROFILE}on"),
        number("traced ms", SPAN, significant(3, 1e3)),
        *(number(HEADERS[name], share(name), lambda share: f"{100 * share:.1f}") for name in met),
    )  # fmt: skip
    return table_of(
        "breakdown", "Where a step's time goes", columns, lines, trials=[line.row for line in lines],
        note="Of the rank whose events span the longest time. From its first event to its last every instant belongs "
        "to one column, the leftmost of those that run then, so transfers count only where nothing computes beside "
        "them; idle: nothing runs, because the host or another rank is waited for. The profiler slows the host down, "
        "so the traced time may exceed that of the measured steps, short ones most of all.",
    )  # fmt: skip


def mask_table(rows: Sequence[Row]) -> Table | None:
    """Does the cost of attention follow the mask's area, the visible (query, key) pairs? Trials of task attention by
    kernel, mask and length; None for a single mask."""
    slow = slow_baselines(rows)
    lines = [line for line in lines_of(rows) if line["task"] == "attention" and line["status"] == "ok"]
    if len({line["mask"] for line in lines}) < 2:
        return None
    lines.sort(key=lambda line: (
        line["run"], line["experiment"], line["method"], str(_kernel(line)), panel_of(line), line["mask"],
        line["seq_len"],
    ))  # fmt: skip
    columns = (
        text("method", lambda line: marked(method_name(line), id(line.row) in slow)),
        text("kernel", _kernel), text("mask", "mask"), PARALLEL, TOKENS,
        number("pairs", _pairs, "{:.3g}".format),
        number("% of full", lambda line: _pairs(line) / line["seq_len"] ** 2, significant(3, 100)),
        _MS, _FORWARD_MS, number("ns per pair", _seconds_per_pair, significant(3, 1e9)), _PEAK,
        number("host GiB", "peak_rss_gib", significant(3)),
    )  # fmt: skip
    return table_of(
        "masks", "Cost of attention against the mask's area", columns, lines, trials=[line.row for line in lines],
        note="pairs = visible (query, key) pairs of one sequence; ms = forward + backward; ns per pair = seconds of "
        "forward + backward × ranks ÷ (pairs × sequences × query heads), the same at every length where time follows "
        "the mask's area. Host memory is the process's peak, interpreter and libraries included.",
    )  # fmt: skip


def _kernel(row: Row) -> object:
    return row.get("chosen_kernel") or row["kernel"]


def _pairs(row: Row) -> float:
    return parse_mask(row["mask"]).area(row["seq_len"])


def _seconds_per_pair(row: Row) -> float | None:
    pairs = _pairs(row) * row["batch_size"] * row["dp_size"] * row["model.heads"]
    return row["step_seconds_median"] * row["world_size"] / pairs if pairs else None


def form_of(row: Row) -> str:
    """How the loss is formed: plain, with all logits at once, or fused by the named library."""
    return str(row["loss_kernel"]) if row["lm_head_fusion"] else "plain"


def head_table(rows: Sequence[Row]) -> Table | None:
    """Every trial of task lm_head, the forms of one problem below each other; None when there is none."""
    lines = [line for line in lines_of(rows) if line["task"] == "lm_head"]
    lines.sort(key=lambda line: (
        line["run"], line["experiment"], line["model"], line["dtype"], line["z_loss"], panel_of(line), line["seq_len"],
    ))  # fmt: skip
    checked = ("loss", "dhidden", "dweight")  # compared with float64, as the worker names them
    columns = (
        text("head", lambda line: f"{line['model']}, {line['model.vocab']} × {line['model.hidden']}"),
        number("tokens per rank", lambda line: line["seq_len"] * line["batch_size"] // line["cp_size"], format_length),
        PARALLEL, text("dtype", "dtype"), text("z-loss", lambda line: line["z_loss"] or None), text("form", form_of),
        number("ms", lambda line: line["step_seconds_median"] if line["status"] == "ok" else line["status"],
               significant(3, 1e3)),
        _FORWARD_MS, number(f"TFLOP/s/{unit_of(lines)}", "tflops_per_gpu", significant(3)), _PEAK,
        number("GiB beyond", _beyond, significant(3)), number("loss", "loss", significant(6)),
        *(number(f"{name} error", f"extra_error.{name}", "{:.1e}".format) for name in checked),
        text("tile", "chosen_tile"),
    )  # fmt: skip
    return table_of(
        "lm_head", "LM head and loss, form by form", columns, lines, trials=[line.row for line in lines],
        marked=lambda line: line["status"] not in ("ok", "refused"),
        note=f"{FORMULAS['tflops_per_gpu (lm_head)']}. The fused forms but cce form the gradients in the forward. "
        "GiB beyond = peak memory less hidden states and weight, their gradients, and the labels. Errors are relative "
        "to a plain float64 run, ‖a − b‖ ÷ ‖b‖, the worst rank's.",
    )  # fmt: skip


def _beyond(row: Row) -> float | None:
    """Memory beyond what any form holds."""
    peak, held = row["peak_memory_gib"], row.get("extra_held_gib")
    return peak - held if peak is not None and held is not None else None
