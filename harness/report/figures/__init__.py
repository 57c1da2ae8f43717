"""Figures: each module defines some by name, in `FIGURES`, and is found by its file.

A figure chooses columns and draws them. It derives no number and reads no record. Of the rows of one group
(`harness.report.drawing.points.groups_of`: one run, one task, one model) it makes one of three:

- a `Sheet`: its `title` says the finding, `about` is the set-up, `note` says how it was measured; `footnotes` hold what
  names leave out, which a page says once for all figures and a file each time. Nothing is drawn yet;
- a sentence, where a figure would show that everything is equal;
- None, where the rows hold nothing of it, or another figure shows it.

`shown_of` makes all of a group, in the order in which a page shows them. A file is made by `render`; a page takes
`inline`, the plot alone, once for wide screens and once for phones, since title, set-up and note are text of the page.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

from engine.atomic import write_atomic
from harness.report.drawing.sheet import COLUMN_INCHES, NARROW, SCREEN, WIDE, Sheet
from harness.report.results import Row
from harness.report.tables.table import escape_latex

FORMATS = ("png", "pdf", "svg")


class Drawing(Protocol):
    """One figure."""

    def place(self, rows: Sequence[Row]) -> int:
        """Where a page shows it, smallest first: what answers the run's question comes before all else."""
        ...

    def draw(self, rows: Sequence[Row]) -> Sheet | str | None:
        """The figure of the rows of one group, or a sentence; a row without a number is shown by its status."""
        ...


@cache
def all_figures() -> dict[str, Drawing]:
    """Every figure by the name of its files."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return {name: figure for module in modules for name, figure in module.FIGURES.items()}


def shown_of(rows: Sequence[Row]) -> dict[str, Sheet | str]:
    """All figures and sentences of one group by the figure's name, in the order of a page."""
    ordered = sorted(all_figures().items(), key=lambda item: (item[1].place(rows), item[0]))
    return {name: shown for name, figure in ordered if (shown := figure.draw(rows)) is not None}


def render(sheet: Sheet, kind: str) -> bytes:
    """The figure as png, pdf or svg bytes; equal figures give equal bytes, so committed plots change only with data.

    A PDF is for papers: the plot alone, one column wide, with TrueType fonts. An SVG has its text as text (a changed
    number shows in a diff), follows light and dark, and shows the values of each mark on hover.
    """
    assert kind in FORMATS, kind
    return sheet.saved(NARROW if kind == "pdf" else SCREEN, kind)


def inline(sheet: Sheet, name: str) -> tuple[str, str]:
    """The plot as two SVG elements of a page, for wide screens and for phones. `name` keeps their ids apart from those
    of other figures; they hold no style, script or link, and take their colours from variables of the page."""
    found = []
    for form, suffix in ((WIDE, "w"), (NARROW, "n")):
        svg = sheet.saved(form, "svg", standalone=False).decode()
        svg = svg[svg.index("<svg") :]
        found.append(re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-{suffix}-", svg))
    wide, narrow = found
    return wide, narrow


def save_figure(sheet: Sheet, stem: Path, kinds: Iterable[str]) -> list[Path]:
    """Write `stem`.png, `stem`.pdf ... whole or not at all; beside a PDF `stem`.tex with its caption."""
    written = [write_atomic(stem.with_name(f"{stem.name}.{kind}"), render(sheet, kind)) for kind in sorted(kinds)]
    if "pdf" in kinds:
        written.append(write_atomic(stem.with_name(f"{stem.name}.tex"), latex_of(sheet, stem.name)))
    return written


def latex_of(sheet: Sheet, name: str) -> str:
    """The LaTeX that includes `name`.pdf, with title, set-up and notes as its caption."""
    lines = [
        r"\begin{figure}",
        r"  \centering",
        rf"  \includegraphics[width={COLUMN_INCHES:g}in]{{{name}.pdf}}",
        rf"  \caption{{{escape_latex(sheet.caption)}}}",
        rf"  \label{{fig:{name}}}",
        r"\end{figure}",
    ]
    return "\n".join(lines) + "\n"
