"""A column against sequence length: lines on a logarithmic axis, or bars where there are few lengths.

One panel per parallel size. Every planned trial has its place: where the number is missing stands the status that
explains it.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.lines import Line2D

from harness.report.drawing.bars import arrange, draw_bars
from harness.report.drawing.lines import ceilings_of, draw_lines
from harness.report.drawing.looks import INK, MUTED, bar_key, line_key
from harness.report.drawing.notes import ceiling_note, peak_note, peaks_of, samples_note, whisker_note
from harness.report.drawing.points import Layout, Measure, laid_out
from harness.report.drawing.sheet import SCREEN, Form, Sheet, in_both_forms, panel_title, sheet, text_inches, value_axis
from harness.report.results import Row

PANELS_PER_LINE = 4
LINES_FROM = 3  # lengths of one series
_PEAK_DASHES = (0, (4, 3))


def draw_by_length(rows: Sequence[Row], title: str, measure: Measure) -> Sheet:
    """The figure of `measure`."""
    layout = laid_out(rows)
    return in_both_forms(lambda form: _draw(form, rows, layout, title, measure))


def columns_of_panels(inches: Sequence[float], form: Form) -> int:
    """As many panels side by side as fit a line."""
    for columns in range(min(len(inches), PANELS_PER_LINE), 1, -1):
        if sum(max(inches[column::columns]) for column in range(columns)) <= form.line_inches:
            return columns
    return 1


def _draw(form: Form, rows: Sequence[Row], layout: Layout, title: str, measure: Measure) -> Sheet:
    as_lines = _has_lines(layout, measure.column)
    places = [arrange(panel) for panel in layout.panels]
    if as_lines:
        one, several, less = (5.6, 2.6, 0.6) if form is SCREEN else (2.7, 1.7, 0.3)
        lengths = [len(panel.lengths) for panel in layout.panels]
        inches = [one if len(places) == 1 else several - less * max(0, LINES_FROM - count) for count in lengths]
    else:
        inches = [max(form.panel_inches, form.bar_inches * place.width) for place in places]
    columns = columns_of_panels(inches, form)
    widths = [max(inches[place::columns]) for place in range(columns)]
    ceilings = ceilings_of(layout.points, measure) if as_lines else {}
    figure, axes = sheet(
        form,
        rows=-(-len(places) // columns),
        widths=widths,
        title=title,
        about=layout.about,
        notes=_notes(rows, layout, measure),
        legend=_legend(rows, layout, measure, ceilings, as_lines),
    )
    cells = [ax for line in axes for ax in line]
    for ax in cells[len(places) :]:
        ax.set_visible(False)
    # Above the tallest bar stands its upright number.
    room = 1.08 if as_lines or measure.ceiling else 1.42 if form.paper else 1.24
    value_axis(cells[0], _extent(layout, measure), bars=not as_lines, room=room)
    stretched = (figure.get_figwidth() - 0.9) / sum(widths)  # a sheet is wider than one narrow panel
    bar_inches = form.bar_inches * min(2.0, max(1.0, stretched)) / max(1.0, stretched)
    for index, (ax, panel, place) in enumerate(zip(cells, layout.panels, places, strict=False)):
        if measure.peak:
            ax.axhline(measure.peak, color=MUTED, linewidth=1.0, linestyle=_PEAK_DASHES, zorder=1)
        if as_lines:
            draw_lines(ax, panel, layout.looks, measure, ceilings, form)
        else:
            draw_bars(ax, place, layout.looks, measure, form, room=widths[index % columns] / bar_inches)
        if len(places) > 1 or not form.paper:
            panel_title(ax, panel.title, widths[index % columns], form)
        if index + columns >= len(places):
            label = "sequence length (tokens)"
            short = text_inches(label, form.label) > widths[index % columns]
            ax.set_xlabel("tokens" if short else label, fontsize=form.label, color=MUTED)
        if index % columns == 0:
            ax.set_ylabel(measure.unit, fontsize=form.label, color=INK)
    return figure


def _has_lines(layout: Layout, column: str) -> bool:
    """Whether some series of a panel has a number at LINES_FROM lengths or more."""
    for panel in layout.panels:
        counts = dict.fromkeys(layout.looks, 0)
        for point in panel.points:
            counts[point.series] += point.value(column) is not None
        if max(counts.values()) >= LINES_FROM:
            return True
    return False


def _notes(rows: Sequence[Row], layout: Layout, measure: Measure) -> list[str]:
    notes = [*measure.notes, *layout.notes, samples_note(rows)]
    if measure.timed:
        notes.append(whisker_note([point.rows for point in layout.points]))
    if measure.peak:
        notes.append(peak_note(rows))
    if measure.ceiling:
        notes.append(ceiling_note(rows))
    return [note for note in notes if note]


def _legend(
    rows: Sequence[Row], layout: Layout, measure: Measure, ceilings: dict[str, str], as_lines: bool
) -> list[Artist]:
    """Keys of the series where there are several, of ceilings and of the peak."""
    keys: list[Artist] = []
    if len(layout.looks) > 1:
        keys += [line_key(name, look) if as_lines else bar_key(name, look) for name, look in layout.looks.items()]
    if measure.ceiling:
        if len(ceilings) > 1:
            keys += [
                Line2D([], [], color=INK, linewidth=1.6, linestyle=dashes, label=f"ceiling of kernel {kernel}")
                for kernel, dashes in ceilings.items()
            ]
        elif any(row.get(measure.ceiling) for row in rows):
            keys.append(Line2D([], [], color=INK, linewidth=1.6, label="ceiling: measured kernel speeds"))
    if measure.peak:
        peaks = " and ".join(f"{peak:,.0f} TFLOP/s" for _, peak in peaks_of(rows))
        keys.append(
            Line2D([], [], color=MUTED, linewidth=1.0, linestyle=_PEAK_DASHES, label=f"peak: {peaks}, dense bf16")
        )
    return keys


def _extent(layout: Layout, measure: Measure) -> list[float]:
    """Everything that the value axis has to hold, in its unit."""
    values: list[float] = [measure.peak] if measure.peak else []
    for point in layout.points:
        found = [point.value(measure.column), point.value(measure.ceiling)]
        if measure.timed and not point.too_wide(measure.column):
            found += point.whisker(measure.column) or ()
        values += [value * measure.scale for value in found if value is not None]
    return values
