"""Our records that answer a figure's question: in results/published, and what `burst run` left in results/runs.

Records whose commit is lost, as their provenance.yaml states, are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.records.record import BadRecord, RecordPlace
from harness.records.stored import runs_below
from harness.report.results import Row, RunRecords
from harness.report.variants import on_cpu
from harness.reproduce.figures import PaperFigure

SMOKE_WIDTH = 1024  # query heads x head dim: every published model is wider, every one of a scale smoke narrower
PLACES = (Path("results") / "published", Path("results") / "runs")  # below the working directory


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
