"""Whether trials that compute the same function show the same loss: a sentence where they do, else the differences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.ticker import MaxNLocator, NullLocator

from harness.base.lengths import format_length
from harness.report.drawing.finding import span_of
from harness.report.drawing.lines import LineEnd, write_names
from harness.report.drawing.looks import MUTED, looks_of
from harness.report.drawing.notes import samples_note
from harness.report.drawing.points import IN_CSV, about
from harness.report.drawing.sheet import Page, Sheet, text_inches, wrapped
from harness.report.footnotes import footnotes_of
from harness.report.results import Row
from harness.report.tables.agreement import LIMIT, LossDifferences, agreements, own_weights_sentence
from harness.report.variants import panel_name, panel_of, series_of

CURVE_STEPS = 10  # of a single trial, from which on its loss is worth a figure
COINCIDE = 0.01  # relative difference below which curves lie on each other
MAX_CURVES = 8
_Curves = dict[str, tuple[Row, list[float]]]  # by name
_FLOOR = 1e-9  # drawn for differences of exactly zero, which a logarithm cannot show


class LossAgreement:
    def place(self, rows: Sequence[Row]) -> int:
        return 50

    def draw(self, rows: Sequence[Row]) -> Sheet | str | None:
        if rows[0]["task"] != "train":
            return None
        found = agreements(rows)
        compared = [pair for pair in found if pair.row is not pair.reference]
        if compared and all(pair.agrees or (pair.agrees is None and pair.loss < COINCIDE) for pair in compared):
            return _coincide(compared)
        if compared:
            return _differences(rows, compared)
        long = [pair for pair in found if len(pair.row["loss_by_step"]) >= CURVE_STEPS]
        return _curves(rows, long) if long else None


def _coincide(compared: Sequence[LossDifferences]) -> str:
    """One sentence for curves that lie on each other."""
    worst = max(max(pair.loss, (pair.grad_norm or 0.0) if pair.agrees else 0.0) for pair in compared)
    trials = len({id(row) for pair in compared for row in (pair.row, pair.reference)})
    of = "losses and gradient norms" if all(pair.agrees for pair in compared) else "losses"
    types = " and ".join(sorted({pair.row["dtype"] for pair in compared}))
    apart = f"differ by at most {worst:.1e} relative" if worst else "do not differ"
    lengths = span_of([pair.row["seq_len"] for pair in compared])
    return f"The loss curves of {trials} trials coincide: {of} {apart} ({types}, {lengths})."


def _differences(rows: Sequence[Row], compared: Sequence[LossDifferences]) -> Sheet:
    names = _names(rows)
    ranked = sorted(compared, key=lambda pair: -max(_apart(pair)))
    failed = sum(pair.agrees is False for pair in compared)
    told = f"{failed} of {len(compared)} trials differ by more than {LIMIT:.0e}" if failed else "losses differ"
    note = (
        "Larger of the two relative differences (loss, gradient norm) to the first ok trial of the same model, length, "
        f"dtype, data and seed; exact equality is drawn at {_FLOOR:.0e}."
    )
    return _sheet(
        rows,
        f"Loss: {told}, {names[id(ranked[0].row)]} by {max(_apart(ranked[0])):.1e} relative",
        note,
        {names[id(pair.row)]: (pair.row, _apart(pair)) for pair in ranked},
        "relative difference",
    )


def _curves(rows: Sequence[Row], long: Sequence[LossDifferences]) -> Sheet:
    names = _names(rows)
    first = long[0].row["loss_by_step"]
    return _sheet(
        rows,
        f"Loss: from {first[0]:.2f} to {first[-1]:.2f} in {len(first)} steps",
        "Loss = mean over all target tokens of the whole batch.",
        {names[id(pair.row)]: (pair.row, list(pair.row["loss_by_step"])) for pair in long},
        "loss",
    )


def _sheet(rows: Sequence[Row], title: str, note: str, curves: _Curves, unit: str) -> Sheet:
    kept = dict(list(curves.items())[:MAX_CURVES])
    notes = [note, own_weights_sentence(rows), f"{samples_note(rows)} All steps are drawn, warm-up included."]
    if len(curves) > len(kept):
        notes.append(f"{MAX_CURVES} of {len(curves)} trials are drawn; {IN_CSV}.")
    return Sheet(
        title=title,
        about=about(rows),
        notes=[one for one in notes if one],
        footnotes=footnotes_of(rows),
        plot=partial(_paint, curves=kept, unit=unit),
    )


def _names(rows: Sequence[Row]) -> dict[int, str]:
    """Names of trials by `id`: their series, with size and length where there are several."""
    sizes, lengths = len({panel_of(row) for row in rows}) > 1, len({row["seq_len"] for row in rows}) > 1
    return {
        id(row): ", ".join(
            [
                name,
                *([panel_name(panel_of(row))] if sizes else []),
                *([f"{format_length(row['seq_len']).upper()} tokens"] if lengths else []),
            ]
        )
        for name, members in series_of(rows)
        for row in members
    }


def _paint(page: Page, *, curves: _Curves, unit: str) -> None:
    """Curves over the steps; differences on a logarithmic axis, with the limit that fp32 trials have to keep."""
    form = page.form
    looks = looks_of([(name, [row]) for name, (row, _) in curves.items()])
    names = min(0.33 * form.width, max(text_inches(name, form.small) for name in looks) + 0.14)
    height = max(2.0, 0.16 * sum(len(wrapped(name, names - 0.12, form.small)) for name in looks))
    ax = page.panel(0.26, 0.62, page.right - 0.62 - names, height, below=0.36)
    ends = []
    for name, (_, values) in curves.items():
        look = looks[name]
        [drawn] = ax.plot(range(1, len(values) + 1), values, color=look.colour, linestyle=look.dashes, linewidth=1.5)
        page.tip(drawn, f"{name}: {values[0]:.4g} to {values[-1]:.4g}")
        ends.append(LineEnd(name=name, colour=look.colour, x=len(values), y=values[-1]))
    steps = max(len(values) for _, values in curves.values())
    ax.set_xlim(1, max(2, steps))
    if unit != "loss":
        ax.set_yscale("log")
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_ylim(_FLOOR / 2, max([10 * LIMIT, *(2 * value for _, values in curves.values() for value in values)]))
        ax.axhline(LIMIT, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        ax.text(1, LIMIT * 1.2, f"limit {LIMIT:.0e}", fontsize=form.small, color=MUTED)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    ax.set_xlabel("step", fontsize=form.small, labelpad=2)
    ax.text(0, 1 + 0.12 / height, unit, transform=ax.transAxes, fontsize=form.small, color=MUTED)
    write_names(ax, ends, names, height, form.small)


def _apart(pair: LossDifferences) -> list[float]:
    norms = pair.grad_norm_by_step or [0.0] * len(pair.loss_by_step)
    return [max(_FLOOR, loss, norm) for loss, norm in zip(pair.loss_by_step, norms, strict=False)]


FIGURE = LossAgreement()
