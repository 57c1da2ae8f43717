"""Numbers that pages quote from published records, written between markers by one command, so that none is typed in.

    python -m harness.pages           # or: make docs

`docs/quoted.yaml` says for each number which record it is from, what is computed and how it is rounded. A page shows it
as `<!--NAME-->93%<!--/-->`, a table between the same markers on lines of their own. Conditions (`where`) and
expressions (`value`) are those of pandas' `DataFrame.query` and `eval` over the columns of results.csv; a column with a
dot in its name stands in backquotes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import yaml

from engine.atomic import write_atomic
from engine.reader import from_json
from harness.base.errors import UsageError
from harness.base.lengths import format_length
from harness.metrics.intervals import Interval, TwoRounds
from harness.records.stored import run_named
from harness.report.digits import spread_text
from harness.report.drawing.sheet import Sheet
from harness.report.figures import all_figures, render
from harness.report.page import read_runs
from harness.report.results import Row, spread_of
from harness.report.speedup import Speedup, speedup
from harness.report.tables.trials import speed_of

DEFINITIONS = Path("docs") / "quoted.yaml"
RECORDS = Path("results") / "published"
PAGES = ("README.md", "docs/*.md", "docs/notes/*.md", "results/published/*.md")
_MARKED = re.compile(r"<!--(\w+)-->(.*?)<!--/-->", re.DOTALL)
NOT_MEASURED = "not measured"
_TAKEN = {"min": min, "max": max}


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """A number or a word: an expression of the columns of one record, or one (`of`) of other quantities by name."""

    run: str = ""  # its name below results/published; inside a table, that of its line
    where: str = ""  # a condition that leaves one row
    value: str = ""
    take: Literal["the only", "min", "max"] = "the only"  # of the rows that are left
    of: str = ""
    than: str = ""  # a condition: how many times as fast the row is as the fastest of these, and the spread
    form: str = "{}"  # as of str.format, or `length`: 65536 as 64k; with `than` of the ratio alone


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotedTable:
    """A Markdown table: a line for each value of the columns `each`, or for each condition of `lines`, by its label."""

    runs: list[str]
    columns: dict[str, Quantity]  # by header
    where: str = ""
    each: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    label: str = ""  # header of the labels
    let: dict[str, Quantity] = field(default_factory=dict)  # what `of` of a column may name, computed per line
    complete: bool = False  # a line that lacks a record of a column is left out


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotedFigure:
    """A figure of `harness.report.figures` as an SVG file."""

    figure: str
    runs: list[str]
    where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Definitions:
    """What docs/quoted.yaml holds; drawings by their path."""

    numbers: dict[str, Quantity]
    tables: dict[str, QuotedTable]
    drawings: dict[str, QuotedFigure]


class QuantityMissing(Exception):
    """A record that a quantity asks for is not there, or gave no number; the text says which status it has."""


class Quotes:
    """All quantities, tables and drawings of a checkout, computed from its published records when asked for.

    `made` has further tables by name, as lines of Markdown, that code above this package makes: the claims of the paper
    are judged by `harness.reproduce`, which imports reports and is not imported by them.
    """

    def __init__(self, root: Path, made: Mapping[str, Callable[[], Sequence[str]]] | None = None) -> None:
        self.root = root
        self.made = dict(made or {})
        try:  # by YAML's own rules, because its tables share columns by anchors
            self.definitions = from_json(Definitions, yaml.safe_load((root / DEFINITIONS).read_text(encoding="utf-8")))
        except (ValueError, yaml.YAMLError) as error:
            raise UsageError(f"{DEFINITIONS} cannot be used ({error})") from error
        self._frames: dict[str, pd.DataFrame] = {}

    def text(self, name: str) -> str:
        """The number or table of this name as a page shows it. Raises UsageError where it cannot be computed."""
        try:
            if name in self.made:
                return "\n" + "\n".join(self.made[name]()) + "\n"
            if name in self.definitions.tables:
                return "\n" + "\n".join(self._table(self.definitions.tables[name])) + "\n"
            quantity = self.definitions.numbers[name]
            return _formatted(self._number(name), quantity.form)
        except KeyError as error:
            raise UsageError(f"{DEFINITIONS} defines no {error}; add it, or correct the marker") from error
        except QuantityMissing as error:
            raise UsageError(f"{name} of {DEFINITIONS} has no number ({error}); correct its condition") from error
        except (ValueError, TypeError, SyntaxError, pd.errors.UndefinedVariableError) as error:
            raise UsageError(f"{name} of {DEFINITIONS} cannot be computed ({error})") from error

    def drawing(self, path: str) -> bytes:
        """The SVG file at `path`. Its text is not drawn as paths, so that changed numbers show in a diff."""
        drawing = self.definitions.drawings[path]
        frame = self._frame(drawing.runs)
        rows: list[Row] = list(_rows(frame, drawing.where)["row"])
        shown = all_figures()[drawing.figure].draw(rows)
        if not isinstance(shown, Sheet):
            raise UsageError(f"{path} of {DEFINITIONS} is no figure ({shown or 'no number'}); correct its runs")
        return render(shown, "svg")

    @property
    def names(self) -> list[str]:
        """Of all numbers and tables."""
        return [*self.definitions.numbers, *self.definitions.tables, *self.made]

    def _number(self, name: str) -> Any:
        quantity = self.definitions.numbers[name]
        if quantity.of:
            return _expression(quantity.of, {other: self._number(other) for other in _names_in(quantity.of)})
        return _value(self._frame([quantity.run]), quantity)

    def _frame(self, runs: Sequence[str]) -> pd.DataFrame:
        """The rows of these runs; column `row` holds each as figures take it, `step_spread`, `step_ms_spread` and
        `speed_spread` the interval of its median, or what two rounds gave."""
        for run in runs:
            if run not in self._frames:
                _, rows = read_runs([run_named(self.root / RECORDS, run)])
                if not rows:
                    raise UsageError(f"no record below {RECORDS / run}; correct the run in {DEFINITIONS}")
                self._frames[run] = pd.DataFrame(rows).assign(row=rows, **_spreads(rows))
        frames = [self._frames[run] for run in runs]
        return frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)

    def _table(self, table: QuotedTable) -> list[str]:
        frame = _rows(self._frame(table.runs), table.where)
        if table.lines:
            groups = [([label], _rows(frame, condition)) for label, condition in table.lines.items()]
        else:
            groups = [([], group) for _, group in frame.groupby(table.each, sort=True)]
        cells = [
            [*label, *(self._cell(group, column, table.let) for column in table.columns.values())]
            for label, group in groups
        ]
        headers = [*([table.label] if table.lines else []), *table.columns]
        whole = [line for line in cells if not table.complete or NOT_MEASURED not in line]
        return [f"| {' | '.join(line)} |" for line in (headers, ["---"] * len(headers), *whole)]

    def _cell(self, group: pd.DataFrame, column: Quantity, let: Mapping[str, Quantity]) -> str:
        """A cell: the number, else the status of the trial that gave none, else `not measured`; `-` where the trial is
        ok and has no such number, as with the limits of an interval after one round."""

        def value(quantity: Quantity) -> Any:
            return _value(self._frame([quantity.run]) if quantity.run else group, quantity)

        try:
            if column.of:
                names = {name: value(let[name]) for name in _names_in(column.of)}
                return _formatted(_expression(column.of, names), column.form)
            return _formatted(value(column), column.form)
        except QuantityMissing as status:
            return "-" if str(status) == "ok" else str(status)


def rewritten(page: str, quotes: Quotes) -> str:
    """A page with every number and table between markers as the records have it.

    Raises UsageError for a marker of a number that begins a line: Markdown would end the paragraph there.
    """

    def written(match: re.Match[str]) -> str:
        name = match.group(1)
        begins_line = match.start() == 0 or page[match.start() - 1] == "\n"
        if begins_line and name in quotes.definitions.numbers:
            raise UsageError(f"the marker of {name} begins a line, where Markdown ends a paragraph; move it")
        return f"<!--{name}-->{quotes.text(name)}<!--/-->"

    return _MARKED.sub(written, page)


def quoted_names(page: str) -> list[str]:
    """Names of the markers on a page, in their order."""
    return [match.group(1) for match in _MARKED.finditer(page)]


def pages_of(root: Path) -> list[Path]:
    """The pages of a checkout that may quote records."""
    return sorted(path for pattern in PAGES for path in root.glob(pattern))


def write_pages(quotes: Quotes) -> None:
    """Write every page and figure of the checkout that differs from its records, and print its path."""
    root = quotes.root
    for path in pages_of(root):
        page = path.read_text(encoding="utf-8")
        if (new := rewritten(page, quotes)) != page:
            write_atomic(path, new)
            print(f"rewritten: {path.relative_to(root)}")
    for name in quotes.definitions.drawings:
        path, figure = root / name, quotes.drawing(name)
        if not path.exists() or path.read_bytes() != figure:
            write_atomic(path, figure)
            print(f"drawn: {name}")


def _spreads(rows: Sequence[Row]) -> dict[str, pd.Series]:
    spreads = list(map(spread_of, rows))
    found = {
        "step_spread": spreads,
        "step_ms_spread": [spread and spread.scaled(1e3) for spread in spreads],
        "speed_spread": [getattr(speed_of(row), "spread", None) for row in rows],
    }
    return {name: pd.Series(values, dtype=object) for name, values in found.items()}


def _rows(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    return frame.loc[_of_columns(frame, where)] if where else frame


def _of_columns(frame: pd.DataFrame, expression: str) -> pd.Series:
    """A column, or an expression of columns. pandas prepares every column that it is given: it gets the named ones."""
    if expression in frame.columns:
        return frame[expression]
    named = {*_names_in(expression), *re.findall("`([^`]+)`", expression)}
    return frame[[column for column in frame.columns if column in named]].eval(expression, engine="python")


def _value(frame: pd.DataFrame, quantity: Quantity) -> Any:
    """The quantity in the rows that meet its condition. Raises QuantityMissing without any, ValueError for two."""
    rows = _rows(frame, quantity.where)
    if rows.empty:
        raise QuantityMissing(NOT_MEASURED)
    if quantity.than:
        return _times_as_fast(rows, _rows(frame, quantity.than))
    values = _of_columns(rows, quantity.value).dropna()
    if values.empty:
        raise QuantityMissing("/".join(sorted(set(rows["status"]))))
    if quantity.take == "the only":
        if len(rows) > 1:
            raise ValueError(f"{len(rows)} rows meet {quantity.where!r}; expected one")
        return values.iloc[0]
    return _TAKEN[quantity.take](values)


def _times_as_fast(rows: pd.DataFrame, others: pd.DataFrame) -> Speedup:
    """Speed of the only row over that of the fastest other, as reports compute it. Raises ValueError for several rows,
    for no number and for one round, which has neither an interval nor a second value."""
    if len(rows) > 1:
        raise ValueError(f"{len(rows)} rows are compared at once; expected one")
    fastest = others[others["step_seconds_median"] == others["step_seconds_median"].min()]
    found = speedup(rows["row"], fastest["row"])
    if found is None or found.spread is None:
        raise ValueError("a ratio needs steps of both sides, in two rounds or more")
    return found


def _names_in(expression: str) -> list[str]:
    return re.findall(r"(?<![\w.])[A-Za-z_]\w*", expression)  # not the e of 1e3


def _expression(expression: str, names: Mapping[str, Any]) -> Any:
    return pd.eval(expression, engine="python", local_dict=dict(names), global_dict={})


def _formatted(value: Any, form: str) -> str:
    if form == "length":
        return format_length(int(value))
    if isinstance(value, Interval | TwoRounds):
        return spread_text(value, form.format)
    if isinstance(value, Speedup):
        if isinstance(value.spread, TwoRounds):  # the two values say all, in the place of the ratio and an interval
            return spread_text(value.spread, form.format)
        assert value.spread is not None, "refused where it was computed"
        return f"{form.format(value.value)} ({spread_text(value.spread, form.format)})"
    return form.format(value)


if __name__ == "__main__":
    sys.exit("pages are written by `python -m harness.pages` (`make docs`), which has the claims of the paper as well")
