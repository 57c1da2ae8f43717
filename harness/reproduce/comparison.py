"""A figure's published numbers beside measured, computed and predicted ones, and the verdict that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cluster.files.errors import counted
from harness.base.lengths import format_length
from harness.predict.published import ARTIFACT
from harness.report.results import grouped
from harness.report.tables.table import Column, Table, significant, without_empty_columns
from harness.reproduce.computed import computed_entries, digits_of
from harness.reproduce.figures import METRICS, PaperFigure
from harness.reproduce.points import (
    ORIGINS,
    FigurePoint,
    MeasuredRun,
    gpu_text,
    is_smoke,
    measured_entries,
    published_entries,
    rows_for,
    same_hardware,
)

Verdict = Literal["reproduced", "partly", "not", "not comparable", "not run"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "partly", "not", "not comparable", "not run")

WITHIN = 0.10  # of the published value: what counts as reproduced, as a single sample is published without a spread


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureComparison:
    """A figure with all its numbers. `predicted` may be empty: no predictor was asked, or it has nothing to say."""

    figure: PaperFigure
    published: Sequence[FigurePoint]
    computed: Sequence[FigurePoint]
    measured: Sequence[FigurePoint]
    predicted: Sequence[FigurePoint]
    smoke: int = 0  # trials that only show that everything runs: no points

    @property
    def entries(self) -> list[FigurePoint]:
        return [*self.published, *self.computed, *self.measured, *self.predicted]

    def comparable(self) -> list[tuple[FigurePoint, FigurePoint]]:
        """Published and measured points of one series, set-up and GPU."""
        return [(theirs, ours) for theirs, ours in self.same_setup() if same_hardware(theirs.hardware, ours.hardware)]

    def same_setup(self) -> list[tuple[FigurePoint, FigurePoint]]:
        """Published and measured points of one series and set-up, whatever the GPU."""
        return [
            (theirs, ours) for theirs in self.published for ours in self.measured
            if (theirs.series, theirs.setup) == (ours.series, ours.setup)
        ]  # fmt: skip


def beside(figure: PaperFigure, runs: Sequence[MeasuredRun], predicted: Sequence[FigurePoint] = ()) -> FigureComparison:
    """The numbers of a figure that there are; `predicted` comes from a predictor."""
    rows = list(rows_for(figure, runs))
    points = [one for one in rows if not is_smoke(one[0])]
    return FigureComparison(
        figure=figure,
        published=published_entries(figure),
        computed=computed_entries(figure),
        measured=measured_entries(figure, points),
        predicted=predicted,
        smoke=len(rows) - len(points),
    )


def verdict(found: FigureComparison) -> tuple[Verdict, str]:
    """What can be said of a figure, and one sentence why."""
    if digits := digits_of(found.figure):
        same = sum(one.same for one in digits)
        total = len(digits)
        if same == total:
            return "reproduced", f"computed: all {total} published numbers, to their last digit"
        return "partly", f"computed: {same} of {total} published numbers to their last digit"
    numbers = [
        (abs(ours.values[metric] / theirs.values[metric] - 1), metric)
        for theirs, ours in found.comparable()
        for metric in theirs.values.keys() & ours.values.keys()
    ]
    points = sum(len(entry.values) for entry in found.published)
    if numbers:
        good = sum(apart <= WITHIN for apart, _ in numbers)
        worst = max(apart for apart, _ in numbers)
        said = f"{good} of {len(numbers)} measured within {WITHIN:.0%} of the published, the worst {worst:.0%} away"
        if good == len(numbers) >= points:
            return "reproduced", said
        return ("partly" if good else "not"), f"{said}; {points} are published"
    if ours := [entry for entry in found.measured if entry.values]:
        places = "; ".join(sorted({_place(entry) for entry in ours})[:2])
        return "not comparable", f"measured on another set-up: {places}"
    if found.smoke:
        return "not run", f"{counted(found.smoke, 'trial')} at scale smoke, which stand beside no published number"
    return "not run", "no record of ours yet"


def _place(entry: FigurePoint) -> str:
    return f"{entry.model} on {entry.gpus} × {gpu_text(entry.hardware)}"


def list_table(found: Sequence[tuple[FigureComparison, str]], predictor: str) -> Table:
    """All figures: published, measured and predicted points, and the verdict. Each comes with the words on what is
    predicted; `predictor` says what that is and where."""
    rows = []
    for one, predicted in found:
        said, why = verdict(one)
        best = [entry for entry in one.measured if entry.values]
        rows.append(
            (
                one.figure.name,
                sum(len(entry.values) or 1 for entry in one.published),
                len(one.computed) or None,
                len(best) or None,
                ", ".join(sorted({gpu_text(entry.hardware) for entry in best})) or None,
                predicted or None,
                said,
                why,
            )
        )
    return Table(
        name="figures",
        title="Figures and tables of the paper",
        columns=(
            Column(header="figure"), Column(header="published", numeric=True),
            Column(header="computed", numeric=True), Column(header="measured", numeric=True),
            Column(header="on"), Column(header="predicted"), Column(header="verdict"), Column(header="why"),
        ),
        rows=tuple(rows),
        note=(
            f"published: numbers, and points out of memory, of the artifact's sheets ({ARTIFACT}); the "
            "figures of the paper itself were not read. measured: trials of ours that answer the question. "
            f"reproduced: the same set-up and GPU, every number within {WITHIN:.0%}; not comparable: measured on "
            f"another set-up; not: outside; not run: no record yet. {predictor}"
        ),
    )  # fmt: skip


def points_table(found: FigureComparison) -> Table:
    """Every point of a figure: published, measured on the same set-up and on others, computed, predicted."""
    rows: list[tuple[Any, ...]] = []
    along = "tokens" if found.figure.along == "seq_len" else "batch"
    lines = grouped(found.entries, lambda one: (one.model, one.gpus or 0, one.cp_size or 0, one.at, one.series))
    for key, group in lines.items():
        for metric in found.figure.shows:
            rows += _lines(key, group, metric, along)
    columns = (
        Column(header="series"), Column(header="model"), Column(header="GPUs", numeric=True),
        Column(header="CP", numeric=True),
        Column(header=along, numeric=True), Column(header="metric"), _number("published"), Column(header="by"),
        _number("computed"), _number("measured"), Column(header="settings"), Column(header="on"),
        _number("measured ÷ published"), _number("predicted"), Column(header="for"),
        Column(header="note"),
    )  # fmt: skip
    return without_empty_columns(
        Table(
            name=f"reproduction_{found.figure.name}",
            title=f"{found.figure.title}: published beside ours",
            columns=columns,
            rows=tuple(rows),
            note="A ratio stands only where model, GPUs, length and the kind of GPU are the same. " + found.figure.note,
        )
    )


def _lines(key: tuple[Any, ...], group: Sequence[FigurePoint], metric: str, along: str) -> list[tuple[Any, ...]]:
    """One line, or one for each measured trial, of a series at one set-up."""
    model, gpus, cp_size, at, series = key
    of = {
        origin: [one for one in group if one.origin == origin and (metric in one.values or one.status != "ok")]
        for origin in ORIGINS
    }
    if not any(of.values()):
        return []
    theirs = of["published"][0] if of["published"] else None
    computed = of["computed"][0] if of["computed"] else None
    lines = []
    ours_or_none: list[FigurePoint | None] = [*of["measured"]] or [None]
    for ours in ours_or_none:
        settings = ours.settings if ours else ""
        guesses = [one for one in of["predicted"] if not settings or one.settings == settings] or of["predicted"]
        guess = guesses[0] if guesses else None
        ratio = None
        both = theirs and ours and metric in theirs.values and metric in ours.values
        if theirs and ours and both and same_hardware(theirs.hardware, ours.hardware):
            ratio = ours.values[metric] / theirs.values[metric]
        notes = [one.note for one in (theirs, ours) if one and one.note]
        lines.append(
            (
                series, model, gpus or None, cp_size or None, format_length(at) if along == "tokens" else at,
                METRICS[metric].unit, _value(theirs, metric), theirs.hardware if theirs else None,
                _value(computed, metric), _value(ours, metric), settings or None, ours.hardware if ours else None,
                ratio, _value(guess, metric), guess.hardware if guess else None, "; ".join(notes) or None,
            )
        )  # fmt: skip
    return lines


def _value(entry: FigurePoint | None, metric: str) -> float | str | None:
    """The number, else the status that stands for it."""
    if entry is None:
        return None
    return entry.values.get(metric, entry.status if entry.status != "ok" else None)


def _number(header: str) -> Column:
    return Column(header=header, form=significant(4), numeric=True)
