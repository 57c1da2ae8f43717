"""Loss per step of every method and CP size, above its relative difference to one reference trial.

Curves that agree lie on top of each other, so the lower panels carry the comparison: on a logarithmic axis, with the
limit fp32 trials have to keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from harness.base.lengths import format_length
from harness.report.drawing.looks import INK, MUTED, Look, method_colour
from harness.report.drawing.notes import samples_note
from harness.report.drawing.points import IN_CSV, about
from harness.report.drawing.sheet import SCREEN, Form, Sheet, in_both_forms, sheet
from harness.report.footnotes import footnotes_of
from harness.report.results import Row, method_rank
from harness.report.tables.agreement import LIMIT, Agreement, agreements, own_weights_sentence
from harness.report.variants import panel_name, panel_of, series_of
from harness.report.weak_forms import marked, weak_forms, weak_sentence

MAX_CURVES, MAX_LENGTHS = 24, 6
CURVE_STEPS = 10  # of a single trial, from which on its loss is worth a figure
_FLOOR = 1e-9  # drawn for differences of exactly zero, which a logarithm cannot show


class LossAgreement:
    title = "Loss over the steps, and how far trials differ"
    place = 40

    def applies(self, rows: Sequence[Row]) -> bool:
        """Where some trial has another to agree with, or ran long enough for its loss to be a curve."""
        if rows[0]["task"] != "train":
            return False
        found = agreements(rows)
        return any(_compared(pair) or len(pair.row["loss_by_step"]) >= CURVE_STEPS for pair in found)

    def draw(self, rows: Sequence[Row]) -> Sheet:
        found, notes = _drawn(agreements(rows))
        series = series_of(rows)
        weak = weak_forms(rows)
        short = {name: marked(name, any(id(row) in weak for row in members)) for name, members in series}
        if sentence := weak_sentence(weak.values()):
            notes.append(sentence)
        several = len({panel_of(pair.row) for pair in found}) > 1
        names = {
            id(row): f"{short[name]}, {panel_name(panel_of(row))}" if several else short[name]
            for name, members in series
            for row in members
        }
        notes += footnotes_of(rows)
        if sentence := own_weights_sentence(rows):
            notes.append(sentence)
        missing = [row for row in rows if row["status"] != "ok"]
        if missing:
            listed = ", ".join(
                f"{names[id(row)]} at {format_length(row['seq_len'])} ({row['status']})" for row in missing[:MAX_CURVES]
            )
            more = len(missing) - MAX_CURVES
            notes.append(f"Without a curve: {listed}{f' and {more} more; {IN_CSV}' if more > 0 else ''}.")
        notes.append(f"{samples_note(rows)} All steps are drawn, warm-up included.")
        return in_both_forms(
            partial(
                _draw,
                found=found,
                names=names,
                styles=_styles([pair.row for pair in found], names),
                title=self.title,
                about=about(rows),
                notes=notes,
            )
        )


def _compared(pair: Agreement) -> bool:
    return pair.row is not pair.reference


def _drawn(found: Sequence[Agreement]) -> tuple[list[Agreement], list[str]]:
    """The pairs that are drawn, and notes: lengths with something to compare, at most MAX_LENGTHS of them and
    MAX_CURVES curves, of these the references and those that differ most."""
    compared = {pair.row["seq_len"] for pair in found if _compared(pair)}
    kept = [pair for pair in found if pair.row["seq_len"] in compared] if compared else list(found)
    notes = []
    if compared:
        notes.append(
            "Loss = mean over all target tokens of the whole batch. Lower panels: larger of the two relative "
            "differences (loss, gradient norm) to the reference, the first ok trial of the same model, length, dtype, "
            "data and seed; "
            f"exact equality is drawn at {_FLOOR:.0e}."
        )
    else:
        notes.append("Loss = mean over all target tokens of the whole batch.")
    lengths = sorted({pair.row["seq_len"] for pair in kept})
    if len(lengths) > MAX_LENGTHS:
        notes.append(f"The longest {MAX_LENGTHS} of {len(lengths)} lengths are drawn; {IN_CSV}.")
        kept = [pair for pair in kept if pair.row["seq_len"] in lengths[-MAX_LENGTHS:]]
    if len(kept) > MAX_CURVES:
        notes.append(
            f"{MAX_CURVES} of {len(kept)} trials are drawn, those that differ most from their reference; {IN_CSV}."
        )
        references = {id(pair.reference) for pair in kept}
        ranked = sorted(kept, key=lambda pair: (id(pair.row) not in references, -max(_differences(pair))))[:MAX_CURVES]
        chosen = {id(pair) for pair in ranked}
        kept = [pair for pair in kept if id(pair) in chosen]
    return kept, notes


def _draw(
    form: Form,
    *,
    found: Sequence[Agreement],
    names: Mapping[int, str],
    styles: dict[str, dict[str, Any]],
    title: str,
    about: str,
    notes: Sequence[str],
) -> Sheet:
    lengths = sorted({pair.row["seq_len"] for pair in found})
    comparing = any(_compared(pair) for pair in found)
    wide = (3.4 if len(lengths) < 4 else 2.6) if form is SCREEN else (2.7 if len(lengths) == 1 else 6.3 / len(lengths))
    figure, axes = sheet(
        form,
        rows=2 if comparing else 1,
        widths=[wide] * len(lengths),
        height=2.3 if form is SCREEN else 1.35,
        title=title if comparing else "Loss over the steps",
        about=about,
        notes=notes,
        legend=[Line2D([], [], label=name, **style) for name, style in styles.items()] if len(styles) > 1 else [],
        sharey="row",
    )
    for place, seq_len in enumerate(lengths):
        here = [pair for pair in found if pair.row["seq_len"] == seq_len]
        for pair in here:
            _curve(axes[0][place], pair.row["loss_by_step"], styles[names[id(pair.row)]])
        if comparing:
            _draw_differences(axes[1][place], here, names, styles, form)
        if len(lengths) > 1 or not form.paper:
            axes[0][place].set_title(
                f"{format_length(seq_len)} tokens", fontsize=form.panel, color=INK, fontweight="bold"
            )
        axes[-1][place].set_xlabel("step", fontsize=form.label, color=MUTED)
        for line in axes:
            line[place].xaxis.set_major_locator(MaxNLocator(nbins=8 if form is SCREEN else 5, integer=True))
    axes[0][0].set_ylabel("loss", fontsize=form.label, color=INK)
    if comparing:
        axes[1][0].set_ylabel("relative difference", fontsize=form.label, color=INK)
    return figure


def _draw_differences(
    ax: Axes, here: Sequence[Agreement], names: Mapping[int, str], styles: dict[str, dict[str, Any]], form: Form
) -> None:
    """Differences to the reference on a logarithmic axis, with the limit that fp32 trials have to keep."""
    for pair in here:
        if _compared(pair):  # a reference does not differ from itself
            _curve(ax, _differences(pair), styles[names[id(pair.row)]])
    ax.set_yscale("log")
    ax.yaxis.set_minor_locator(NullLocator())
    if any(pair.agrees is not None for pair in here):
        ax.axhline(LIMIT, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        ax.annotate(
            f"limit {LIMIT:.0e}", (1, LIMIT), xycoords=("axes fraction", "data"), xytext=(0, 2),
            textcoords="offset points", ha="right", fontsize=form.number, color=MUTED,
        )  # fmt: skip
    ax.set_ylim(_FLOOR / 2, max([10 * LIMIT, *(2 * value for pair in here for value in _differences(pair))]))


def _styles(rows: Sequence[Row], names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """Colour by method; lightness, dashes and markers count the lines of one colour."""
    styles: dict[str, dict[str, Any]] = {}
    lines: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: (method_rank(row["method"]), panel_of(row))):
        if names[id(row)] in styles:
            continue
        colour = method_colour(row["method"])
        count = lines[colour] = lines.get(colour, -1) + 1
        look = Look(colour=colour, variant=count, marker=count, upstream=True)  # hollow: curves lie on each other
        styles[names[id(row)]] = {**look.line, "markersize": 4, "linewidth": 1.3}
    return styles


def _curve(ax: Axes, values: Sequence[float], style: dict[str, Any]) -> None:
    """Loss or difference per step; a long curve has a marker now and then."""
    ax.plot(range(1, len(values) + 1), values, **style, markevery=max(1, len(values) // 12))


def _differences(pair: Agreement) -> list[float]:
    norms = pair.grad_norm_by_step or [0.0] * len(pair.loss_by_step)
    return [max(_FLOOR, loss, norm) for loss, norm in zip(pair.loss_by_step, norms, strict=False)]


FIGURE = LossAgreement()
