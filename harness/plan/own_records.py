"""`python -m harness.plan.own_records`: every training record of this engine, predicted, into results/published.

Records of the engine of today are judged; those of an earlier engine, whose layers saved more, are only listed. Time is
not judged of records of which provenance.yaml states conditions, as of a host that was shared; of those with adapters
from before backward stopped to copy their gradients; nor of those with moments in host memory from before updates ran
beside the next forward with today's buffers. Memory is not judged of records whose updates ran beside a forward that
held more. To the memory of earlier records what their fullest moment held besides is added.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from engine.checkpoint.planning.memory import MemoryModel
from engine.checkpoint.planning.memory_settings import memory_settings_of
from engine.lora import adapter_parameters
from engine.settings import BYTES_OF, CudaGraph, Kernel, TrialSettings, keeps_whole, late_fraction
from harness.metrics.hardware import Hardware, hardware_for
from harness.metrics.throughput import GIB
from harness.plan.predict import predict
from harness.predict.validation import markdown_table, write_block, write_table
from harness.records.record import Record, refuse_bad
from harness.records.stored import StoredRecord, StoredRun, read_all, runs_below, stored_run
from harness.spec.methods import is_native, method_named

PUBLISHED = Path(__file__).parents[2] / "results" / "published"
TABLE_FILE = PUBLISHED / "predicted.csv"
BLOCK = "errors on records"
# Since then one rank alone keeps its parameters whole, and layers form the product of SwiGLU again: records that
# started before are of an earlier engine.
TODAY = "2026-11-22T04:00"
GRADIENTS_BESIDE_UNTIL = "2026-11-26T12:42"  # FSDP2 took the memory of reduced gradients on a stream of its own
ADAPTERS_COPIED_UNTIL = "2026-11-27T17:50"  # backward of adapters copied gradients, 7% of a step of 8b at 16K
# No forward hid the copies of moments in host memory, then one hid as many as three buffers let pass.
FEWER_BUFFERS_UNTIL = "2026-11-28T11:29"
# Forward ran beside updates and held whole layers' gradients, which those of vectors kept.
HELD_IN_FORWARD = ("2026-11-28T08:39", "2026-11-28T19:04")
LEFT_LATE_UNTIL = "2026-11-28T19:33"  # copies to the host ended in backward, also where layers kept whole follow
COPIED_ALONE_UNTIL = "2026-11-28T21:20"  # FSDP2 on one rank copied each layer's gradient to where it stayed
KEPT_IN_GROUPS_UNTIL = "2026-11-29T03:37"  # a group of layers kept attention's results on the GPU until its first layer
RUN_KEPT_UNTIL = "2026-11-29T08:10"  # an MLP in tiles held the normed states' gradient of the run before
WITHIN = {"seconds": 0.05, "allocated": 0.04, "reserved": 0.08}  # aims: of the median error of today's records
HEADER = [
    "record", "judged", "method", "model", "seq_len", "cp_size", "kernel", "seconds", "predicted_seconds",
    "seconds_error_percent", "allocated_gib", "predicted_allocated_gib", "allocated_error_percent", "reserved_gib",
    "predicted_reserved_gib", "reserved_error_percent",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordPrediction:
    """One record: each figure as (measured, predicted). Seconds are the median step, GiB the fullest rank's."""

    record: str  # its run below results/published, and its trial
    judged: bool
    timed: bool  # judged, and its time too
    as_allocated: bool  # judged, and what it allocated too
    as_reserved: bool  # the same of what it reserved
    settings: TrialSettings  # as the trial ran
    seconds: tuple[float, float]
    allocated: tuple[float, float]
    reserved: tuple[float, float]

    @property
    def judged_in_words(self) -> str:
        if self.timed:
            return "yes" if self.as_allocated else "time"
        return "memory" if self.as_allocated else "no"

    def counts(self, figure: str) -> bool:
        """Whether this figure is judged."""
        return {"seconds": self.timed, "allocated": self.as_allocated, "reserved": self.as_reserved}[figure]

    def error(self, figure: str) -> float:
        """Predicted over measured, less one."""
        measured, predicted = getattr(self, figure)
        return float(predicted / measured - 1)


def of_today(settings: TrialSettings, started_at: str) -> bool:
    """Whether the engine of today allocates what that of a record did."""
    # With gradients in host memory the buffers of updates were in the fullest moment; of no other record.
    return started_at >= (FEWER_BUFFERS_UNTIL if settings.gradient_offload else TODAY)


def gradients_in_place(settings: TrialSettings, started_at: str) -> bool:
    """Whether gradients took the place of freed activations in a record, as the memory model counts them. Else what its
    rank reserved, that shared its parameters or had moments on the host, is listed and not judged."""
    return started_at >= GRADIENTS_BESIDE_UNTIL or keeps_whole(settings)


def allocates_as_today(settings: TrialSettings, started_at: str) -> bool:
    """Whether a record is of today's engine, but for what `held_then` adds. Else its memory is listed, not judged."""
    first, end = HELD_IN_FORWARD
    in_forward = first <= started_at < end and late_fraction(settings, settings.optimizer_offload) > 0
    return of_today(settings, started_at) and not in_forward


def held_then(settings: TrialSettings, started_at: str) -> float:
    """How many bytes fuller a record's fullest moment was: FSDP2 held each gradient twice, that of a layer or of
    embedding and LM head, though its rank was alone; the last two tensors that layers computed again sent to the host
    had not left; groups of layers kept attention's results that backward had passed, and tiles of the MLP a gradient.
    """
    shape, lora, checkpoint = settings.model, settings.lora, settings.checkpoint
    again = checkpoint.layers_again(shape.layers)
    alone = settings.world_size == 1 and not keeps_whole(settings)
    copies = started_at < COPIED_ALONE_UNTIL and alone
    left_late = started_at < LEFT_LATE_UNTIL and 0 < again < shape.layers and checkpoint.offload != "none"
    in_groups = started_at < KEPT_IN_GROUPS_UNTIL and checkpoint.every > 1 and checkpoint.offload != "all"
    in_tiles = started_at < RUN_KEPT_UNTIL and settings.mlp_tiles > 1 and settings.plain_mlp
    if not (copies or left_late or in_groups or in_tiles):
        return 0.0
    model = MemoryModel(settings)
    wide = max(4, BYTES_OF[settings.dtype])
    of_layer = wide * (shape.largest_layer if lora is None else adapter_parameters(shape, lora))
    of_table = wide * shape.vocab * shape.hidden if lora is None else 0
    of_attention = checkpoint.tail * model.attention_result
    of_run = model.hidden_state * min(1.0, shape.ffn / shape.hidden) / settings.mlp_tiles
    leaving = model.hidden_state + (model.hidden_state if checkpoint.offload == "inputs" else of_attention)

    def held(moment: str) -> float:
        before = moment in ("LM head", "backward of the last layer") or moment.endswith(" kept whole")
        found = leaving if left_late and before else 0.0
        if in_groups and moment == "backward of the first layer":
            found += (min(checkpoint.every, again) - 1) * of_attention
        if moment in ("LM head", "backward of the embedding"):
            return found + of_table * copies
        if moment.startswith("backward"):
            found += of_layer * copies + of_run * in_tiles
        return found

    moments = model.by_moment(memory_settings_of(settings))
    return max(nbytes + held(moment) for moment, nbytes in moments.items()) - max(moments.values())


def compared_records() -> list[RecordPrediction]:
    """All training records of the engine's own methods on GPUs that gave figures, in order of their runs. Raises
    UsageError for a record that cannot be used."""
    found = []
    for run, record in published_records():
        settings, measured = record.settings, record.measurement
        today = of_today(settings, record.started_at)
        slower = settings.lora is not None and record.started_at < ADAPTERS_COPIED_UNTIL
        late = late_fraction(settings, settings.optimizer_offload) > 0
        slower |= late and record.started_at < FEWER_BUFFERS_UNTIL
        if settings.task != "train" or record.status != "ok" or not is_native(method_named(settings.method)):
            continue
        hardware = hardware_for(record.gpu)
        if measured is None or hardware is None or not measured.peak_reserved_bytes:
            continue
        settings = settings_that_ran(record, hardware)
        expected = predict(settings, hardware)
        if expected.seconds is None or expected.gpu_gib is None or expected.reserved_gib is None:
            continue
        more = held_then(settings, record.started_at) / GIB
        as_allocated = allocates_as_today(settings, record.started_at)
        found.append(
            RecordPrediction(
                record=f"{run.report_dir.relative_to(PUBLISHED)}/{record.trial_id}",
                judged=today,
                timed=today and not (slower or run.stated().reason(record.trial_id, "conditions")),
                as_allocated=as_allocated,
                as_reserved=as_allocated and gradients_in_place(settings, record.started_at),
                settings=settings,
                seconds=(statistics.median(measured.step_seconds), expected.seconds),
                allocated=(max(measured.peak_allocated_bytes) / GIB, expected.gpu_gib + more),
                reserved=(max(measured.peak_reserved_bytes) / GIB, expected.reserved_gib + more),
            )
        )
    return found


def published_records() -> list[tuple[StoredRun, Record]]:
    """All records of GPUs in results/published. Raises UsageError for one that cannot be used."""
    found: list[tuple[StoredRun, Record]] = []
    for run in map(stored_run, runs_below(PUBLISHED)):
        if run.path.parent.name.startswith("h"):

            def use(_: StoredRecord, record: Record, run: StoredRun = run) -> None:
                found.append((run, record))

            refuse_bad(read_all(run.records(), use))
    return found


def settings_that_ran(record: Record, hardware: Hardware) -> TrialSettings:
    """The settings of a record as its trial ran: with the kernel and the CUDA graph that `auto` became."""
    settings, chosen = record.settings, record.measurement.chosen if record.measurement else {}
    # A record that does not tell is from before there were graphs.
    settings = replace(settings, cuda_graph=cast(CudaGraph, chosen.get("cuda_graph", "none")))
    if settings.kernel == "auto" and (kernel := chosen.get("kernel", "")) in hardware.kernel_ceilings:
        settings = replace(settings, kernel=cast(Kernel, kernel))
    return settings


def table_rows() -> list[list[str]]:
    """The table with its header; judged records first, in each part the worst time last."""
    rows = sorted(
        compared_records(), key=lambda row: (not row.judged, not row.timed, abs(row.error("seconds")), row.record)
    )
    return [HEADER, *map(_cells, rows)]


def _cells(row: RecordPrediction) -> list[str]:
    of = row.settings
    cells = [row.record, row.judged_in_words, of.method, of.model.name, str(of.seq_len), str(of.cp_size), of.kernel]
    for figure in WITHIN:
        cells += [*(f"{value:.4g}" for value in getattr(row, figure)), f"{100 * row.error(figure):+.1f}"]
    return cells


def median_error(rows: list[RecordPrediction], figure: str) -> float:
    return statistics.median(abs(row.error(figure)) for row in rows)


def summary() -> str:
    """Markdown for docs/plan.md: errors of each figure, of the records that are judged, by GPUs, and of the others."""
    rows = compared_records()
    lines = []
    of_figure: dict[str, str] = {"seconds": "time", "allocated": "memory allocated", "reserved": "memory reserved"}
    day = TODAY.replace("T", " ") + " UTC"
    parts: dict[str, Callable[[RecordPrediction], bool]] = {
        f"since {day}, one GPU": lambda row: row.judged and row.settings.cp_size == 1,
        f"since {day}, several GPUs": lambda row: row.judged and row.settings.cp_size > 1,
        "earlier, of older code": lambda row: not row.judged,
    }
    for label, belongs in parts.items():
        chosen = [row for row in rows if belongs(row)]
        for figure, name in of_figure.items():
            of = [row for row in chosen if row.counts(figure) or not row.judged]
            if not of:
                continue
            median, largest = median_error(of, figure), max(abs(row.error(figure)) for row in of)
            lines.append([label, str(len(of)), name, f"{100 * median:.1f}%", f"{100 * largest:.1f}%"])
    return markdown_table(["training records", "count", "figure", "median error", "largest error"], lines)


def main() -> None:
    write_table(TABLE_FILE, table_rows())
    write_block(BLOCK, summary())


if __name__ == "__main__":
    main()
