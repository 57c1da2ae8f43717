"""What a page is made of: tables with what their cells sort by and links to records, templates.

The page is one file. Its script and style stand inside and are allowed by their digests alone, so that text of a record
could not run even where escaping failed. Tables are sorted and filtered by DataTables, as the package itables ships it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from harness.records.stored import stored_run
from harness.report.drawing.looks import palette_css
from harness.report.results import Row
from harness.report.tables.table import Column, Table

TEMPLATES = Path(__file__).parent / "templates"
MAX_ROWS = 500  # of one table on the page; a browser lays out a few thousand cells at once
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
    if found := find_spec("itables"):
        [folder] = found.submodule_search_locations or ()
        bundle = (Path(folder) / "html" / "dt_bundle.js").read_text(encoding="utf-8")
        [library] = re.findall(r"export\s*\{[^}]*?([\w$]+) as default", bundle)
        script = f"{bundle}\nconst TableLibrary = {library};\n{script}"
    else:
        script = f"const TableLibrary = null;\n{script}"
    return (TEMPLATES / "style.css").read_text(encoding="utf-8") + palette_css(), script


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
