"""A table as the page shows it: cells with what they sort by, links to records, commands, and the first rows of many.

The page is one file. Its script and style stand inside and are allowed by their digests alone, so that text of a record
could not run even where escaping failed.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from harness.records.record import RECORD_FILE
from harness.report.drawing.looks import palette_css
from harness.report.results import Row
from harness.report.tables.table import Column, Table, without_empty_columns
from harness.report.weak_forms import BELOW_ORIGINAL

TEMPLATES = Path(__file__).parent / "templates"
MAX_ROWS = 500  # of one table on the page; a browser lays out a few thousand cells at once
# Headers of short texts that take several lines in need.
_WRAPPED = ("next", "verdict", "reference", "settings", "from the table", "by hand", BELOW_ORIGINAL)
_NAMES = ("trial", "method", "head")  # headers of the column that says which trial a line is; it comes first


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell. `sort` is the number it sorts by, empty where its text is."""

    text: str
    sort: str
    style: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One row of a table; `record` is the address of the trial's record and `command` runs the trial again."""

    cells: Sequence[Cell]
    marked: bool
    record: str
    command: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A table ready for the template: the first rows of `total`."""

    name: str
    title: str
    note: str
    columns: Sequence[Column]
    lines: Sequence[Line]
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

    def record(self, trial: Mapping[str, Any]) -> str:
        """Of a trial's record; empty where it is not there. Without directories of runs the page lies in the run's."""
        run_dir = self._out if self._run_dirs is None else self._run_dirs.get(trial["run"])
        path = run_dir / "trials" / trial["trial_id"] / RECORD_FILE if run_dir else None
        return self.file(path) if path is not None and path.is_file() else ""


def grid_of(table: Table, addresses: Addresses, csv: Path | None = None) -> Grid:
    """The table for the page; `csv` is the file that holds all its rows."""
    table = _name_first(table)
    lines = []
    for index, (row, texts) in enumerate(zip(table.rows[:MAX_ROWS], first_rows(table).texts(), strict=True)):
        trial = table.trials[index] if table.trials else None
        lines.append(
            Line(
                cells=[_cell(*each) for each in zip(row, texts, table.columns, strict=True)],
                marked=index in table.marked,
                record=addresses.record(trial) if trial else "",
                command=command_of(trial) if trial else "",
            )
        )
    return Grid(
        name=table.name, title=table.title, note=table.note, columns=table.columns, lines=lines,
        total=len(table.rows), csv=addresses.file(csv) if csv else "",
    )  # fmt: skip


def first_rows(table: Table) -> Table:
    """The table with the rows that the page shows."""
    return replace(table, rows=table.rows[:MAX_ROWS], trials=table.trials[:MAX_ROWS])


def command_of(trial: Mapping[str, Any]) -> str:
    """The shell command that runs this trial alone again; empty where the record does not hold the run's command."""
    command = trial.get("run_command")
    return f"{command} --only {shlex.quote(trial['trial_id'])}" if command else ""


def with_provenance(table: Table, rows: Sequence[Row]) -> Table:
    """The table of all trials with columns on where each comes from; in files results.csv has them."""
    columns = tuple(Column(header=header) for header in ("seed", "started (UTC)", "commit", "driver"))
    seeds = len({row["seed"] for row in rows}) > 1
    added = [
        (row["seed"] if seeds else None, (row["started_at"] or "")[:19].replace("T", " ") or None,
         (row["commit"] or "")[:10] or None, row["driver"])
        for row in rows
    ]  # fmt: skip
    return without_empty_columns(
        replace(
            table,
            columns=table.columns + columns,
            rows=tuple(line + more for line, more in zip(table.rows, added, strict=True)),
            trials=tuple(rows),
        )
    )


def _name_first(table: Table) -> Table:
    """The same table with the column that names its lines in front, which stays in place while the others scroll."""
    headers = [column.header for column in table.columns]
    place = next((headers.index(name) for name in _NAMES if name in headers), 0)
    order = [place, *(index for index in range(len(headers)) if index != place)]
    return replace(
        table,
        columns=tuple(table.columns[index] for index in order),
        rows=tuple(tuple(row[index] for index in order) for row in table.rows),
    )


def _cell(value: Any, text: str, column: Column) -> Cell:
    key = column.sort(value) if column.sort is not None and value is not None else value
    number = isinstance(key, int | float) and not isinstance(key, bool)
    style = "number" if column.numeric else ""
    if column.header == "status":
        style = f"status {text}"
    elif column.header in ("reason", "caveats", "note") and text:
        style = "words"
    elif column.header in _WRAPPED:
        style = "wrap"
    return Cell(text=text, sort=repr(key) if number else "", style=style)


def render_page(name: str, **values: Any) -> str:
    """A page of ours; whatever is put into it is escaped. Its policy allows our style and our script, nothing else."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    style, script = ((TEMPLATES / file).read_text(encoding="utf-8") for file in ("style.css", "page.js"))
    style += palette_css()
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template(name).render(style=style, script=script, policy=policy, **values)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
