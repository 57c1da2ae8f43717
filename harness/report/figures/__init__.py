"""Figures: one file each, found by file name.

A figure chooses columns and draws them. It derives no number and reads no record.
"""

from __future__ import annotations

import importlib
import io
import pkgutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from matplotlib import rc_context
from matplotlib.figure import Figure

from engine.atomic import write_atomic
from harness.report.drawing.sheet import COLUMN_INCHES, Sheet
from harness.report.results import Row
from harness.report.tables.table import escape_latex

FORMATS = ("png", "pdf", "svg")
_TYPES = {
    "pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none",
    "svg.hashsalt": "burst",  # else the ids inside an SVG are random
}  # fmt: skip


class Drawing(Protocol):
    """What a module of this package defines as `FIGURE`. All rows given to it belong to one group
    (`harness.report.drawing.points.groups_of`): one run, one task, one model."""

    title: str
    place: int  # reading order in reports, smallest first

    def applies(self, rows: Sequence[Row]) -> bool:
        """Whether these rows hold what this figure shows: two numbers or more, and none that another figure shows."""
        ...

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw all rows; one without a number is shown by its status."""
        ...


def all_figures() -> dict[str, Drawing]:
    """Every figure under its file name, in reading order. Modules that start with an underscore are helpers."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    found: dict[str, Drawing] = {name: importlib.import_module(f"{__name__}.{name}").FIGURE for name in names}
    return dict(sorted(found.items(), key=lambda item: (item[1].place, item[0])))


def render(figure: Figure, kind: str) -> bytes:
    """The figure as png, pdf or svg bytes; equal figures give equal bytes, so committed plots change only with data.

    A PDF has the form for papers: TrueType fonts (journals refuse Type 3), the width of a column or of a page. Text of
    an SVG stays text: smaller, searchable, and a changed number shows in a diff.
    """
    assert kind in FORMATS, kind
    if kind == "pdf" and isinstance(figure, Sheet) and figure.for_paper:
        figure = figure.for_paper()
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what was laid out stays; else every format lays it out again
    for axes in figure.axes:
        # The last digits of the layout's sums differ from run to run, and SVG names clipped areas after all of them.
        left, bottom, width, height = (round(edge, 9) for edge in axes.get_position(original=True).bounds)
        axes.set_position((left, bottom, width, height), which="both")
    buffer = io.BytesIO()
    dated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with rc_context(_TYPES):
        figure.savefig(buffer, format=kind, dpi=160, metadata=dated.get(kind))
    return buffer.getvalue()


def save_figure(figure: Figure, stem: Path, kinds: Iterable[str]) -> list[Path]:
    """Write `stem`.png, `stem`.pdf ... whole or not at all; beside a PDF `stem`.tex with its caption."""
    written = [write_atomic(stem.with_name(f"{stem.name}.{kind}"), render(figure, kind)) for kind in sorted(kinds)]
    if "pdf" in kinds and isinstance(figure, Sheet):
        written.append(write_atomic(stem.with_name(f"{stem.name}.tex"), latex_of(figure, stem.name)))
    return written


def latex_of(figure: Sheet, name: str) -> str:
    """The LaTeX that includes `name`.pdf, with title and notes as its caption."""
    paper = figure.for_paper() if figure.for_paper else figure
    wide = "*" if paper.get_figwidth() > COLUMN_INCHES else ""
    lines = [
        rf"\begin{{figure{wide}}}",
        r"  \centering",
        rf"  \includegraphics[width={paper.get_figwidth():g}in]{{{name}.pdf}}",
        rf"  \caption{{{escape_latex(figure.caption)}}}",
        rf"  \label{{fig:{name}}}",
        rf"\end{{figure{wide}}}",
    ]
    return "\n".join(lines) + "\n"
