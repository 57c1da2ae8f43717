"""What a page is made of: templates, tables with what their cells sort by and links to records, dot plots.

The page is one file. Its script and style stand inside and are allowed by their digests alone, so that text of a record
could not run even where escaping failed. Tables are sorted and filtered by DataTables, as the package itables ships it.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from harness.metrics.intervals import Interval
from harness.records.stored import stored_run
from harness.report.digits import MeasuredNumber, ratio_spread_text, ratio_text, spread_text, supported
from harness.report.drawing.looks import palette_css
from harness.report.rankings import RankedSeries, SizeRanking, word_beside
from harness.report.results import Row
from harness.report.tables.table import Column, Table, significant

TEMPLATES = Path(__file__).parent / "templates"
MAX_ROWS = 500  # of one table on the page; a browser lays out a few thousand cells at once
MOST_DOTS = 16  # of one plot; a longer list is read in its table
_MARGIN = 4.0  # percent of the strip, left and right, so that a dot at an end is whole
_FROM_ZERO = 0.4  # an axis starts at 0 where its smallest value is below this share of the largest
_WORDS = 40  # characters from which a cell takes several lines


@dataclass(frozen=True, kw_only=True, slots=True)
class HtmlCell:
    """One cell; `order` is what it sorts by: all digits of a number, else its text."""

    text: str
    order: str
    style: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HtmlRow:
    """One row of a table; `record` is the address of the trial's record and `command` runs the trial again."""

    cells: Sequence[HtmlCell]
    marked: bool
    record: str
    command: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HtmlTable:
    """A table ready for the template: the first rows of `total`."""

    name: str
    title: str
    note: str
    columns: Sequence[Column]
    lines: Sequence[HtmlRow]
    total: int
    csv: str  # address of the table's file, empty where there is none

    @property
    def commands(self) -> bool:
        return any(line.command for line in self.lines)


class Addresses:
    """Addresses of files, relative to the page in `out`. Files outside `site` have none, where there is one: a site is
    copied whole, without what lies beside it."""

    def __init__(self, out: Path, run_dirs: Mapping[str, Path] | None = None, site: Path | None = None) -> None:
        self._out, self._run_dirs, self._site = out, run_dirs, site

    def file(self, path: Path) -> str:
        if self._site is not None and not path.resolve().is_relative_to(self._site.resolve()):
            return ""
        return quote(Path(os.path.relpath(path.resolve(), self._out.resolve())).as_posix())

    def record(self, trial: Row) -> str:
        """Of the file that holds a trial's record; empty where it is not there. Without runs the page lies in the
        directory of its run."""
        run = self._out if self._run_dirs is None else self._run_dirs.get(trial["run"])
        path = stored_run(run).record_file(trial["trial_id"]) if run else None
        return self.file(path) if path is not None and path.is_file() else ""


def grid_of(table: Table, addresses: Addresses, csv: Path | None = None) -> HtmlTable:
    """The table as the page shows it; `csv` is the file with all its rows."""
    lines = []
    for index, (row, texts) in enumerate(zip(table.rows[:MAX_ROWS], table.texts(MAX_ROWS), strict=True)):
        trial = table.trials[index] if table.trials else None
        lines.append(
            HtmlRow(
                cells=[_cell(*each) for each in zip(row, texts, table.columns, strict=True)],
                marked=index in table.marked,
                record=addresses.record(trial) if trial else "",
                command=command_of(trial) if trial else "",
            )
        )
    return HtmlTable(
        name=table.name, title=table.title, note=table.note, columns=table.columns, lines=lines,
        total=len(table.rows), csv=addresses.file(csv) if csv else "",
    )  # fmt: skip


def command_of(trial: Row) -> str:
    """The shell command that runs this trial alone again; empty where the record does not hold the run's command."""
    command = trial.get("run_command")
    return f"{command} --only {shlex.quote(trial['trial_id'])}" if command else ""


def _cell(value: Any, text: str, column: Column) -> HtmlCell:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    style = "number" if column.numeric else "words" if len(text) > _WORDS else ""
    return HtmlCell(
        text=text,
        order=float.__repr__(float(value)) if number else text,
        style=f"status {text}" if column.header == "status" else style,
    )


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip


@cache
def _assets() -> tuple[str, str]:
    """The page's style and script: DataTables, which is a module, and below it what we ask of it. Where itables is not
    installed, tables are neither sorted nor filtered."""
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    if (found := find_spec("itables")) and found.origin:
        bundle = (Path(found.origin).parent / "html" / "dt_bundle.js").read_text(encoding="utf-8")
        [library] = re.findall(r"export\s*\{[^}]*?([\w$]+) as default", bundle)
        script = f"{bundle}\nconst TableLibrary = {library};\n{script}"
    else:
        script = f"const TableLibrary = null;\n{script}"
    return (TEMPLATES / "style.css").read_text(encoding="utf-8") + palette_css(), script


@cache
def page_beginning() -> str:
    """How every page begins that `render_page` made."""
    return (TEMPLATES / "page.html.j2").read_text(encoding="utf-8").partition("{{")[0]


def render_page(name: str, **values: object) -> str:
    """A page of ours; whatever is put into it is escaped. Its policy allows our style and our script, nothing else."""
    style, script = _assets()
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return _environment().get_template(name).render(style=style, script=script, policy=policy, **values)


@cache
def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One row. `at`, `low` and `high` are percent of the strip; `at` is None for a row without a number."""

    name: str
    link: str = ""
    about: str = ""  # below the name, smaller
    at: float | None = None
    low: float | None = None
    high: float | None = None
    hover: str = ""
    cells: Sequence[str] = ()
    verdict: str = ""  # in words, with the ratio behind it
    kind: str = ""  # subject, faster, slower or same: how the dot is coloured


@dataclass(frozen=True, kw_only=True, slots=True)
class Dots:
    """A sorted dot plot: rows under common headers, at places in percent of a strip, so that the page draws it at any
    width. `line` is where a vertical line stands: the 1 of ratios."""

    headers: Sequence[str]  # of the strip, of the cells, of the verdict
    rows: Sequence[Dot]
    ticks: Sequence[tuple[float, str]]
    line: float | None = None
    note: str = ""


class Axis:
    """A linear axis from the smallest to the largest of the values and their intervals."""

    def __init__(self, values: Sequence[MeasuredNumber], holds: Sequence[float] = ()) -> None:
        ends = [end for value in values for end in (value, *_ends(value))] + list(holds)
        low, high = min(ends), max(ends)
        if low < _FROM_ZERO * high:
            low = 0.0
        if low == high:
            low, high = 0.95 * low, 1.05 * high
        self.low, self.high = low, high

    def at(self, value: float) -> float:
        """Percent of the strip."""
        share = (value - self.low) / (self.high - self.low)
        return round(_MARGIN + (100 - 2 * _MARGIN) * share, 2)

    def placed(self, dot: Dot, value: MeasuredNumber) -> Dot:
        """The row with the place of its number, and of its interval."""
        low, high = map(self.at, _ends(value) or (value, value))
        return replace(dot, at=self.at(value), low=low, high=high)

    def ticks(self, at_most: int = 4) -> list[tuple[float, str]]:
        """Round numbers along the axis with their places."""
        rough = (self.high - self.low) / at_most
        unit: float = 10 ** math.floor(math.log10(rough))
        step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
        decimals = max(0, -math.floor(math.log10(step)))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(self.at(step * number), f"{step * number:,.{decimals}f}") for number in range(first, last + 1)]


def dots_of(ranking: SizeRanking) -> Dots | None:
    """The ranking as a plot of speeds, the fastest first; None for a single series."""
    if len(ranking.compared) + len(ranking.lost) < 2:
        return None
    shown = ranking.compared[:MOST_DOTS]
    if ranking.subject not in shown:
        shown[-1] = ranking.subject
    axis = Axis([series.speed for series in shown])
    training = ranking.rows[0]["task"] == "train"
    use, header, scale = ("mfu", "MFU %", 100.0) if training else ("tflops_per_gpu", "TFLOP/s", 1.0)
    used = any(series.of(use) is not None for series in shown)
    columns = [*([(use, scale)] if used else []), ("peak_memory_gib", 1.0)]
    rows = []
    for series in shown:
        verdict, kind = _beside(ranking, series)
        speed = supported()(series.speed)
        figures = [(series.of(column), scale) for column, scale in columns]
        texts = ["" if value is None else significant(3, scale)(value) for value, scale in figures]
        between = f", {spread_text(series.speed.spread)}" if series.speed.spread else ""
        hover = f"{series.name}: {speed} tokens/s per GPU{between}"
        dot = Dot(name=series.name, cells=[speed, *texts], verdict=verdict, kind=kind, hover=hover)
        rows.append(axis.placed(dot, series.speed))
    blank = [""] * len(columns)
    rows += [Dot(name=name, cells=[status, *blank], kind="lost") for name, status in ranking.lost[:MOST_DOTS]]
    left = f"The fastest {len(shown)} of {len(ranking.compared)}; the table of all trials has the others."
    return Dots(
        headers=("", "tokens/s per GPU", *([header] if used else []), "peak GiB", f"against {ranking.subject.short}"),
        rows=rows,
        ticks=axis.ticks(),
        note=left if len(shown) < len(ranking.compared) else "",
    )


def _beside(ranking: SizeRanking, series: RankedSeries) -> tuple[str, str]:
    """The verdict on a row against the subject, in words with the ratio, and what colours its dot. Of several methods
    none is put beside itself with other settings."""
    subject = ranking.subject
    if series is subject:
        return "", "subject"
    found = ranking.beside(series)
    if found is None or (ranking.of_methods and series.method == subject.method):
        return "", "same"
    word = word_beside(found)
    kind = "same" if word.startswith("not") else word.split()[0]
    spread = f" ({found.between})" if found.spread else ""
    name = subject.method if ranking.of_methods else subject.name
    return f"{word}; {name} {ratio_text(found.ratio)}×{spread}", kind


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioRow:
    """One row of a plot of ratios: `ratio` is of the speed of `subject`, over that of `other`."""

    subject: str = "burst"
    name: str
    link: str
    about: str
    ratio: MeasuredNumber
    verdict: str
    other: str


def ratio_dots(found: Sequence[RatioRow], note: str = "") -> Dots | None:
    """A plot of ratios around 1, the largest first; None without one."""
    if not found:
        return None
    axis = Axis([one.ratio for one in found], holds=(1.0,))
    rows = []
    for one in sorted(found, key=lambda one: -one.ratio):
        word, spread = one.verdict.split()[0], f" ({ratio_spread_text(one.ratio.spread)})" if one.ratio.spread else ""
        ratio = ratio_text(one.ratio)
        dot = Dot(
            name=one.name, link=one.link, about=one.about, cells=[f"{ratio}×"],
            kind=word if word in ("faster", "slower") else "same", verdict=f"{one.verdict}{spread}; {one.other}",
            hover=f"{one.name}: {ratio} times as fast as {one.other}{spread}",
        )  # fmt: skip
        rows.append(axis.placed(dot, one.ratio))
    headers = ("", "times as fast", "against the fastest other")
    return Dots(headers=headers, rows=rows, ticks=axis.ticks(), line=axis.at(1.0), note=note)


def _ends(value: MeasuredNumber) -> tuple[float, ...]:
    spread = value.spread
    return () if spread is None or (isinstance(spread, Interval) and spread.too_wide) else spread.ends
