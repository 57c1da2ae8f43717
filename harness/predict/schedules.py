"""`python -m harness.predict.schedules`: the engine's cost model inside one node, beside measured steps of attention.

Every measured call with its estimate goes to results/published/schedules.csv, the constants, errors and choices to
docs/notes/2026-11-23-cost-model-of-auto.md, all under the model as it is: a new constant is put into
`engine.attention.cost.HardwareModel` by hand, and tests hold the two together.

A call is a trial of `burst` whose transfers, if any, went by copy engine, which is what the cost model describes inside
a node. All calls of one problem are on one side of the split, whatever their schedule or run; those of other hosts,
measured later, are on neither.

The fit minimises the squares of the logarithm of estimated over measured seconds, so short and long calls weigh alike.
Calls with an error above `_USUAL` weigh less (Huber's weights, iterated), so one bad run changes little. Each constant
has a guess: a constant that differs from it by a factor of e costs as much as a call with an error of `_USUAL`. So a
constant on which no call depends keeps its guess. The steps are Levenberg and Marquardt's, over logarithms of the
constants. The same calls give the same constants.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cluster.files.errors import shown
from engine.attention.cost import HardwareModel, Workload, choose_num_head_chunks, choose_schedule, estimate
from engine.attention.resolve import recomputes_attention
from harness.base.errors import UsageError
from harness.metrics.throughput import interquartile_range
from harness.predict.attention import attention_problem, context_ranks_of_node
from harness.predict.validation import markdown_table, write_block, write_table
from harness.records.record import Record
from harness.records.stored import read_records, run_named

PUBLISHED = Path(__file__).parents[2] / "results" / "published"

# Folders of results/published with records of attention on H200 inside one node, of which one side is fitted.
FOLDERS = (
    "h200x4/attention_node",
    "h200x4/attention_node_grouped",
    "h200x4/attention_exchange",
    "h200x4/attention_window",
    "h200x4/attention_schedules",
)
# Runs of other hosts, measured after the constants were fitted: never fitted, whatever their settings.
OTHER_HOSTS = (
    "h200x2/attention_systems",
    "h200x2/attention_short",
    "h200x2/attention_node_grouped",
    "h200x2/attention_node_256k",
)

Side = Literal["fit", "held out", "another host"]
Rounds = Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallShape:
    """The computation of a call, without its schedule."""

    seq_len: int
    cp_size: int
    heads: int
    kv_heads: int
    mask: str

    @property
    def side(self) -> Side:
        """The rule of the split, by settings alone. Along the lengths of one group size and head count every other
        problem is fitted, and the next group size or head count starts on the other side; so both sides hold short and
        long sequences of every group size. Masks other than causal are never fitted."""
        steps = self.seq_len.bit_length() + self.cp_size.bit_length() + (self.heads != self.kv_heads)
        return "fit" if self.mask == "causal" and steps % 2 == 0 else "held out"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCall:
    """Forward and backward of one trial."""

    folder: str
    trial: str
    problem: CallShape
    schedule: str  # ring or ulysses; ring where there is one rank
    num_head_chunks: int
    layout: str
    workload: Workload
    rounds: Rounds  # seconds of steps, each that of its slowest rank

    @property
    def side(self) -> Side:
        """That of the problem, except in runs of other hosts."""
        return "another host" if self.folder in OTHER_HOSTS else self.problem.side

    @property
    def seconds(self) -> float:
        """Median of all steps."""
        return statistics.median(self._steps)

    @property
    def spread(self) -> float:
        """Interquartile range of the steps, in seconds."""
        return interquartile_range(self._steps) or 0.0

    @property
    def _steps(self) -> list[float]:
        return [seconds for steps in self.rounds for seconds in steps]


def measured_calls(published: Path = PUBLISHED, folders: Sequence[str] = FOLDERS + OTHER_HOSTS) -> list[MeasuredCall]:
    """The calls of all folders, in their order. Raises UsageError for a folder without records and for a record that
    cannot be read."""
    return [call for folder in folders for record in _records(published, folder) for call in _call_of(record, folder)]


def _records(published: Path, folder: str) -> list[Record]:
    found = read_records(run_named(published, folder))
    if not found:
        raise UsageError(
            f"{shown(str(published / folder))} holds no records; copy the run there, or take {shown(folder)} out of "
            "FOLDERS in harness/predict/schedules.py"
        )
    return sorted(found, key=lambda record: record.started_at)


def _call_of(record: Record, folder: str) -> Iterator[MeasuredCall]:
    """The call of a record, or nothing where another method, exchange or number of nodes was measured."""
    settings, measured = record.settings, record.measurement
    if record.status != "ok" or measured is None or settings.task != "attention" or settings.method != "burst":
        return
    chosen, model = measured.chosen, settings.model
    if settings.emulate_nodes > 1 or len(set(record.hosts)) > 1 or chosen["kernel"] != "fa4":
        return
    if chosen["exchange"] not in ("copy_engine", "none"):
        return
    problem = attention_problem(settings, context_ranks_of_node(settings, settings.world_size))
    yield MeasuredCall(
        folder=folder,
        trial=record.trial_id,
        problem=CallShape(
            seq_len=settings.seq_len,
            cp_size=settings.cp_size,
            heads=model.heads,
            kv_heads=model.kv_heads,
            mask=settings.mask,
        ),
        schedule=chosen["schedule"],
        num_head_chunks=int(chosen.get("num_head_chunks", 1)),
        layout=chosen["layout"],
        workload=Workload.of(problem, recompute=recomputes_attention(settings)),
        rounds=record.step_seconds_by_round,
    )


Vector = NDArray[np.float64]

# The value of each constant before the fit: round figures, from measurements of single kernels, copies and launches.
GUESSES: Mapping[str, float] = {
    "forward_tflops": 660.0,  # of a long causal call, FlashAttention-4
    "backward_tflops": 625.0,
    "together_share": 0.015,  # the slowest of four kernels at once, over the fastest
    "ring_step_seconds": 1.4e-3,  # 5.4 ms of Python at 16K on four GPUs
    "merge_seconds": 0.2e-3,
    "step_tail": 0.5,  # multiprocessors end at any time within the last tile's
    "head_call_seconds": 4e-3,  # 3.1 to 3.6 ms of launches, and a kernel after the last
    "head_chunk_seconds": 0.5e-3,
}

_USUAL = 0.02  # relative error of a call that counts in full
_STEP = 1e-4  # of a logarithm, in derivatives
_ROUNDS = 200


def fitted_model(calls: Iterable[MeasuredCall], guesses: Mapping[str, float] = GUESSES) -> HardwareModel:
    """The cost model's constants under which the calls of the fitted side are estimated best, to three digits."""
    chosen = [call for call in calls if call.side == "fit"]
    names, logs = list(guesses), np.log(np.array(list(guesses.values())))

    def errors(at: Vector) -> Vector:
        model = _with_constants(dict(zip(names, np.exp(at), strict=True)))
        return np.log([estimated(call, model) / call.seconds for call in chosen])

    found = _least_squares(errors, logs)
    return _with_constants({name: _rounded(math.exp(at)) for name, at in zip(names, found, strict=True)})


def estimated(call: MeasuredCall, model: HardwareModel) -> float:
    """Seconds of a call under the schedule and head chunks that it ran."""
    return estimate(call.schedule, call.workload, model, call.num_head_chunks)


def _with_constants(values: Mapping[str, Any]) -> HardwareModel:
    return replace(HardwareModel(), **values)


def _least_squares(errors: Callable[[Vector], Vector], guess: Vector) -> Vector:
    at, damping = guess.copy(), 1e-2
    here = errors(at)
    for _ in range(_ROUNDS):
        weights = np.minimum(1.0, _USUAL / np.maximum(np.abs(here), 1e-12)) / _USUAL**2
        slopes = np.stack(
            [(errors(at + step) - errors(at - step)) / (2 * _STEP) for step in _STEP * np.eye(len(at))], axis=1
        )
        gradient = slopes.T @ (weights * here) + (at - guess)
        curvature = (slopes.T * weights) @ slopes + np.eye(len(at))
        while damping < 1e9:
            tried = at - np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            there = errors(tried)
            if _loss(there, tried - guess) < _loss(here, at - guess):
                break
            damping *= 4
        else:
            return at
        moved = float(np.abs(tried - at).max())
        at, here, damping = tried, there, damping / 8
        if moved < 1e-7:
            return at
    return at


def _loss(errors: Vector, from_guess: Vector) -> float:
    """Huber's."""
    far = np.abs(errors)
    each = np.where(far < _USUAL, far**2 / 2, _USUAL * (far - _USUAL / 2)) / _USUAL**2
    return float(each.sum() + (from_guess**2).sum() / 2)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleComparison:
    """The model's choice for one problem beside the calls measured in one folder."""

    folder: str
    problem: CallShape
    calls: Sequence[MeasuredCall]  # one of each schedule, the fastest first
    schedule: str
    num_head_chunks: int  # that the model would take; the call measured may have had another number

    @property
    def side(self) -> Side:
        return self.calls[0].side

    @property
    def chosen(self) -> MeasuredCall:
        return next(call for call in self.calls if call.schedule == self.schedule)

    @property
    def best(self) -> MeasuredCall:
        return self.calls[0]

    @property
    def behind(self) -> float:
        """Measured seconds of the choice over those of the fastest schedule, less one."""
        return self.chosen.seconds / self.best.seconds - 1

    @property
    def within_noise(self) -> bool:
        """Whether the medians differ by at most the larger interquartile range of the two schedules' steps."""
        return self.chosen.seconds - self.best.seconds <= max(self.chosen.spread, self.best.spread)


def comparisons(calls: Iterable[MeasuredCall], model: HardwareModel) -> list[ScheduleComparison]:
    """Of every problem and folder with several schedules. Where one ran twice, its last call counts."""
    found: dict[tuple[str, CallShape], dict[str, MeasuredCall]] = {}
    for call in calls:
        found.setdefault((call.folder, call.problem), {})[call.schedule] = call
    return [
        _comparison(sorted(by_schedule.values(), key=lambda call: call.seconds), model)
        for by_schedule in found.values()
        if len(by_schedule) > 1
    ]


def _comparison(calls: Sequence[MeasuredCall], model: HardwareModel) -> ScheduleComparison:
    call = calls[0]
    schedule = choose_schedule(call.workload, call.layout, model).best
    return ScheduleComparison(
        folder=call.folder,
        problem=call.problem,
        calls=calls,
        schedule=schedule,
        num_head_chunks=choose_num_head_chunks(schedule, call.workload, model),
    )


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
    rows = ([f"`{name}`", f"{guess:.4g}", f"{getattr(model, name):.4g}"] for name, guess in GUESSES.items())
    return markdown_table(["constant", "guess", "fitted"], rows)


def error_table(calls: Sequence[MeasuredCall], model: HardwareModel) -> str:
    """Markdown: errors by ranks, schedule and side."""
    lines = []
    for label in sorted({_kind(call) for call in calls}):
        for side in get_args(Side):
            chosen = [call for call in calls if _kind(call) == label and call.side == side]
            if chosen:
                largest = max((error(call, model) for call in chosen), key=abs)
                said = "fitted" if side == "fit" else side
                median = median_error(chosen, model)
                lines.append([label, said, str(len(chosen)), f"{median:.1%}", f"{largest:+.1%}"])
    return markdown_table(["calls", "side", "count", "median error", "largest error"], lines)


def comparison_table(found: Iterable[ScheduleComparison]) -> str:
    """Markdown: what was measured, what the model takes, and how far that is behind."""
    lines = []
    for choice in sorted(found, key=lambda choice: (_order(choice.problem), choice.folder)):
        problem, ms = choice.problem, {call.schedule: f"{1e3 * call.seconds:.4g}" for call in choice.calls}
        behind = "" if choice.chosen is choice.best else f"{choice.behind:.1%}"
        if behind and choice.within_noise:
            behind += ", within the spread"
        lines.append(
            [
                str(problem.cp_size), f"{problem.heads}:{problem.kv_heads}", f"{problem.seq_len // 1024}K",
                "fitted" if choice.side == "fit" else choice.side, ms["ring"], ms["ulysses"], choice.schedule, behind,
            ]
        )  # fmt: skip
    header = ["GPUs", "heads", "tokens", "side", "ring, ms", "`ulysses`, ms", "`auto` takes", "behind"]
    return markdown_table(header, lines)


def _kind(call: MeasuredCall) -> str:
    ranks = call.problem.cp_size
    window = "" if call.problem.mask == "causal" else ", a window"
    return ("one GPU" if ranks == 1 else f"{ranks} GPUs, {call.schedule}") + window


def _problem_cells(problem: CallShape) -> list[str]:
    sizes = (problem.seq_len, problem.cp_size, problem.heads, problem.kv_heads)
    return [*map(str, sizes), problem.mask]


def _order(problem: CallShape) -> tuple[str, int, int, int]:
    return problem.mask, problem.cp_size, -problem.kv_heads, problem.seq_len


def main() -> None:
    calls, model = measured_calls(), HardwareModel()
    found = fitted_model(calls)
    print(f"{'constant':24} {'guess':>10} {'fitted':>10} {'in use':>10}")
    for name, guess in GUESSES.items():
        print(f"{name:24} {guess:10.4g} {getattr(found, name):10.4g} {getattr(model, name):10.4g}")
    rows = table_rows(calls, model)
    for row in rows:
        print("  ".join(row[1:]))
    write_table(TABLE_FILE, rows)
    write_block(CONSTANTS, constant_table(model), PAGE)
    for name, text in ((ERRORS, error_table(calls, model)), (CHOICES, comparison_table(comparisons(calls, model)))):
        print(text)
        write_block(name, text, PAGE)


if __name__ == "__main__":
    main()
