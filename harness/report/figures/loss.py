"""Loss per step of every method and CP size, above its relative difference to one reference trial.

Curves that agree lie on top of each other, so the lower panels carry the comparison: on a logarithmic axis, with the
limit fp32 trials have to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from harness.base.lengths import format_length
from harness.report.agreement import LIMIT, Agreement, agreements
from harness.report.figures._style import INK, MUTED, canvas, dashes, marker, method_colour, peak_note, samples_note
from harness.report.results import Row, method_rank
from harness.report.variants import panel_name, panel_of, series_name, setup_name, varying_settings

_FLOOR = 1e-9  # drawn for differences of exactly zero, which a logarithm cannot show


class LossAgreement:
    title = "Loss over the steps, and how far trials differ"
    place = 40

    def applies(self, rows: Sequence[Row]) -> bool:
        return any(row["task"] == "train" and row["loss_by_step"] for row in rows)

    def draw(self, rows: Sequence[Row]) -> Figure:
        found = agreements(rows)
        lengths = sorted({pair.row["seq_len"] for pair in found})
        varying = varying_settings(rows)
        drawn = sorted((pair.row for pair in found), key=lambda row: (method_rank(row["method"]), panel_of(row)))
        names = {_name(row, varying): row for row in drawn}
        styles = _styles(names)
        missing = [row for row in rows if row["status"] != "ok"]
        notes = [
            "Loss = mean over all target tokens of the whole batch. Lower panels: largest of the two "
            "relative differences (loss, gradient norm) to the reference, the first ok trial of the same model, "
            f"length, dtype, data and seed; exact equality is drawn at {_FLOOR:.0e}.",
            f"{peak_note(rows)} {samples_note(rows)} All steps are drawn, warm-up included.",
        ]
        if missing:
            listed = ", ".join(
                f"{_name(row, varying)} at {format_length(row['seq_len'])} ({row['status']})" for row in missing
            )
            notes.append(f"Without a curve: {listed}.")
        figure, axes = canvas(
            rows=2,
            widths=[3.4 if len(lengths) < 4 else 2.6] * len(lengths),
            height=2.3,
            title=self.title,
            subtitle=setup_name(rows),
            footer=notes,
            legend=[Line2D([], [], label=name, **style) for name, style in styles.items()],
            sharey="row",
        )
        for place, seq_len in enumerate(lengths):
            here = [pair for pair in found if pair.row["seq_len"] == seq_len]
            above, below = axes[0][place], axes[1][place]
            for pair in here:
                style = styles[_name(pair.row, varying)]
                _curve(above, pair.row["loss_by_step"], style)
                _curve(below, _differences(pair), style)
            above.set_title(f"{format_length(seq_len)} tokens", fontsize=9.5, color=INK, fontweight="bold")
            below.set_yscale("log")
            if any(pair.agrees is not None for pair in here):
                below.axhline(LIMIT, color=INK, linewidth=1, linestyle=(0, (4, 3)))
                below.annotate(
                    f"limit {LIMIT:.0e}", (1, LIMIT), xycoords=("axes fraction", "data"), xytext=(0, 2),
                    textcoords="offset points", ha="right", fontsize=7.5, color=MUTED,
                )  # fmt: skip
            below.set_ylim(_FLOOR / 2, max([10 * LIMIT, *(2 * value for pair in here for value in _differences(pair))]))
            below.set_xlabel("step", fontsize=8.5, color=MUTED)
            for ax in (above, below):
                ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes[0][0].set_ylabel("loss", fontsize=9, color=INK)
        axes[1][0].set_ylabel("relative difference", fontsize=9, color=INK)
        return figure


def _name(row: Row, varying: Sequence[str]) -> str:
    return f"{series_name(row, varying)}, {panel_name(panel_of(row))}"


def _styles(names: dict[str, Row]) -> dict[str, dict[str, Any]]:
    """Colour by method; dashes and markers count the lines of one colour."""
    styles: dict[str, dict[str, Any]] = {}
    lines: dict[str, int] = {}
    for name, row in names.items():
        colour = method_colour(row["method"])
        count = lines.get(colour, 0)
        lines[colour] = count + 1
        styles[name] = {
            "color": colour, "linestyle": dashes(count), "marker": marker(count), "markersize": 4, "linewidth": 1.4,
            "markerfacecolor": "white", "markeredgewidth": 1.1,
        }  # fmt: skip
    return styles


def _curve(ax: Axes, values: Sequence[float], style: dict[str, Any]) -> None:
    ax.plot(range(1, len(values) + 1), values, **style)


def _differences(pair: Agreement) -> list[float]:
    norms = pair.grad_norm_by_step or [0.0] * len(pair.loss_by_step)
    return [max(_FLOOR, loss, norm) for loss, norm in zip(pair.loss_by_step, norms, strict=False)]


FIGURE = LossAgreement()
