"""The numbers of a figure, whoever they are from: published, measured, predicted or computed, each with its hardware.

Entries of one panel and place (sequence length or batch size) answer one question. Only entries of equal hardware,
model and number of GPUs are the same set-up. Measured ones are our records in results/published, and what `burst run`
left in results/runs; records whose commit is lost, as their provenance.yaml states, are passed over.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.attention.problem import ULYSSES_SCHEDULES
from engine.settings import TrialSettings, to_json
from harness.predict.published import Published
from harness.records.record import BadRecord, RecordPlace
from harness.records.stored import runs_below
from harness.report.results import ONE_RANK, Row, RunRecords, flatten, grouped
from harness.report.variants import OWN_METHOD, on_cpu
from harness.reproduce.figures import METRICS, PaperFigure

Origin = Literal["published", "computed", "measured", "predicted"]
ORIGINS: tuple[Origin, ...] = ("published", "computed", "measured", "predicted")
PUBLISHED_ROWS = "published numbers"  # hardware of what needs none
ANALYTIC = "(analytic)"
_KERNEL_MODEL = re.compile(r"attn_(?:b(?P<batch>\d+)_)?h(?P<heads>\d+)_d(?P<dim>\d+)")
SMOKE_WIDTH = 1024  # query heads x head dim: every published model is wider, every one of a scale smoke narrower
PLACES = (Path("results") / "published", Path("results") / "runs")  # of our records, below the working directory


@dataclass(frozen=True, kw_only=True, slots=True)
class FigurePoint:
    """One point of one series. `values` are by metric; without a value `status` says why."""

    origin: Origin
    series: str  # the published method's name, or ours where it stands for none
    method: str  # ours
    settings: str  # equal, as_published or tuned; empty where they are those of a published row
    hardware: str
    model: str
    gpus: int | None
    cp_size: int | None  # ranks that share a sequence, where these are not all GPUs; by tensor parallelism too
    at: int  # sequence length, or batch size
    values: Mapping[str, float] = field(default_factory=dict)
    status: str = "ok"
    note: str = ""
    row: Row | None = None  # of a measured one

    @property
    def setup(self) -> tuple[str, int | None, int | None, int]:
        """What has to be equal for two entries to answer the same question; the hardware is compared besides."""
        return (self.model, self.gpus, self.cp_size, self.at)


def published_entries(figure: PaperFigure) -> list[FigurePoint]:
    """The figure's published points; several numbers of one point (repeats in other files) give their median."""
    return [entry for entry, _ in published_points(figure)]


def published_points(figure: PaperFigure) -> Iterator[tuple[FigurePoint, Published]]:
    """Each published point with the first of its rows."""
    points = grouped(figure.rows(), lambda row: (row.method, row.model, row.gpus, row.seq_len))
    for rows in points.values():
        first = rows[0]
        series = figure.series_of(first.method)
        if series is None or not any(row.metric in figure.shows for row in rows):
            continue
        values = {}
        for metric in figure.shows:
            numbers = [row.value for row in rows if row.metric == metric and row.value is not None]
            if numbers:
                values[metric] = float(statistics.median(numbers))
        entry = FigurePoint(
            origin="published",
            series=series.name,
            method=str(series.settings.get("method", "")),
            settings="",
            hardware=PUBLISHED_ROWS if first.gpu_model == ANALYTIC else first.gpu_model,
            model=model_text(first.model),
            gpus=first.gpus,
            cp_size=series.cp_size if series.cp_size != first.gpus else None,
            at=_batch_of(first.model) if figure.along == "batch_size" else first.seq_len or 0,
            values=values,
            status="ok" if values else "oom",
            note="; ".join(dict.fromkeys(row.note for row in rows if row.note and row.metric in figure.shows)),
        )
        yield entry, first


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run, its rows with the place of each record, and the records that cannot be used."""

    path: Path
    rows: tuple[tuple[Row, RecordPlace], ...]
    bad: tuple[BadRecord, ...]


def runs_in(places: Sequence[Path] = PLACES) -> list[MeasuredRun]:
    """Every run below the places that exist, in their order."""
    return [_run(path) for place in places if place.is_dir() for path in runs_below(place) or [place]]


def rows_for(figure: PaperFigure, runs: Sequence[MeasuredRun]) -> Iterator[tuple[Row, RecordPlace]]:
    """Rows of the experiment that asks the figure's question, and of others that answer it too."""
    names = {figure.name, *figure.also}
    for run in runs:
        for row, record in run.rows:
            if row["experiment"] in names:
                yield row, record


def is_smoke(row: Row) -> bool:
    """Whether a trial only shows that everything runs: on a CPU, or with heads as few and narrow as at scale smoke."""
    return on_cpu(row) or row["model.heads"] * row["model.head_dim"] < SMOKE_WIDTH


def all_rows(runs: Sequence[MeasuredRun]) -> list[tuple[Row, RecordPlace]]:
    """Every row of every run."""
    return [one for run in runs for one in run.rows]


def _run(path: Path) -> MeasuredRun:
    records = RunRecords(path, path.as_posix())  # two runs may have folders of one name
    bad = records.read()
    stated = records.stored.stated()
    rows = tuple(
        (row, records.place(row["trial_id"]))
        for row in records.rows()
        if stated.reason(row["trial_id"], "lost_commit") is None  # nobody can look up what such a record measured
    )
    return MeasuredRun(path=path, rows=rows, bad=tuple(bad))


def measured_entries(figure: PaperFigure, rows: Iterable[tuple[Row, RecordPlace]]) -> list[FigurePoint]:
    """Trials of ours as points of the figure. A trial that no published method stands for is a series by its own
    name. A figure of computed numbers has none: its records measure something else that leads to them."""
    entries = []
    shown = {name: METRICS[name] for name in figure.shows if METRICS[name].column}
    for row, _ in rows if shown else ():
        settings = str(row.get("settings") or "equal")
        values = {
            name: row[metric.column] * metric.scale
            for name, metric in shown.items()
            if row.get(metric.column) is not None
        }
        if not values and row["status"] == "ok":
            continue  # nothing of what the figure shows, such as memory on a CPU
        entries.append(_own("measured", figure, row, settings, str(row["gpu"] or "unknown device"), values))
    return entries


def predicted_entry(
    figure: PaperFigure, settings: TrialSettings, hardware: str, values: Mapping[str, float]
) -> FigurePoint:
    """A trial that was not run, as a point of the figure."""
    row = flatten(to_json(settings)) | {"model": settings.model.name, "status": "ok", "reason": None}
    return _own("predicted", figure, row, settings.settings, hardware, values)


def _own(
    origin: Origin,
    figure: PaperFigure,
    row: Row,
    settings: str,
    hardware: str,
    values: Mapping[str, float],
) -> FigurePoint:
    gpus, cp_size = row["world_size"], row["cp_size"] * row["tp_size"]
    return FigurePoint(
        origin=origin,
        series=series_name(figure, row),
        method=row["method"],
        settings=settings,
        hardware=hardware,
        model=_shape_text(row),
        gpus=gpus,
        cp_size=cp_size if cp_size != gpus else None,
        at=row[figure.along],
        values=values,
        status=row["status"],
        note=row.get("reason") or "",
        row=row if origin == "measured" else None,
    )


def series_name(figure: PaperFigure, row: Row) -> str:
    """The published method that a trial's settings stand for; else the trial's method and the settings that series of
    this figure differ in."""
    for name, settings in figure.series.items():
        if all(_equal(row.get(key), value) for key, value in settings.items() if key not in ("model", "cp_size")) and (
            "cp_size" not in settings or (row["cp_size"] == 1) == (settings["cp_size"] == 1)
        ):
            return name if "schedule" in settings else _as_it_ran(name, row)
    keys = sorted({key for settings in figure.series.values() for key in settings} - {"method", "cp_size", "model"})
    return ", ".join([row["method"], *(f"{key.rsplit('.', 1)[-1]} {row.get(key)}" for key in keys)])


def _as_it_ran(name: str, row: Row) -> str:
    """The name, but for trials of ours that are no evidence for it: `auto` of burst that exchanged heads instead of
    running a ring, and a ring whose way of moving chunks was set by hand in a comparison of such ways."""
    if row["method"] != OWN_METHOD:
        return name
    if row.get("chosen_schedule") in ULYSSES_SCHEDULES and row.get("ran") != ONE_RANK:
        return f"{OWN_METHOD} ({'auto: ' if row['schedule'] == 'auto' else ''}{row['ran']})"
    by_hand = row.get("chosen_schedule") and row["exchange"] != "auto" and row.get("settings", "equal") == "equal"
    return f"{name}, exchange {row['exchange']}" if by_hand else name


def _equal(found: object, wanted: object) -> bool:
    if isinstance(wanted, bool) or isinstance(found, bool):
        return found is wanted
    if isinstance(wanted, str) and wanted.endswith("*"):  # any window, say
        return str(found).startswith(wanted[:-1])
    return bool(found == wanted)


def model_text(published: str) -> str:
    """A published model's name; of attention alone its heads, as for ours."""
    found = _KERNEL_MODEL.fullmatch(published)
    return f"{found['heads']} heads × {found['dim']}" if found else {"8b_llama3": "llama3_8b"}.get(published, published)


def _batch_of(model: str) -> int:
    found = _KERNEL_MODEL.fullmatch(model)
    return int(found["batch"] or 1) if found else 1


def _shape_text(row: Row) -> str:
    if row["task"] == "attention":
        heads, kv_heads = row["model.heads"], row["model.kv_heads"]
        return f"{heads if heads == kv_heads else f'{heads}:{kv_heads}'} heads × {row['model.head_dim']}"
    return str(row["model"])


def same_hardware(one: str, other: str) -> bool:
    """Whether two names mean the same GPU: `A800-80GB` and `NVIDIA A800-SXM4-80GB`."""
    words = [set(gpu_text(name).casefold().split("-")) for name in (one, other)]
    return words[0] <= words[1] or words[1] <= words[0]


def gpu_text(name: str) -> str:
    """A GPU's name without maker and form: `A800-80GB` for `NVIDIA A800 80 GB` and `NVIDIA A800-SXM4-80GB`."""
    words = re.split(r"[\s-]+", re.sub(r"(\d+) GB", r"\1GB", name))
    return "-".join(word for word in words if word not in ("NVIDIA", "SXM", "SXM4", "HBM3", "PCIe", "")) or name
