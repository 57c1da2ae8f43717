"""A table as a value, and its forms: Markdown, LaTeX, CSV. HTML is made by the report's template, which escapes."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.atomic import write_atomic
from harness.report.results import Row, cell

FORMATS = ("md", "tex", "csv")


def plain(value: object) -> str:
    """Text of a value in a printed table: yes and no, everything else as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def significant(digits: int, scale: float = 1.0) -> Callable[[float], str]:
    """Formats a number x `scale` with this many significant digits, thousands with a comma: 1,235, 12.3, 0.0123."""

    def form(value: float) -> str:
        number = value * scale
        if number == 0:
            return "0"
        scientific = f"{number:.{digits - 1}e}"
        exponent = int(scientific.split("e")[1])  # after rounding: 99.96 is 1.00e2
        return scientific if exponent < -4 else f"{number:,.{max(0, digits - 1 - exponent)}f}"

    return form


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column: how its header reads, and how its values are printed. CSV keeps the unprinted value."""

    header: str
    form: Callable[[Any], str] = plain
    numeric: bool = False  # aligned to the right
    group: str = ""  # of columns that the page shows or hides together
    value: Callable[[Any], Any] | None = None  # of a line's cell, where `table_of` makes the rows


def text(header: str, value: str | Callable[[Any], Any], *, group: str = "") -> Column:
    """A column of words. `value` is the line's key, or what a function makes of the line."""
    return Column(header=header, group=group, value=_reader(value))


def number(
    header: str, value: str | Callable[[Any], Any], form: Callable[[Any], str] = plain, *, group: str = ""
) -> Column:
    """A column of numbers, with one that is absent as None."""
    return Column(header=header, form=form, numeric=True, group=group, value=_reader(value))


def _reader(value: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    return (lambda line: line.get(value)) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A titled table. A None is an absent value and prints as nothing; `marked` rows want attention."""

    name: str  # stem of its files
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[object, ...], ...]
    note: str = ""  # formulas and conventions, printed below
    marked: frozenset[int] = frozenset()
    trials: tuple[Row, ...] = ()  # where every line is one trial: the rows, in order

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), f"table {self.name} is ragged"
        assert len(self.trials) in (0, len(self.rows)), f"table {self.name} has {len(self.trials)} trials"

    def texts(self, first: int | None = None) -> list[list[str]]:
        """The cells of the first rows, or of all, as printed."""
        return [
            ["" if value is None else _text(value, column) for value, column in zip(row, self.columns, strict=True)]
            for row in self.rows[:first]
        ]


def without_empty_columns(table: Table) -> Table:
    """The same table less the columns in which no row has a value, such as MFU on a CPU."""
    kept = [index for index in range(len(table.columns)) if any(row[index] is not None for row in table.rows)]
    return replace(
        table,
        columns=tuple(table.columns[index] for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in table.rows),
    )


def table_of(
    name: str,
    title: str,
    columns: Sequence[Column],
    lines: Sequence[Any],
    *,
    note: str = "",
    marked: Callable[[Any], bool] = lambda _: False,
    trials: Sequence[Row] = (),
) -> Table | None:
    """A table with one row per line, each column reading its own value of it; columns without any value are left out.

    None without a line, so that a report has no empty table.
    """
    if not lines:
        return None
    readers = [column.value for column in columns]
    assert all(readers), f"a column of table {name} has no value"
    return without_empty_columns(
        Table(
            name=name, title=title, columns=tuple(columns),
            rows=tuple(tuple(reader(line) for reader in readers if reader) for line in lines), note=note,
            marked=frozenset(index for index, line in enumerate(lines) if marked(line)), trials=tuple(trials),
        )
    )  # fmt: skip


def to_markdown(table: Table) -> str:
    """GitHub-flavoured Markdown with title and note."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rule = ("---:" if column.numeric else "---" for column in table.columns)
    body = [line(map(_escape_markdown, row)) for row in table.texts()]
    lines = [
        f"### {_escape_markdown(table.title)}",
        "",
        line(_escape_markdown(column.header) for column in table.columns),
        line(rule),
    ]
    return "\n".join([*lines, *body, *(["", _escape_markdown(table.note)] if table.note else [])]) + "\n"


def to_latex(table: Table) -> str:
    """A LaTeX `table` that needs the booktabs package; every cell is escaped."""

    def line(cells: Iterable[str]) -> str:
        return "  " + " & ".join(map(escape_latex, cells)) + r" \\"

    align = "".join("r" if column.numeric else "l" for column in table.columns)
    lines = [
        r"\begin{table}",
        r"  \centering\small",
        rf"  \caption{{{escape_latex(table.title)}}}",
        rf"  \begin{{tabular}}{{{align}}}",
        r"  \toprule",
        line(column.header for column in table.columns),
        r"  \midrule",
        *(line(row) for row in table.texts()),
        r"  \bottomrule",
        r"  \end{tabular}",
    ]
    if table.note:
        lines.append(rf"  \par\smallskip\footnotesize {escape_latex(table.note)}")
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def to_csv(table: Table) -> str:
    """Comma-separated values with full precision, absent values empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(column.header for column in table.columns)
    writer.writerows([cell(value) for value in row] for row in table.rows)
    return text.getvalue()


def save_table(table: Table, folder: Path, kinds: Sequence[str]) -> list[Path]:
    """Write `folder`/name.md, .tex, .csv as asked, each whole or not at all."""
    forms: dict[str, Callable[[Table], str]] = {"md": to_markdown, "tex": to_latex, "csv": to_csv}
    return [write_atomic(folder / f"{table.name}.{kind}", forms[kind](table)) for kind in kinds]


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "×": r"$\times$", "÷": r"$\div$", "·": r"$\cdot$", "ᵀ": r"\textsuperscript{T}", "−": "$-$", "‖": r"$\|$",
    "†": r"\textdagger{}", "\n": " ",
}  # fmt: skip


def escape_latex(text: str) -> str:
    """`text` so that LaTeX prints it as it is, on one line."""
    return "".join(_LATEX.get(character, character) for character in text)


def _escape_markdown(text: str) -> str:
    # Underscores stay: inside a word, as in method names, they mean nothing in GitHub's dialect.
    for character in "\\|`*<":
        text = text.replace(character, "\\" + character)
    return text.replace("\n", " ")


def _text(value: object, column: Column) -> str:
    # A cell of a numeric column may hold a status instead of its number.
    return value if isinstance(value, str) else column.form(value)
