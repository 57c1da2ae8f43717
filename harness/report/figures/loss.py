"""Whether trials that compute the same function show the same loss: a sentence where they do, with the curves of long
runs, else the differences: of means, where numbers are so narrow that single losses scatter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from statistics import mean

from harness.report.drawing.charts import LineAxes, PlottedValue, SeriesLine, paint_lines
from harness.report.drawing.looks import looks_of
from harness.report.drawing.points import IN_CSV, about, samples_note, span_of
from harness.report.drawing.sheet import Sheet
from harness.report.results import Row
from harness.report.tables.agreement import LIMIT, LossDifferences, agreements, own_weights_sentence
from harness.report.variants import footnotes_of, panel_name, panel_of, series_of

CURVE_STEPS = 10  # of a single trial, from which on its loss is worth a figure
LONG = 100  # measured steps, from which on curves are drawn, whether they lie on each other or not
COINCIDE = 0.01  # relative difference below which curves lie on each other
WINDOWS = 10  # of the steps of such a run, that means are taken of
MAX_CURVES = 8
_FLOOR = 1e-9  # drawn for differences of exactly zero, which a logarithm cannot show


class LossAgreement:
    def place(self, rows: Sequence[Row]) -> int:
        return 50

    def draw(self, rows: Sequence[Row]) -> Sheet | str | None:
        if rows[0]["task"] != "train":
            return None
        found = agreements(rows)
        compared = [pair for pair in found if not pair.is_reference]
        if compared:
            long = [pair.row for pair in found if pair.row["steps.measured"] >= LONG]
            coincide = all(pair.agrees or (pair.agrees is None and pair.loss < COINCIDE) for pair in compared)
            if long and coincide:
                return _curves(rows, long, _coincide(compared))
            if long and all(pair.agrees is None for pair in compared):
                return _means_apart(rows, compared)
            return _coincide(compared) if coincide else _differences(rows, compared)
        long = [pair.row for pair in found if len(pair.row["loss_by_step"]) >= CURVE_STEPS]
        return _curves(rows, long) if long else None


def _coincide(compared: Sequence[LossDifferences]) -> str:
    """One sentence for curves that lie on each other."""
    worst = max(max(pair.loss, (pair.grad_norm or 0.0) if pair.agrees else 0.0) for pair in compared)
    trials = len({id(row) for pair in compared for row in (pair.row, pair.reference)})
    of = "losses and gradient norms" if all(pair.agrees for pair in compared) else "losses"
    types = " and ".join(sorted({pair.row["dtype"] for pair in compared}))
    apart = f"differ by at most {worst:.1e} relative" if worst else "do not differ"
    lengths = span_of(pair.row["seq_len"] for pair in compared)
    return f"The loss curves of {trials} trials coincide: {of} {apart} ({types}, {lengths})."


def _means_apart(rows: Sequence[Row], compared: Sequence[LossDifferences]) -> Sheet:
    """How far mean losses lie from those of their reference: single losses of narrow numbers scatter by more than the
    runs lie apart."""
    names, steps = _names(rows), min(len(pair.loss_by_step) for pair in compared) // WINDOWS
    references = {id(pair.reference): pair.reference for pair in compared}.values()
    curves = [(pair.row, _percent_above(pair, steps)) for pair in compared]
    row, furthest = max(((row, max(curve, key=abs)) for row, curve in curves), key=lambda one: abs(one[1]))
    reference = next(pair.reference for pair in compared if pair.row is row)
    apart = f"{abs(furthest):.1f}% {'above' if furthest > 0 else 'below'} that of {names[id(reference)]}"
    levels, single = reference["loss_by_step"], max(pair.loss for pair in compared)
    note = (
        f"Each point is the mean of the {steps} steps that end there. {names[id(reference)]}: from {levels[0]:.2f} to "
        f"a mean of {mean(levels[-steps:]):.2f}. Single losses differ by up to {single:.1%}."
    )
    lines = [(reference, [0.0] * len(curves[0][1])) for reference in references] + curves
    axes = LineAxes(unit="mean loss, % apart", steps=True)
    return _sheet(rows, f"The loss of {names[id(row)]} lies up to {apart}", note, lines, axes, first=steps)


def _percent_above(pair: LossDifferences, steps: int) -> list[float]:
    """How far the mean of this many losses lies above the reference's, up to each step that has as many before it."""
    own, other = (list(accumulate(row["loss_by_step"], initial=0.0)) for row in (pair.row, pair.reference))
    ends = range(steps, len(pair.loss_by_step) + 1)
    means = [(own[end] - own[end - steps], max(_FLOOR, other[end] - other[end - steps])) for end in ends]
    return [100 * (value / expected - 1) for value, expected in means]


def _differences(rows: Sequence[Row], compared: Sequence[LossDifferences]) -> Sheet:
    curves = [(pair.row, _apart(pair)) for pair in compared]
    curves.sort(key=lambda curve: -max(curve[1]))
    failed = sum(pair.agrees is False for pair in compared)
    told = f"{failed} of {len(compared)} trials differ by more than {LIMIT:.0e}" if failed else "losses differ"
    worst, values = curves[0]
    note = (
        "Larger of the two relative differences (loss, gradient norm) to the trial of usual settings, same model, "
        f"length, dtype, data and seed; exact equality is drawn at {_FLOOR:.0e}."
    )
    title = f"Loss: {told}, {_names(rows)[id(worst)]} by {max(values):.1e} relative"
    judged = any(pair.agrees is not None for pair in compared)
    axes = LineAxes(unit="relative difference", steps=True, least=_FLOOR / 2, limit=LIMIT if judged else None)
    return _sheet(rows, title, note, curves, axes)


def _curves(rows: Sequence[Row], long: Sequence[Row], compared: str = "") -> Sheet:
    """The losses themselves; `compared` says how they differ, where there is something to compare."""
    first = long[0]["loss_by_step"]
    title = f"Loss: from {first[0]:.2f} to {first[-1]:.2f} in {len(first)} steps"
    note = f"{compared} Loss = mean over all target tokens of the whole batch.".strip()
    curves = [(row, list(row["loss_by_step"])) for row in long]
    return _sheet(rows, title, note, curves, LineAxes(unit="loss", steps=True))


def _sheet(
    rows: Sequence[Row],
    title: str,
    note: str,
    curves: Sequence[tuple[Row, list[float]]],
    axes: LineAxes,
    first: int = 1,
) -> Sheet:
    """The curves over all steps from the `first` on, each by the name of its trial."""
    kept, names = curves[:MAX_CURVES], _names(rows)
    notes = [note, own_weights_sentence(rows), f"{samples_note(rows)} All steps are drawn, warm-up included."]
    notes += [f"{MAX_CURVES} of {len(curves)} trials are drawn; {IN_CSV}."] if len(curves) > len(kept) else []
    looks = looks_of([(names[id(row)], [row]) for row, _ in kept])
    lines = [
        SeriesLine(
            name=names[id(row)],
            look=looks[names[id(row)]],
            spots=[PlottedValue(at=step, value=value) for step, value in enumerate(values, start=first)],
            tip=f"{names[id(row)]}: {values[0]:.4g} to {values[-1]:.4g}",
        )
        for row, values in kept
    ]
    return Sheet(
        title=title, about=about(rows), notes=list(filter(None, notes)), footnotes=footnotes_of(rows),
        plot=partial(paint_lines, lines=lines, axes=axes, ceiling={}),
    )  # fmt: skip


def _names(rows: Sequence[Row]) -> dict[int, str]:
    """Names of trials by `id`: their series, with size and length where there are several."""
    sizes, lengths = len({panel_of(row) for row in rows}) > 1, len({row["seq_len"] for row in rows}) > 1
    names = {}
    for series, members in series_of(rows):
        for row in members:
            parts = [series, panel_name(panel_of(row)) if sizes else "", span_of([row["seq_len"]]) if lengths else ""]
            names[id(row)] = ", ".join(filter(None, parts))
    return names


def _apart(pair: LossDifferences) -> list[float]:
    norms = pair.grad_norm_by_step or [0.0] * len(pair.loss_by_step)
    return [max(_FLOOR, loss, norm) for loss, norm in zip(pair.loss_by_step, norms, strict=False)]


FIGURES = {"loss": LossAgreement()}
