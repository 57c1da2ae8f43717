"""results.csv, tables and figures beside those that `burst report` makes of the same records today."""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.image import imread
from PIL import Image

from engine.reader import read_regular
from harness.records.provenance import private_in
from harness.records.stored import RESULTS_FILE
from harness.report import figures
from harness.report.page import write_report_of
from harness.report.results import Row, cell, columns_of
from harness.report.tables import table
from harness.verify.finding import Failure

_FOLDERS = {"tables": ("tables", table.FORMATS), "figures": ("figures/", figures.FORMATS)}  # check, formats asked for
_SHOWN_COLUMNS = 4
_SAME_PICTURE = 2.0  # mean difference of a pixel's channels, of 255: machines round colours of edges differently
_BEGINNINGS = {".pdf": b"%PDF-", ".svg": b"<?xml"}  # of figures whose bytes depend on the machine


def read_results(run_dir: Path) -> list[dict[str, str]] | None:
    """Rows of results.csv by column, None where there is no such file. Raises ValueError for one that is no table."""
    try:
        text = read_regular(run_dir / RESULTS_FILE).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{RESULTS_FILE} cannot be read ({error.strerror})") from error
    try:
        lines = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise ValueError(f"{RESULTS_FILE} is no table ({error})") from error
    if not lines or any(len(line) != len(lines[0]) for line in lines):
        raise ValueError(f"{RESULTS_FILE} is no table with one cell per column in every line")
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def results_failures(published: Sequence[Mapping[str, str]], rows: Sequence[Row], by: str) -> Iterator[Failure]:
    """Rows and columns of results.csv that differ from those of the records. `by`: the command that writes them."""

    def differs(place: str, found: str, expected: str) -> Failure:
        return Failure(place, RESULTS_FILE, found, expected)

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


def report_failures(run_dir: Path, rows: Sequence[Row], by: str) -> tuple[int, list[Failure]]:
    """How many files of tables/ and figures/ were compared with those of a report that is written now, and the files
    that differ from it, are too many or are missing. Formats that the run's report was not written in are none."""
    kept = {folder: _names(run_dir / folder) for folder in _FOLDERS}
    formats = {kind for folder, (_, kinds) in _FOLDERS.items() for kind in kinds
               if any(name.endswith(f".{kind}") for name in kept[folder])}  # fmt: skip
    failures: list[Failure] = []
    with tempfile.TemporaryDirectory(prefix="burst-verify-") as temporary:
        today = Path(temporary)
        write_report_of((), rows, today, frozenset(formats))
        for folder, (check, _) in _FOLDERS.items():
            # Of a report without figures, or without tables, none are expected.
            made = _names(today / folder) if kept[folder] else set()
            for name in sorted(kept[folder] | made):
                problem = _problem(run_dir / folder / name, today / folder / name)
                if problem:
                    failures.append(Failure(f"{folder}/{name}", check, problem, f"the file that {by} makes"))
    return sum(map(len, kept.values())), failures


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _problem(kept: Path, today: Path) -> str:
    """How a file differs from the one that was made now; empty where it does not."""
    if not today.exists():
        return "a file that no report makes"
    try:
        content = read_regular(kept)
    except FileNotFoundError:
        return "no such file"
    except (OSError, ValueError):
        return "no readable file"
    if kept.suffix == ".png":
        return _picture_problem(content, today.read_bytes())
    if beginning := _BEGINNINGS.get(kept.suffix):
        return "" if content.startswith(beginning) else f"no {kept.suffix[1:].upper()} file"
    return "" if content == today.read_bytes() else "other contents"


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


def _shown(text: str) -> str:
    """A cell inside a sentence; a private value is not repeated."""
    if private_in(text):
        return "a value that is not shown"
    return text[:80] or "empty"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_COLUMNS
    return ", ".join(names[:_SHOWN_COLUMNS]) + (f" and {more} more" if more > 0 else "")
