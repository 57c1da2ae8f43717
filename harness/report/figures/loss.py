"""Whether trials that compute the same function show the same loss: a sentence where they do, with the curves of long
runs, else the differences: of means, where numbers are so narrow that single losses scatter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from statistics import mean

from harness.report.drawing.charts import LineAxes, PlottedValue, SeriesLine, paint_lines
from harness.report.drawing.looks import looks_of
from harness.report.drawing.points import IN_CSV, about, span_of
from harness.report.drawing.sheet import Sheet
from harness.report.results import Row, grouped
from harness.report.tables.agreement import (
    LIMIT,
    LossDifferences,
    agreements,
    function_of,
    own_weights_sentence,
    relative_differences,
    rounds_further,
)
from harness.report.variants import footnotes_of, panel_name, panel_of, series_of, setting_of, varying_settings

CURVE_STEPS = 10  # of a single trial, from which on its loss is worth a figure
LONG = 100  # measured steps, from which on curves are drawn, whether they lie on each other or not
COINCIDE = 0.01  # relative difference below which curves lie on each other
WINDOWS = 10  # in such a run; a mean is over one of them
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
            if all(pair.agrees is None for pair in compared) and (shown := _means_apart(rows, long)):
                return shown
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


def _means_apart(rows: Sequence[Row], long: Sequence[Row]) -> Sheet | None:
    """How far mean losses of long runs lie from those of the run that differs from the others in the fewest settings:
    single losses of narrow numbers scatter by more than the runs lie apart. None where no two runs compare."""
    together = [members for members in grouped(long, function_of).values() if len(members) > 1]
    if not together:
        return None
    steps = min(len(row["loss_by_step"]) for members in together for row in members) // WINDOWS
    references = [_usual(members) for members in together]
    compared = [
        (row, reference, _percent_above(row["loss_by_step"], reference["loss_by_step"], steps))
        for members, reference in zip(together, references, strict=True)
        for row in members
        if row is not reference
    ]
    if not all(percent for *_, percent in compared):
        return None
    compared.sort(key=lambda each: -abs(_furthest(each[2])))
    names, (row, reference, percent) = _names(rows), compared[0]
    apart = f"{abs(_furthest(percent)):.1f}% {'above' if _furthest(percent) > 0 else 'below'} {names[id(reference)]}"
    title = f"Mean loss of {steps} steps: {names[id(row)]} up to {apart}"
    levels = reference["loss_by_step"][: len(percent) + steps - 1]
    single = max(relative_differences(row["loss_by_step"], reference["loss_by_step"]))
    note = (
        f"Each point is the mean of the {steps} steps that end there, beside "
        f"{' and '.join(names[id(other)] for other in references)}. The loss of {names[id(reference)]} goes from "
        f"{levels[0]:.2f} to a mean of {mean(levels[-steps:]):.2f}; single losses of {names[id(row)]} lie up to "
        f"{single:.1%} from it."
    )
    curves = [(row, percent) for row, _, percent in compared]
    lines = [(references[0], [0.0] * max(len(percent) for _, percent in curves)), *curves]
    return _sheet(rows, title, note, lines, LineAxes(unit="mean loss, % apart", steps=True), first=steps)


def _usual(rows: Sequence[Row]) -> Row:
    """Of runs that compute one function the one that differs from the others in the fewest settings: the first such,
    and none that rounds further than another."""
    names = varying_settings(rows)
    narrowest = [row for row in rows if not rounds_further(row)] or rows

    def others_apart(row: Row) -> int:
        return sum(setting_of(row, name) != setting_of(other, name) for other in rows for name in names)

    return min(narrowest, key=others_apart)


def _percent_above(losses: Sequence[float], expected: Sequence[float], steps: int) -> list[float]:
    """How far the mean of this many losses lies above the expected one, up to each step that has as many before it.
    Empty where an expected mean is zero, of which nothing is a share."""
    own, other = (list(accumulate(values, initial=0.0)) for values in (losses, expected))
    ends = range(steps, min(len(losses), len(expected)) + 1)
    means = [(own[end] - own[end - steps], other[end] - other[end - steps]) for end in ends]
    if min(usual for _, usual in means) < _FLOOR:
        return []
    return [100 * (value / usual - 1) for value, usual in means]


def _furthest(percent: Sequence[float]) -> float:
    return max(percent, key=abs)


def _differences(rows: Sequence[Row], compared: Sequence[LossDifferences]) -> Sheet:
    curves = [(pair.row, _apart(pair)) for pair in compared]
    curves.sort(key=lambda curve: -max(curve[1]))
    failed = sum(pair.agrees is False for pair in compared)
    told = f"{failed} of {len(compared)} trials differ by more than {LIMIT:.0e}" if failed else "losses differ"
    worst, values = curves[0]
    note = (
        "Larger of the two relative differences (loss, gradient norm) to the first ok trial of the same model, length, "
        f"dtype, data and seed; exact equality is drawn at {_FLOOR:.0e}."
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
    notes = [note, own_weights_sentence(rows), "Warm-up steps are drawn too."]
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
    """Names of trials by `id`: their series, with size, length and seed where there are several."""
    sizes, lengths, seeds = (
        len({key(row) for row in rows}) > 1 for key in (panel_of, itemgetter("seq_len"), itemgetter("seed"))
    )
    names = {}
    for series, members in series_of(rows):
        for row in members:
            parts = [series, panel_name(panel_of(row)) if sizes else "", span_of([row["seq_len"]]) if lengths else ""]
            parts += [f"seed {row['seed']}"] if seeds else []
            names[id(row)] = ", ".join(filter(None, parts))
    return names


def _apart(pair: LossDifferences) -> list[float]:
    norms = pair.grad_norm_by_step or [0.0] * len(pair.loss_by_step)
    return [max(_FLOOR, loss, norm) for loss, norm in zip(pair.loss_by_step, norms, strict=False)]


FIGURES = {"loss": LossAgreement()}
