"""Whether trials that compute the same function show the same loss: a sentence where they do, else the differences."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.ticker import MaxNLocator, NullLocator

from harness.base.lengths import format_length
from harness.report.drawing.finding import span_of
from harness.report.drawing.lines import End, write_names
from harness.report.drawing.looks import MUTED, Look, looks_of
from harness.report.drawing.notes import samples_note
from harness.report.drawing.points import IN_CSV, about
from harness.report.drawing.sheet import Page, Sheet, text_inches, wrapped
from harness.report.footnotes import footnotes_of
from harness.report.results import Row
from harness.report.tables.agreement import LIMIT, Agreement, agreements, own_weights_sentence
from harness.report.variants import panel_name, panel_of, series_of

CURVE_STEPS = 10  # of a single trial, from which on its loss is worth a figure
COINCIDE = 0.01  # relative difference below which curves lie on each other
MAX_CURVES = 8
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


def _coincide(compared: Sequence[Agreement]) -> str:
    """One sentence for curves that lie on each other."""
    worst = max(max(pair.loss, (pair.grad_norm or 0.0) if pair.agrees else 0.0) for pair in compared)
    trials = len({id(row) for pair in compared for row in (pair.row, pair.reference)})
    of = "losses and gradient norms" if all(pair.agrees for pair in compared) else "losses"
    types = " and ".join(sorted({pair.row["dtype"] for pair in compared}))
    apart = f"differ by at most {worst:.1e} relative" if worst else "do not differ"
    lengths = span_of([pair.row["seq_len"] for pair in compared])
    return f"The loss curves of {trials} trials coincide: {of} {apart} ({types}, {lengths})."


def _differences(rows: Sequence[Row], compared: Sequence[Agreement]) -> Sheet:
    names = _names(rows)
    ranked = sorted(compared, key=lambda pair: -max(_apart(pair)))
    worst, kept = ranked[0], ranked[:MAX_CURVES]
    notes = [
        "Larger of the two relative differences (loss, gradient norm) to the first ok trial of the same model, length, "
        f"dtype, data and seed; exact equality is drawn at {_FLOOR:.0e}.",
        *(
            [f"{MAX_CURVES} of {len(ranked)} trials are drawn, those that differ most; {IN_CSV}."]
            if len(ranked) > MAX_CURVES
            else []
        ),
        *_notes(rows),
    ]
    bound = any(pair.agrees is not None for pair in compared)
    failed = sum(pair.agrees is False for pair in compared)
    told = f"{failed} of {len(compared)} trials differ by more than {LIMIT:.0e}" if failed else "losses differ"
    title = f"Loss: {told}, {names[id(worst.row)]} by {max(_apart(worst)):.1e} relative"
    curves = [(names[id(pair.row)], pair.row, _apart(pair)) for pair in kept]
    return Sheet(
        title=title, about=about(rows), notes=notes,
        plot=lambda page: _paint(page, curves, "relative difference", limit=LIMIT if bound else None),
    )  # fmt: skip


def _curves(rows: Sequence[Row], long: Sequence[Agreement]) -> Sheet:
    names = _names(rows)
    kept = long[:MAX_CURVES]
    losses = [pair.row["loss_by_step"] for pair in kept]
    steps = max(map(len, losses))
    title = f"Loss: from {losses[0][0]:.2f} to {losses[0][-1]:.2f} in {steps} steps"
    curves = [(names[id(pair.row)], pair.row, list(pair.row["loss_by_step"])) for pair in kept]
    notes = ["Loss = mean over all target tokens of the whole batch.", *_notes(rows)]
    return Sheet(title=title, about=about(rows), notes=notes, plot=lambda page: _paint(page, curves, "loss"))


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = [
        own_weights_sentence(rows),
        f"{samples_note(rows)} All steps are drawn, warm-up included.",
        *footnotes_of(rows),
    ]
    return [note for note in notes if note]


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


def _paint(page: Page, curves: Sequence[tuple[str, Row, list[float]]], unit: str, limit: float | None = None) -> None:
    """Curves over the steps; differences on a logarithmic axis, with the limit that fp32 trials have to keep."""
    form = page.form
    looks = looks_of([(name, [row]) for name, row, _ in curves])
    right = min(0.33 * form.width, max(text_inches(name, form.small) for name in looks) + 0.14)
    height = max(2.0, 0.16 * sum(len(wrapped(name, right - 0.12, form.small)) for name in looks))
    ax = page.panel(0.26, 0.62, page.right - 0.62 - right, height, below=0.36)
    ends = []
    for name, _, values in curves:
        look: Look = looks[name]
        [drawn] = ax.plot(range(1, len(values) + 1), values, color=look.colour, linestyle=look.dashes, linewidth=1.5)
        page.tip(drawn, f"{name}: {values[0]:.4g} to {values[-1]:.4g}")
        ends.append(End(name=name, colour=look.colour, x=len(values), y=values[-1]))
    ax.set_xlim(1, max(len(values) for *_, values in curves))
    if unit != "loss":
        ax.set_yscale("log")
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_ylim(_FLOOR / 2, max([10 * LIMIT, *(2 * value for _, _, values in curves for value in values)]))
    if limit:
        ax.axhline(limit, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        ax.annotate(f"limit {limit:.0e}", (0, limit), (3, 2), xycoords=("axes fraction", "data"),
                    textcoords="offset points", fontsize=form.small, color=MUTED)  # fmt: skip
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    ax.set_xlabel("step", fontsize=form.small, labelpad=2)
    ax.annotate(
        unit, (0, 1), (-38, 9), xycoords="axes fraction", textcoords="offset points", fontsize=form.small, color=MUTED
    )
    write_names(ax, ends, right, height, form.small)


def _apart(pair: Agreement) -> list[float]:
    norms = pair.grad_norm_by_step or [0.0] * len(pair.loss_by_step)
    return [max(_FLOOR, loss, norm) for loss, norm in zip(pair.loss_by_step, norms, strict=False)]


FIGURE = LossAgreement()
