"""Records as rows: one flat dict per trial, the rows of a run, and results.csv.

A row holds the contract's columns, every setting under its dotted name (`checkpoint.tail`, `model.layers`), and what
each `auto` became (`chosen_kernel`; in words: `ran`). None means absent and becomes an empty cell; status and reason
say why.
"""

from __future__ import annotations

import csv
import io
import json
import shlex
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args

from engine.atomic import write_atomic
from engine.attention.problem import ULYSSES_SCHEDULES
from engine.measurement import UpstreamRun
from engine.settings import Task, TrialSettings, to_json
from harness.metrics.intervals import Interval, TwoRounds, medians_of_two
from harness.metrics.throughput import GIB, metrics_of
from harness.records.forecasts import outcome_in_words
from harness.records.judging import ERROR, ERROR_AT
from harness.records.record import BadRecord, Record, RecordPlace, refuse_bad, set_aside
from harness.records.stated import NOTHING_STATED, StatedProvenance, caveats_of
from harness.records.stored import StoredRecord, read_all, stored_run
from harness.spec.table import EQUAL, MAY_FILL

Row = dict[str, Any]
_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)

# Columns other people's scripts rely on, in their order; settings and extras follow.
COLUMNS: tuple[str, ...] = (
    "trial_id", "experiment", "task", "method", "system", "model", "seq_len", "world_size", "cp_size", "dp_size",
    "nodes", "gpu", "dtype", "status", "reason", "samples", "step_seconds_median", "step_seconds_iqr",
    "forward_seconds_median", "tokens_per_gpu_per_second", "tflops_per_gpu", "mfu", "mfu_ceiling", "hfu",
    "peak_memory_gib", "peak_reserved_gib", "sent_gib_per_gpu", "loss", "grad_norm", "seed", "commit",
    "ran", "rounds", "step_seconds_low", "step_seconds_high", "tokens_per_gpu_per_second_low",
    "tokens_per_gpu_per_second_high", "driver", "gpus", "run_command", "ceiling_source", "caveats",
)  # fmt: skip

_NO_COLUMN = ("model.name", "model.note")  # the one is column `model`, the other no setting
_NOT_USED = {
    "checkpoint.plan": "hand",
    "memory": "",
    "host_memory": "",
    "planned": "",
    "lora": None,
    "optimizer_states": None,
    "gradient_offload": False,
}
_SETTINGS = frozenset(field.name for field in fields(TrialSettings))
_TASKS = get_args(Task)

WRITE_SECONDS = 30.0  # between two writes of results.csv while trials run; the last one is at the end

UPSTREAM = "_upstream"  # ends the name of a system that runs unmodified beside our native baseline of its method
ONE_RANK = "one rank"  # what a trial ran that shared no sequence
TENSOR_PARALLEL = "tensor and sequence parallel"
_SIDES = {"query": "query side", "key_value": "key side"}

# Order of methods in tables, legends and palettes: ours, then the systems it is compared with, then the rest by name.
METHOD_ORDER: tuple[str, ...] = (
    "burst", "ring", "megatron_cp", "megatron_tp", "ulysses", "loongtrain_double_ring", "loongtrain_usp", "torch_cp",
    "flash_attn", "flash_linear_attention", "flash_1gpu",
)  # fmt: skip


def row_of(record: Record, run: str = "", stated: StatedProvenance = NOTHING_STATED) -> Row:
    """One trial as a row; `run` names the run it belongs to, since only trials of one run may be compared in speed.

    `stated`: what the run's provenance.yaml says of its records.

    Lists (`step_seconds_by_round` with its `round_numbers`, `round_starts`, `machines` and `link_by_round`,
    `loss_by_step`, `grad_norm_by_step`) are for tables and figures, not results.csv.
    """
    settings, measured = record.settings, record.measurement
    row: Row = dict.fromkeys(COLUMNS)
    row.update(
        trial_id=record.trial_id,
        experiment=record.experiment,
        system=record.system,
        model=settings.model.name,
        dp_size=settings.dp_size,
        nodes=len(set(record.hosts)) * settings.emulate_nodes or None,
        gpu=record.gpu or None,
        status=record.status,
        reason=record.reason or None,
        commit=record.commit or None,
        ran=ran_of(record),
        run_command=shlex.join(record.run_command) or stated.command(record.trial_id),
        caveats="; ".join(caveats_of(record, stated)) or None,
    )
    row.update(to_json(metrics_of(record)))
    flat = flatten(to_json(replace(settings, lora=None))) | {"lora": settings.lora and str(settings.lora)}
    row.update((name, value) for name, value in flat.items() if name not in _NO_COLUMN)
    row.update(_of_plan(record))
    if measured is not None:
        row.update(driver=measured.software.get("driver"), gpus=" ".join(dict.fromkeys(measured.gpus)) or None)
        row.update((f"chosen_{name}", value) for name, value in measured.chosen.items())
        # Of a wrong trial its errors alone: no table and no figure may show the rest. Where an error is largest is said
        # in the reason.
        kept = {ERROR} if record.status == "wrong" else measured.extra.keys() - {ERROR_AT}
        extra = {name: value for name, value in measured.extra.items() if name in kept}
        row.update((f"extra_{name}", value) for name, value in flatten(extra).items())
    if settings.settings != EQUAL:
        row.update(
            settings_from_table=", ".join(record.settings_from_table) or None,
            settings_by_hand=", ".join(record.settings_by_hand) or None,
            settings_notes=" ".join(record.settings_notes) or None,
        )
    row.update(
        run=run,
        title=record.title,
        launcher=record.launcher or None,
        attempts=record.attempts,
        wall_seconds=record.wall_seconds or None,
        ranks_turn=record.ranks_turn or None,
        idle_ranks=record.idle_ranks or None,
        started_at=record.started_at or None,
        step_seconds_by_round=record.step_seconds_by_round if record.status == "ok" else [],
        round_numbers=_round_numbers(record) if record.status == "ok" else [],
        round_starts=_round_starts(record) if record.status == "ok" else [],
        machines=_machines(record, stated) if record.status == "ok" else [],
        link_by_round=[one.link_gib_per_second for one in record.rounds if one.step_seconds and record.status == "ok"],
        loss_by_step=list(measured.loss) if measured and record.status == "ok" else [],
        grad_norm_by_step=list(measured.grad_norm) if measured and record.status == "ok" else [],
    )
    return row


def _of_plan(record: Record) -> Row:
    """What `checkpoint: auto` chose, what that was expected to take, and what came out; nothing without a plan."""
    plan = record.plan
    if plan is None:
        return {}
    return {
        "checkpoint_plan": plan.words,
        "predicted_peak_gib": plan.allocated_bytes / GIB,
        "predicted_reserved_gib": plan.reserved_bytes / GIB,
        "predicted_step_seconds": plan.step_seconds,
        "plan_outcome": outcome_in_words(record) or None,
    }


def _round_numbers(record: Record) -> list[int]:
    """Numbers of the rounds behind `step_seconds_by_round`; a record from before there were rounds holds the first."""
    return [one.number for one in record.rounds if one.step_seconds] if record.rounds else [1]


def _round_starts(record: Record) -> list[str]:
    """When each of `round_numbers` started, ISO 8601 in UTC; empty texts where a record does not tell."""
    return [one.started_at for one in record.rounds if one.step_seconds] if record.rounds else [record.started_at]


@dataclass(frozen=True, slots=True)
class RoundMachine:
    """Where a round ran: the name that provenance.yaml gives it, its hosts, and digests of its GPUs where known."""

    stated: str
    hosts: frozenset[str]
    gpus: frozenset[str]

    def is_same(self, other: RoundMachine) -> bool:
        """Whether nothing says that the two are different machines."""
        if self.stated != other.stated or self.hosts != other.hosts:
            return False
        return self.gpus == other.gpus or not (self.gpus and other.gpus)


def _machines(record: Record, stated: StatedProvenance) -> list[RoundMachine]:
    """Of each of `round_numbers`. In records from before rounds kept their GPUs, these are those of all rounds."""
    measured = record.measurement
    alone = len(record.rounds) < 2 and measured is not None
    whole = frozenset(measured.gpus) if measured is not None and alone else frozenset()
    found = [(one.number, one.hosts, frozenset(one.gpus)) for one in record.rounds if one.step_seconds]
    return [
        RoundMachine(stated.machine(record.trial_id, number), frozenset(hosts or record.hosts), gpus or whole)
        for number, hosts, gpus in found or [(1, record.hosts, whole)]
    ]


def spread_of(row: Row) -> Interval | TwoRounds | None:
    """Of the median step, in seconds: its interval, or that of each of two rounds; None for a single round."""
    if row["step_seconds_low"] is not None:
        return Interval(low=row["step_seconds_low"], high=row["step_seconds_high"])
    return medians_of_two(row["step_seconds_by_round"] or ())


def ran_of(record: Record) -> str | None:
    """The attention that a trial ran, in words: `ring, query side`, `ulysses, copy engine`, `one rank`. Of a compared
    system its release, where its attention alone ran what that is over which kernel, and which of its packages are
    another build than their authors'.

    None without a measurement, and for a task that runs no attention.
    """
    chosen = record.measurement.chosen if record.measurement else {}
    upstream: UpstreamRun = record.measurement.extra.get("upstream", {}) if record.measurement else {}
    if release := upstream.get("release"):
        builds = upstream.get("builds", {})
        named: dict[str, str] = {}  # what a build is -> the shortest name of a package that has it
        for name, words in sorted(builds.items(), key=lambda item: len(item[0])):
            named.setdefault(words, name)
        called = [f"{chosen['arrangement']} over {chosen.get('kernel')}"] if "arrangement" in chosen else []
        other = [f"{name} {words.partition(' (archive')[0]}" for words, name in named.items()]
        return ", ".join([release, *called, *other])
    if "schedule" not in chosen:
        return None
    if record.settings.cp_size == 1:
        return ONE_RANK if record.settings.tp_size == 1 else TENSOR_PARALLEL
    parts = [chosen["schedule"].replace("_", " ")]
    if chosen["schedule"] in ULYSSES_SCHEDULES:
        # Such as `copy_engine + relay`: the all-to-all's, then the ring's between its groups.
        first = chosen.get("exchange", "").partition(" + ")[0]
        parts.append("all-to-all" if first == "all_to_all" else first.replace("_", " "))
    parts.append(_SIDES.get(chosen.get("backward", ""), ""))
    return ", ".join(part for part in parts if part)


def rows_of(records: Iterable[Record], run: str = "") -> list[Row]:
    """All records as rows in the order tables and figures show them, whatever order they finished in."""
    return in_order(row_of(record, run) for record in records)


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows in that order."""
    return sorted(rows, key=_order)


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The contract's columns, then every scalar column any row has: settings, choices and extras. Those of the planner
    and of ways to overlap only where a row uses one, so that a results.csv from before them stays what is written
    today."""
    seen = dict.fromkeys(COLUMNS)
    for row in rows:
        seen.update(dict.fromkeys(name for name, value in row.items() if not isinstance(value, list)))
    unused = {name for name, value in _NOT_USED.items() if all(row.get(name) in (value, None) for row in rows)}
    return [name for name in seen if name not in unused]


CSV_BEGINNING = "trial_id,experiment,"  # of every results.csv


def write_results(path: Path, rows: Sequence[Row]) -> Path:
    """Write results.csv whole or not at all; floats keep all digits, absent values are empty cells."""
    columns = columns_of(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([cell(row.get(name)) for name in columns] for row in rows)
    return write_atomic(path, text.getvalue())


def cell(value: object) -> str:
    """A value as a CSV cell: empty when absent, true/false, all digits of a float; an interval as `low to high`, what
    two rounds gave as `one and other`."""
    if value is None:
        return ""
    if isinstance(value, Interval):
        return f"{value.low} to {value.high}"
    if isinstance(value, TwoRounds):
        return " and ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings under dotted names; a list becomes its JSON text, so that every value fits one cell."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = json.dumps(value) if isinstance(value, list | tuple) else value
    return flat


def method_rank(method: str) -> tuple[int, str]:
    """Sort key of a method: its place in METHOD_ORDER (`x_upstream` after `x`), unknown ones last by name."""
    base = method.removesuffix(UPSTREAM)
    return (METHOD_ORDER.index(base) if base in METHOD_ORDER else len(METHOD_ORDER), method)


def setting_names(row: Row) -> list[str]:
    """Columns of `row` that hold settings, nested ones by their dotted names, in sorted order."""
    return list(_settings_among(tuple(row)))


def given_names(row: Row) -> list[str]:
    """Of those columns the ones that the experiment decides."""
    return [name for name in setting_names(row) if is_given(row, name)]


def is_given(row: Row, setting: str) -> bool:
    """Whether the experiment decides a setting. Where `settings` is as_published or tuned, every method brings its own
    values of those that the experiment leaves open, and trials are compared all the same."""
    if row["settings"] == EQUAL or setting not in MAY_FILL:
        return True
    if setting == "checkpoint.plan" and (row[setting] == "auto" or row["method"].endswith(UPSTREAM)):
        return False  # an upstream system has no planner; it is compared with what ours chooses for the same memory
    return setting in (row["settings_by_hand"] or "").split(", ")


@lru_cache(maxsize=1024)
def _settings_among(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Kept, because thousands of rows have the same columns."""
    return tuple(sorted(name for name in columns if name.split(".")[0] in _SETTINGS))


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """The items by their key, in order of first appearance."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def sortable(value: object) -> tuple[bool, float, str]:
    """Sort key for values of mixed types: numbers by size, then everything else by its text."""
    number = isinstance(value, int | float)
    return (not number, float(value) if isinstance(value, int | float) else 0.0, str(value))


def _order(row: Row) -> tuple[object, ...]:
    return (
        row["experiment"],
        _TASKS.index(row["task"]),
        row["model"],
        row["dtype"],
        row["seq_len"],
        row["cp_size"],
        row["world_size"],
        method_rank(row["method"]),
        [sortable(row[name]) for name in setting_names(row)],
    )


class RunRecords:
    """The records of a run by their trials; `run` names the run in rows."""

    def __init__(self, path: Path, run: str = "") -> None:
        self.stored = stored_run(path)
        self._run = run or self.stored.name
        self._stated = NOTHING_STATED
        self._records: dict[str, Record] = {}
        self._rows: dict[str, Row] = {}
        self._places: dict[str, RecordPlace] = {}  # of those that were read
        self._in_order: list[Row] | None = None  # the rows, sorted since the last one came
        self._written_at = time.monotonic()

    def read(self) -> list[BadRecord]:
        """Read every record there is, and return those that cannot be used: no record, or one that makes no sense."""
        # Not before: a new run moves an earlier one aside first, with what is stated of it.
        self._stated = self.stored.stated()

        def use(one: StoredRecord, record: Record) -> None:
            self._put(one.trial, record)
            self._places[one.trial] = one.place

        return read_all(self.stored.records(), use)

    def read_usable(self, *, set_bad_aside: bool = False) -> list[tuple[Path, Path]]:
        """Read every record; returns from where to where bad ones were renamed, so that they are passed over.

        Raises UsageError that lists all of them where that was not asked for.
        """
        bad = self.read()
        if not set_bad_aside:
            refuse_bad(bad)
        return set_aside(bad)

    def get(self, trial_id: str) -> Record | None:
        return self._records.get(trial_id)

    def place(self, trial_id: str) -> RecordPlace:
        """Where a record is that was read."""
        return self._places[trial_id]

    def placed(self) -> list[tuple[Record, RecordPlace]]:
        """The records that were read, each with its place."""
        return [(self._records[trial], place) for trial, place in self._places.items()]

    def put(self, record: Record) -> None:
        """The record that a trial has left now."""
        self._put(record.trial_id, record)

    def _put(self, trial_id: str, record: Record) -> None:
        row = row_of(record, self._run, self._stated)
        self._records[trial_id], self._rows[trial_id], self._in_order = record, row, None

    def records(self) -> list[Record]:
        """In order of trial id."""
        return [self._records[trial_id] for trial_id in sorted(self._records)]

    def rows(self) -> list[Row]:
        """In the order of tables and figures."""
        if self._in_order is None:
            self._in_order = in_order(self._rows.values())
        return list(self._in_order)

    def write(self, path: Path, *, at_once: bool = True) -> None:
        """Write results.csv; unless `at_once`, only where the last time was WRITE_SECONDS ago."""
        if at_once or time.monotonic() - self._written_at >= WRITE_SECONDS:
            write_results(path, self.rows())
            self._written_at = time.monotonic()


def standing_twice(runs: Iterable[RunRecords]) -> Iterator[str]:
    """A sentence about each record that stands twice, as in a copied directory: tables would count it twice."""
    places: dict[tuple[str, str], RecordPlace] = {}
    for run in runs:
        for record, place in run.placed():
            first = places.setdefault((record.trial_id, record.started_at), place)
            if first is not place:
                yield f"{record.trial_id} stands twice, in {first} and {place}; leave one of them out"
