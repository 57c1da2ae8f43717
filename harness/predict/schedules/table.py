"""The tables of the fit: every call with its estimate, and every choice with the seconds it cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import get_args

from engine.attention.cost import HardwareModel
from harness.predict.schedules.comparison import ScheduleComparison
from harness.predict.schedules.fit import GUESSES, estimated
from harness.predict.schedules.measured import PUBLISHED, CallShape, MeasuredCall, Side

PAGE = PUBLISHED.parents[1] / "docs" / "notes" / "2026-11-23-cost-model-of-auto.md"
TABLE_FILE = PUBLISHED / "schedules.csv"
# Names of blocks of the page.
CONSTANTS, ERRORS, CHOICES = (f"{each} of the cost model" for each in ("constants", "errors", "choices"))
HEADER = [
    "record", "side", "seq_len", "cp_size", "heads", "kv_heads", "mask", "schedule", "num_head_chunks", "measured_ms",
    "spread_ms", "estimated_ms", "error_percent",
]  # fmt: skip


def table_rows(calls: Iterable[MeasuredCall], model: HardwareModel) -> list[list[str]]:
    """Every call with its estimate, below a header; in order of problem and schedule."""
    rows = [
        [
            f"{call.folder}/{call.trial}", call.side, *_problem_cells(call.problem), call.schedule,
            str(call.num_head_chunks), f"{1e3 * call.seconds:.4g}", f"{1e3 * call.spread:.2g}",
            f"{1e3 * estimated(call, model):.4g}", f"{100 * error(call, model):+.1f}",
        ]
        for call in sorted(calls, key=lambda call: (_order(call.problem), call.schedule, call.folder, call.trial))
    ]  # fmt: skip
    return [HEADER, *rows]


def error(call: MeasuredCall, model: HardwareModel) -> float:
    """Estimated over measured seconds, less one."""
    return estimated(call, model) / call.seconds - 1


def median_error(calls: Iterable[MeasuredCall], model: HardwareModel) -> float:
    """Median of the absolute errors."""
    return statistics.median(abs(error(call, model)) for call in calls)


def constant_table(model: HardwareModel) -> str:
    """Markdown: the fitted constants beside their guesses."""
    rows = (f"| `{name}` | {guess:.4g} | {getattr(model, name):.4g} |" for name, guess in GUESSES.items())
    return "\n".join(["| constant | guess | fitted |", "|---|---|---|", *rows])


def error_table(calls: Sequence[MeasuredCall], model: HardwareModel) -> str:
    """Markdown: errors by ranks, schedule and side."""
    lines = ["| calls | side | count | median error | largest error |", "|---|---|---|---|---|"]
    for label in sorted({_kind(call) for call in calls}):
        for side in get_args(Side):
            chosen = [call for call in calls if _kind(call) == label and call.side == side]
            if chosen:
                largest = max((error(call, model) for call in chosen), key=abs)
                said = "fitted" if side == "fit" else side
                median = median_error(chosen, model)
                lines.append(f"| {label} | {said} | {len(chosen)} | {median:.1%} | {largest:+.1%} |")
    return "\n".join(lines)


def comparison_table(found: Iterable[ScheduleComparison]) -> str:
    """Markdown: what was measured, what the model takes, and how far that is behind."""
    lines = [
        "| GPUs | heads | tokens | side | ring, ms | `ulysses`, ms | `auto` takes | behind |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for choice in sorted(found, key=lambda choice: (_order(choice.problem), choice.folder)):
        problem, ms = choice.problem, {call.schedule: f"{1e3 * call.seconds:.4g}" for call in choice.calls}
        behind = "" if choice.chosen is choice.best else f"{choice.behind:.1%}"
        if behind and choice.within_noise:
            behind += ", within the spread"
        lines.append(
            f"| {problem.cp_size} | {problem.heads}:{problem.kv_heads} | {problem.seq_len // 1024}K | "
            f"{'fitted' if choice.side == 'fit' else choice.side} | {ms['ring']} | {ms['ulysses']} | "
            f"{choice.schedule} | {behind} |"
        )
    return "\n".join(lines)


def _kind(call: MeasuredCall) -> str:
    ranks = call.problem.cp_size
    window = "" if call.problem.mask == "causal" else ", a window"
    return ("one GPU" if ranks == 1 else f"{ranks} GPUs, {call.schedule}") + window


def _problem_cells(problem: CallShape) -> list[str]:
    sizes = (problem.seq_len, problem.cp_size, problem.heads, problem.kv_heads)
    return [*map(str, sizes), problem.mask]


def _order(problem: CallShape) -> tuple[str, int, int, int]:
    return problem.mask, problem.cp_size, -problem.kv_heads, problem.seq_len
