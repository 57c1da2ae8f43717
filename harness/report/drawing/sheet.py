"""What a figure is: title, set-up, notes, and a plot that is drawn in any of three forms.

`SCREEN` is a file by itself, with title and notes. On a page these are text of the page: the plot alone is drawn, once
for wide screens (`WIDE`) and once for phones (`NARROW`), which is also the column of a paper. Positions are inches from
the top left corner, so that nothing has to be solved.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from harness.report.drawing.looks import GRID, INK, MUTED, PAPER, finished

COLUMN_INCHES = 3.35  # of a paper with two columns
STYLE = {
    "font.family": "DejaVu Sans", "text.color": INK, "axes.edgecolor": GRID, "axes.labelcolor": MUTED,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.axisbelow": True,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "grid.linewidth": 0.7, "axes.facecolor": "none",
    "xtick.major.size": 0, "xtick.minor.size": 0, "ytick.major.size": 0, "ytick.minor.size": 0,
    "xtick.color": MUTED, "ytick.color": MUTED, "hatch.linewidth": 0.8,
    "text.parse_math": False,  # a $ in a name is one
    "pdf.fonttype": 42, "ps.fonttype": 42,  # journals refuse Type 3
    "svg.fonttype": "none", "svg.hashsalt": "burst",  # else ids inside an SVG are random
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureSize:
    """Width in inches and size of letters in points."""

    width: float
    small: float
    framed: bool  # with title, set-up and notes

    @property
    def narrow(self) -> bool:
        return self.width < 5


SCREEN = FigureSize(width=6.9, small=8.5, framed=True)
WIDE = FigureSize(width=6.9, small=8.5, framed=False)
NARROW = FigureSize(width=COLUMN_INCHES, small=7, framed=False)
_TITLE, _EDGE = 13, 0.12


class Page:
    """A figure in the making: panels at places in inches, and texts that marks show on hover."""

    def __init__(self, form: FigureSize) -> None:
        self.form = form
        self.figure = Figure(figsize=(form.width, 1), facecolor=PAPER if form.framed else "none")
        FigureCanvasAgg(self.figure)
        self.tips: dict[str, list[str]] = {}
        self.height = 0.0  # of what was placed so far
        self._panels: list[tuple[Axes, float, float, float, float]] = []

    @property
    def right(self) -> float:
        return self.form.width - _EDGE

    def panel(self, top: float, left: float, width: float, height: float, below: float = 0.0) -> Axes:
        """Axes with its upper left corner there, and `below` inches for what stands under it."""
        ax = self.figure.add_axes((0, 0, 1, 1), label=str(len(self._panels)))
        ax.tick_params(labelsize=self.form.small, pad=3)
        self._panels.append((ax, top, left, width, height))
        self.height = max(self.height, top + height + below)
        return ax

    def tip(self, artist: Artist, *texts: str) -> None:
        """Texts shown on hover: one of the whole artist, or one for each marker of a line."""
        key = f"tip-{len(self.tips)}"
        artist.set_gid(key)
        self.tips[key] = list(texts)

    def finish(self, head: float, foot: float) -> None:
        """Give the figure its height and the panels their places, below `head` inches."""
        total = head + self.height + foot
        self.figure.set_size_inches(self.form.width, total)
        for ax, top, left, width, height in self._panels:
            ax.set_position((left / self.form.width, 1 - (head + top + height) / total,
                             width / self.form.width, height / total))  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """A figure that is not drawn yet. `title` says what it shows, `about` the set-up, `notes` how it was measured,
    `footnotes` what names leave out: a page says that once, a file each time."""

    title: str
    about: str
    notes: Sequence[str] = field(default_factory=tuple)
    footnotes: Sequence[str] = field(default_factory=tuple)
    plot: Callable[[Page], None]

    @property
    def note(self) -> str:
        """All notes as one paragraph, for a page."""
        return " ".join(self.notes)

    @property
    def whole_note(self) -> str:
        """Notes and footnotes as one paragraph, for a file."""
        return " ".join([*self.notes, *self.footnotes])

    @property
    def caption(self) -> str:
        """Title, set-up and notes as sentences."""
        return " ".join(
            text if text.endswith(".") else f"{text}." for text in (self.title, self.about, self.whole_note) if text
        )

    def drawn(self, form: FigureSize) -> Page:
        """The figure in this form."""
        with rc_context(STYLE):
            page = Page(form)
            self.plot(page)
            head, foot = _framed(page, self) if form.framed else (0.02, 0.02)
            page.finish(head, foot)
        return page

    def saved(self, form: FigureSize, kind: str, *, standalone: bool = True) -> bytes:
        """The figure as png, pdf or svg bytes; equal figures give equal bytes."""
        page, buffer = self.drawn(form), io.BytesIO()
        dated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
        with rc_context(STYLE):
            page.figure.savefig(buffer, format=kind, dpi=160, metadata=dated.get(kind))
        if kind != "svg":
            return buffer.getvalue()
        return finished(buffer.getvalue(), page.tips, self.title, standalone=standalone)


def _framed(page: Page, sheet: Sheet) -> tuple[float, float]:
    """Write title, set-up and notes around the plot; returns the inches above and below it."""
    form, room = page.form, page.form.width - 2 * _EDGE
    title = wrapped(sheet.title, room, _TITLE, bold=True)
    about = wrapped(sheet.about, room, form.small)
    notes = wrapped(sheet.whole_note, room, form.small - 1)
    head = _EDGE + 0.25 * len(title) + 0.17 * len(about) + 0.12
    foot = 0.1 + 0.15 * len(notes) + 0.06
    total = head + page.height + foot
    left = _EDGE / form.width
    for lines, top, step, size, colour, weight in (
        (title, _EDGE, 0.25, _TITLE, INK, "bold"),
        (about, _EDGE + 0.25 * len(title), 0.17, form.small, MUTED, "normal"),
        (notes, head + page.height + 0.1, 0.15, form.small - 1, MUTED, "normal"),
    ):
        for place, line in enumerate(lines):  # line by line: an SVG shows what was wrapped here
            page.figure.text(
                left, 1 - (top + place * step) / total, line, va="top", fontsize=size, color=colour, fontweight=weight
            )
    return head, foot


def wrapped(text: str, inches: float, points: float, *, bold: bool = False) -> list[str]:
    """Lines of `text` no wider than `inches`; a word is never broken."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_inches(longer, points, bold=bold) <= inches:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


@lru_cache(maxsize=16384)
def text_inches(text: str, points: float, *, bold: bool = False) -> float:
    """Width of one line of text in a font of this size."""
    if " " in text:  # kerning aside, a line is as wide as its words, which are kept
        words = text.split(" ")
        blank = points * 0.318 / 72  # of DejaVu Sans
        return sum(text_inches(word, points, bold=bold) for word in words) + blank * (len(words) - 1)
    if not text:
        return 0.0
    font = FontProperties(family="DejaVu Sans", size=points, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72
