"""Measured calls of attention inside one node, as the engine's cost model sees them, and the split for its fit.

A call is a trial of `burst` whose transfers, if any, went by copy engine, which is what the cost model describes inside
a node. All calls of one problem are on one side of the split, whatever their schedule or run; those of other hosts,
measured later, are on neither.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.files.errors import shown
from engine.attention.cost import Workload
from engine.attention.resolve import recomputes_attention
from harness.base.errors import UsageError
from harness.metrics.throughput import interquartile_range
from harness.predict.step import attention_problem, context_ranks_of_node
from harness.records.record import Record
from harness.records.stored import read_records, run_named

PUBLISHED = Path(__file__).parents[3] / "results" / "published"

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
            "FOLDERS in harness/predict/schedules/measured.py"
        )
    return found


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
