"""`burst reproduce audit`: TFLOP/s and MFU of others, recomputed from the speed or time beside them by one formula.

Three tables: every figure of the sheets, what systems publish of themselves, and what they printed in trials of ours.

The formula is this project's (`harness.metrics.flops`): exact causal pairs, recomputation not counted; attention alone
in the kernel convention, 3.5 times its forward. Only causal attention is in these sheets, but for the tables of the
BurstAttention library.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from cluster.files.reader import build, read_yaml
from engine.settings import TrialSettings
from engine.shape import ModelShape
from harness.base.lengths import format_length
from harness.metrics.flops import work_of
from harness.metrics.hardware import hardware_named
from harness.predict.published import SPEED, Published, published_rows
from harness.records.record import RecordPlace
from harness.report.results import Row, grouped
from harness.report.tables.table import Column, Table, significant
from harness.reproduce.computed import settings_of, shape
from harness.reproduce.points import gpu_text, model_text
from harness.spec.references import PAPER_DIR

SYSTEMS_FILE = "systems.yaml"
TIME, FORWARD_TIME = "forward_backward_ms", "forward_ms"
UTILISATION = ("mfu", "mfu_as_plotted")  # over the peak of the A800
RATES = ("tflops_per_gpu", "tflops_per_gpu_forward")  # no backward time is published alone
_PRINTED = "extra_upstream.printed."  # beginning of the columns of what a system prints, under its own names
_APART = 0.05  # of the recomputed figure: marked beyond it
NOT_CAUSAL = "burstattention"  # beginning of the experiments whose attention has no mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputed:
    """A published figure beside the one that follows from the same source's speed or time."""

    source: str  # the experiment of the sheets, or the system
    method: str
    model: str
    seq_len: int
    gpus: int | None
    metric: str
    published: float
    recomputed: float
    from_: str  # what it was recomputed from
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.published / self.recomputed


def recomputed_rows(rows: Sequence[Published] | None = None) -> list[Recomputed]:
    """Every published TFLOP/s and MFU with a speed or a time of the same trial in the same figure."""
    groups = grouped(published_rows() if rows is None else rows, lambda row: row.trial)
    return [one for group in groups.values() for one in _of_trial(group)]


def _of_trial(group: Sequence[Published]) -> list[Recomputed]:
    """The figures of one published trial. Where a trial was published several times, its rows follow one another."""
    given = grouped((row for row in group if row.value is not None), lambda row: row.metric)
    found = []
    for metric in (*UTILISATION, *RATES):
        for place, row in enumerate(given.get(metric, ())):
            base = SPEED if SPEED in given else FORWARD_TIME if metric == "tflops_per_gpu_forward" else TIME
            candidates = given.get(base, [])
            if not candidates:
                continue
            if len(candidates) != len(given[metric]) and len({one.text for one in candidates}) > 1:
                continue  # which of several speeds a figure belongs to cannot be told
            found.append(_recomputed(row, candidates[place if len(candidates) > place else 0]))
    return found


def _recomputed(row: Published, base: Published) -> Recomputed:
    assert row.seq_len is not None, row
    if base.metric == SPEED:
        value = _training_tflops(row.model, row.seq_len, base.number)
        if row.metric in UTILISATION:
            value /= hardware_named("a800").peak_bf16_tflops
    else:
        work = work_of(_attention_of(row))
        flops = work.forward if base.metric == FORWARD_TIME else work.kernel
        value = flops / (base.number / 1e3) / (row.gpus or 1) / 1e12
    return Recomputed(
        source=row.experiment, method=row.method, model=row.model, seq_len=row.seq_len, gpus=row.gpus,
        metric=row.metric, published=row.number, recomputed=value, from_=f"{base.text} {base.unit}", note=row.note,
    )  # fmt: skip


def _training_tflops(model: str, seq_len: int, tokens_per_gpu_per_second: float) -> float:
    """TFLOP/s per GPU of training at that speed."""
    return work_of(settings_of(shape(model), seq_len)).model / seq_len * tokens_per_gpu_per_second / 1e12


def _attention_of(row: Published) -> TrialSettings:
    """One call of attention with the published heads."""
    assert row.seq_len is not None, row
    heads, dim = (int(part) for part in model_text(row.model).replace(" heads", "").split(" × "))
    batch = int(row.model.split("_b")[1].split("_")[0]) if "_b" in row.model else 1
    model = ModelShape(  # attention alone: the rest of the shape is never counted
        name=row.model, hidden=heads * dim, heads=heads, kv_heads=heads, head_dim=dim, layers=1, ffn=2, vocab=2
    )
    mask = "full" if row.experiment.startswith(NOT_CAUSAL) else "causal"
    return TrialSettings(
        task="attention", method="burst", model=model, seq_len=row.seq_len, batch_size=batch, mask=mask
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedSpeed:
    """What the authors or users of a system published of it. Without a speed or a time nothing can be recomputed."""

    system: str  # its name
    where: str
    model: str
    seq_len: int
    gpus: int
    hardware: str
    tokens_per_gpu_per_second: float | None = None
    step_seconds: float | None = None
    mfu: float | None = None
    tflops_per_gpu: float | None = None
    note: str = ""


@cache
def published_systems() -> tuple[PublishedSpeed, ...]:
    """Every entry of systems.yaml. Raises UsageError with file and line."""
    root = read_yaml(PAPER_DIR / SYSTEMS_FILE, "published figures of systems").mapping("the file")
    return tuple(build(PublishedSpeed, node, "systems") for node in root["systems"].items())


def recomputed_systems() -> list[tuple[PublishedSpeed, float | None, float | None]]:
    """Each system with TFLOP/s per GPU and MFU by our formula; None where it published neither speed nor time."""
    found: list[tuple[PublishedSpeed, float | None, float | None]] = []
    for system in published_systems():
        speed = system.tokens_per_gpu_per_second
        if speed is None and system.step_seconds is not None:
            speed = system.seq_len / system.step_seconds / system.gpus
        if speed is None:
            found.append((system, None, None))
            continue
        rate = _training_tflops(system.model, system.seq_len, speed)
        found.append((system, rate, rate / hardware_named(system.hardware).peak_bf16_tflops))
    return found


def all_tables(rows: Sequence[tuple[Row, RecordPlace]]) -> list[Table]:
    """Of the sheets, of what systems publish, and of what they printed in these rows of ours."""
    return [audit_table(recomputed_rows()), systems_table(), printed_table(printed_by_systems(rows))]


def slips(found: Iterable[Recomputed]) -> list[float]:
    """Ratios of what was published from tokens per second, in the figures that were plotted or tabulated."""
    return [
        one.ratio for one in found if one.from_.endswith("tokens/s/GPU") and one.metric in ("mfu", "tflops_per_gpu")
    ]


def audit_table(found: Sequence[Recomputed]) -> Table:
    """A line for each published figure; those that differ by more than a twentieth are marked."""
    number, ratio = significant(4), significant(4)
    rows = tuple(
        (
            one.source, one.method, one.model, format_length(one.seq_len), one.gpus, one.metric, one.published,
            one.recomputed, one.ratio, one.from_, one.note or None,
        )
        for one in found
    )  # fmt: skip
    middle = statistics.median(one.ratio for one in found) if found else 0.0
    return Table(
        name="audit",
        title="Published TFLOP/s and MFU, recomputed with one formula",
        columns=(
            Column(header="source"), Column(header="method"), Column(header="model"), Column(header="tokens"),
            Column(header="GPUs", numeric=True), Column(header="metric"),
            Column(header="published", form=number, numeric=True),
            Column(header="recomputed", form=number, numeric=True),
            Column(header="published ÷ recomputed", form=ratio, numeric=True), Column(header="from"),
            Column(header="note"),
        ),
        rows=rows,
        note=f"Recomputed from the speed or the time that the same source gives for the same trial: exact causal pairs "
        f"(all pairs for the tables of the BurstAttention library), recomputation not counted; MFU over 312 TFLOP/s. "
        f"The median ratio of {len(found)} figures is {middle:.4f}. Marked: more than 5% apart.",
        marked=frozenset(place for place, one in enumerate(found) if abs(one.ratio - 1) > _APART),
    )  # fmt: skip


def systems_table() -> Table:
    """What systems publish of themselves, beside our formula."""
    number, percent = significant(4), significant(3, 100)
    rows = tuple(
        (
            one.system, one.model, format_length(one.seq_len), f"{one.gpus} × {one.hardware}",
            one.tokens_per_gpu_per_second, one.step_seconds, one.tflops_per_gpu, rate, one.mfu, utilisation,
            one.mfu / utilisation if one.mfu and utilisation
            else one.tflops_per_gpu / rate if one.tflops_per_gpu and rate else None,
            one.where, one.note or None,
        )
        for one, rate, utilisation in recomputed_systems()
    )  # fmt: skip
    return Table(
        name="systems",
        title="What systems publish of themselves, beside one formula",
        columns=(
            Column(header="system"), Column(header="model"), Column(header="tokens"), Column(header="on"),
            Column(header="tok/s/GPU", form=number, numeric=True), Column(header="step s", form=number, numeric=True),
            Column(header="TFLOP/s, published", form=number, numeric=True),
            Column(header="TFLOP/s, recomputed", form=number, numeric=True),
            Column(header="MFU %, published", form=percent, numeric=True),
            Column(header="MFU %, recomputed", form=percent, numeric=True),
            Column(header="published ÷ recomputed", form=number, numeric=True), Column(header="where"),
            Column(header="note"),
        ),
        rows=rows,
        note="Nothing is recomputed where neither a speed nor a time is published.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedTrial:
    """TFLOP/s per GPU and MFU of one trial: as the system printed them, and by our formula from the trial's time."""

    system: str
    row: Row
    record: RecordPlace
    tflops: float | None
    mfu: float | None  # as a fraction

    @property
    def ratio(self) -> float:
        """Printed over recomputed, by TFLOP/s where those were printed."""
        if self.tflops is not None:
            return float(self.tflops / self.row["tflops_per_gpu"])
        assert self.mfu is not None, "one of the two was printed"
        return float(self.mfu / self.row["mfu"])


def printed_by_systems(rows: Sequence[tuple[Row, RecordPlace]]) -> list[PrintedTrial]:
    """Every trial whose system printed TFLOP/s or MFU, by system, length and record."""
    found = []
    for row, record in rows:
        own = {name.removeprefix(_PRINTED).casefold(): row[name] for name in row if name.startswith(_PRINTED)}
        rates = [value for name, value in own.items() if "tflop" in name and value]
        shares = [value / 100 for name, value in own.items() if name == "mfu" and value]
        if (rates and row["tflops_per_gpu"]) or (shares and row["mfu"]):
            release = row.get("extra_upstream.release")
            system = f"{row['system']} ({release})" if release else str(row["system"])
            found.append(
                PrintedTrial(
                    system=system, row=row, record=record, tflops=rates[0] if rates else None,
                    mfu=shares[0] if shares else None,
                )
            )  # fmt: skip
    return sorted(found, key=lambda one: (one.system.casefold(), one.row["seq_len"], one.record))


def printed_table(found: Sequence[PrintedTrial]) -> Table:
    """A line for each trial; those that differ by more than a twentieth are marked."""
    number, percent = significant(4), significant(3, 100)
    middle = f" The median ratio is {statistics.median(one.ratio for one in found):.4f}." if found else ""
    return Table(
        name="printed",
        title="What systems printed of themselves in our records, beside one formula",
        columns=(
            Column(header="system"), Column(header="model"), Column(header="tokens"), Column(header="on"),
            Column(header="TFLOP/s, printed", form=number, numeric=True),
            Column(header="TFLOP/s, recomputed", form=number, numeric=True),
            Column(header="MFU %, printed", form=percent, numeric=True),
            Column(header="MFU %, recomputed", form=percent, numeric=True),
            Column(header="printed ÷ recomputed", form=number, numeric=True), Column(header="run"),
        ),
        rows=tuple(
            (
                one.system, one.row["model"], format_length(one.row["seq_len"]),
                f"{one.row['world_size']} × {gpu_text(str(one.row['gpu']))}", one.tflops, one.row["tflops_per_gpu"],
                one.mfu, one.row["mfu"], one.ratio, one.row["run"],
            )
            for one in found
        ),
        note="Printed by the program after its last step; recomputed from the median step of the trial: exact causal "
        f"pairs, recomputation not counted. Marked: more than 5% apart.{middle}",
        marked=frozenset(place for place, one in enumerate(found) if abs(one.ratio - 1) > _APART),
    )  # fmt: skip
