"""results.csv, tables and figures beside those that `burst report` makes of the same records today."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.image import imread
from PIL import Image

from engine.reader import read_regular
from harness.report.figures import latex_of, render
from harness.report.page import draw_plots, report_tables
from harness.report.results import Row, cell, columns_of
from harness.report.tables.table import FORMATS, to_csv, to_latex, to_markdown
from harness.verify.finding import Failure
from harness.verify.formulas import Figure
from harness.verify.private import private_in

RESULTS_FILE = "results.csv"
_SHOWN_COLUMNS = 4
_PRECISION = 1e-9  # relative: of two programs that add the same numbers in another order
_SAME_PICTURE = 2.0  # mean difference of a pixel's channels, of 255: machines round colours of edges differently
_FORMS = {"md": to_markdown, "tex": to_latex, "csv": to_csv}


def read_results(run_dir: Path) -> list[dict[str, str]] | None:
    """Rows of results.csv by column, None where there is no such file. Raises ValueError for one that is no table."""
    try:
        text = read_regular(run_dir / RESULTS_FILE).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{RESULTS_FILE} cannot be read ({error.strerror})") from error
    lines = list(csv.reader(io.StringIO(text, newline="")))
    if not lines or any(len(line) != len(lines[0]) for line in lines):
        raise ValueError(f"{RESULTS_FILE} is no table with one cell per column in every line")
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def as_line(row: Row) -> dict[str, str]:
    """A row as results.csv has it."""
    return {name: cell(value) for name, value in row.items()}


def results_failures(published: Sequence[Mapping[str, str]], rows: Sequence[Row], by: str) -> Iterator[Failure]:
    """Rows and columns of results.csv that differ from those of the records. `by`: the command that writes them."""

    def differs(place: str, found: str, expected: str) -> Failure:
        return Failure(place=place, check=RESULTS_FILE, found=found, expected=expected)

    columns = columns_of(rows)
    have = list(published[0]) if published else []
    if missing := [name for name in columns if name not in have]:
        yield differs(RESULTS_FILE, f"no column {_some(missing)}", f"the columns that {by} writes")
    if unknown := [name for name in have if name not in columns]:
        yield differs(RESULTS_FILE, f"column {_some(unknown)}", f"the columns that {by} writes")
    lines = {line.get("trial_id", ""): line for line in published}
    if len(lines) != len(published):
        yield differs(RESULTS_FILE, "two rows of one trial", "one row per record")
    for row in rows:
        line = lines.pop(row["trial_id"], None)
        if line is None:
            yield differs(row["trial_id"], "no row", f"the row that {by} writes")
            continue
        unequal = [name for name in columns if name in line and line[name] != cell(row.get(name))]
        if unequal:
            first = unequal[0]
            yield differs(
                row["trial_id"],
                f"{_some(unequal)} (the first: {_shown(line[first])})",
                f"the row that {by} writes (the first: {_shown(cell(row.get(first)))})",
            )
    for trial_id in lines:
        yield differs(trial_id or RESULTS_FILE, "a row without a record", "one row per record")


def figures_failures(
    published: Sequence[Mapping[str, str]], figures: Mapping[str, Mapping[str, Figure]]
) -> Iterator[Failure]:
    """Cells of results.csv that the second formulas do not give; `figures` are theirs by trial id."""
    for line in published:
        for name, expected in figures.get(line.get("trial_id", ""), {}).items():
            text = line.get(name, "")
            if not _same(text, expected):
                yield Failure(
                    place=line["trial_id"],
                    check="figures",
                    found=f"{name} {text[:40] or 'empty'}",
                    expected="empty" if expected is None else f"{expected:.12g} by the second formulas",
                )


def table_failures(run_dir: Path, rows: Sequence[Row], by: str) -> tuple[int, list[Failure]]:
    """How many files of tables/ were compared, and those that differ from today's, are too many or are missing."""
    folder = run_dir / "tables"
    kept = _files(folder)
    kinds = [kind for kind in FORMATS if any(name.endswith(f".{kind}") for name in kept)]
    today = {f"{table.name}.{kind}": _FORMS[kind](table) for table in report_tables(rows) for kind in kinds}
    failures = list(_named(folder.name, kept, today, by))
    for name in sorted(kept & today.keys()):
        if _bytes(folder / name) != today[name].encode():
            failures.append(
                Failure(
                    place=f"tables/{name}",
                    check="tables",
                    found="other contents",
                    expected=f"the table that {by} writes",
                )
            )
    return len(kept), failures


def figure_failures(run_dir: Path, rows: Sequence[Row], by: str) -> tuple[int, list[Failure]]:
    """The same of figures/: names, and of PNG files also what they show."""
    folder = run_dir / "figures"
    kept = _files(folder)
    if not kept:
        return 0, []
    kinds = sorted({Path(name).suffix[1:] for name in kept} & {"png", "pdf", "svg", "tex"})
    today = {f"{plot.name}.{kind}": plot for plot in draw_plots(rows) for kind in kinds}
    failures = list(_named(folder.name, kept, today, by))
    for name in sorted(kept & today.keys()):
        content, kind = _bytes(folder / name), Path(name).suffix[1:]
        plot = today[name]
        if kind == "png":
            problem = _picture_problem(content, render(plot.figure, "png"))
        elif kind == "tex":
            problem = "" if content == latex_of(plot.figure, plot.name).encode() else "another caption"
        else:
            start = {"pdf": b"%PDF-", "svg": b"<?xml"}[kind]
            problem = "" if content.startswith(start) else f"no {kind.upper()} file"
        if problem:
            expected = f"the figure that {by} draws"
            failures.append(Failure(place=f"figures/{name}", check="figures/", found=problem, expected=expected))
    return len(kept), failures


def _named(folder: str, kept: set[str], today: Mapping[str, object], by: str) -> Iterator[Failure]:
    """Files that are too many or missing."""
    check = "tables" if folder == "tables" else "figures/"
    for name in sorted(kept - today.keys()):
        expected = f"only files that {by} makes"
        yield Failure(place=f"{folder}/{name}", check=check, found="a file that no report makes", expected=expected)
    for name in sorted(today.keys() - kept):
        expected = f"the file that {by} makes"
        yield Failure(place=f"{folder}/{name}", check=check, found="no such file", expected=expected)


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except (OSError, ValueError):
        return b""


def _picture_problem(content: bytes, today: bytes) -> str:
    """How a PNG differs from the one drawn now; one of another release of matplotlib is not compared."""
    if content == today:
        return ""
    try:
        kept, drawn = (Image.open(io.BytesIO(data), formats=("PNG",)) for data in (content, today))
        if kept.info.get("Software") != drawn.info.get("Software"):
            return ""
        if kept.size != drawn.size:
            return "a picture of another size"
        apart = np.abs(imread(io.BytesIO(content), "png") - imread(io.BytesIO(today), "png")).mean() * 255
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return "no PNG picture"
    return "another picture" if apart > _SAME_PICTURE else ""


def _same(text: str, expected: Figure) -> bool:
    if expected is None or not text:
        return expected is None and not text
    try:
        return math.isclose(float(text), expected, rel_tol=_PRECISION)
    except ValueError:
        return False


def _shown(text: str) -> str:
    """A cell inside a sentence; a private value is not repeated."""
    if private_in(text):
        return "a value that is not shown"
    return text[:80] or "empty"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_COLUMNS
    return ", ".join(names[:_SHOWN_COLUMNS]) + (f" and {more} more" if more > 0 else "")
