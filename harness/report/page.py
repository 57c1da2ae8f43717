"""The report: tables, plots and one self-contained HTML file, made from records alone."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.atomic import write_atomic
from harness.base.errors import UsageError
from harness.base.writable import make_writable
from harness.metrics.throughput import FORMULAS
from harness.records.record import Record, refuse_bad, set_aside
from harness.records.stored import refuse_one_name, resolved, stored_run
from harness.report import figures
from harness.report.drawing.points import about, groups_of
from harness.report.drawing.sheet import Sheet
from harness.report.figures import all_figures, inline, save_figure, shown_of
from harness.report.headline import Headline, headline_of, wrong_sentences
from harness.report.html import Addresses, dots_of, grid_of, render_page
from harness.report.rankings import sizes_table
from harness.report.results import Row, RunRecords, grouped, standing_twice, write_results
from harness.report.speedup import MARK, slow_baselines, slow_sentence
from harness.report.tables.agreement import agreement_summary, agreement_table
from harness.report.tables.comparison import comparison_table, known_baseline
from harness.report.tables.ideal import ideal_table
from harness.report.tables.particular import breakdown_table, head_table, mask_table, set_ups_table
from harness.report.tables.table import FORMATS as TABLE_FORMATS
from harness.report.tables.table import Table, save_table
from harness.report.tables.trials import (
    accuracy_table,
    memory_by_length,
    per_unit,
    problems_table,
    results_table,
    speed_by_length,
)
from harness.report.variants import on_cpu, with_subject

ALL_FORMATS: frozenset[str] = frozenset({"html", "md", "csv", "tex", "png", "pdf"})


# By the name of their files, in reading order.
TABLES: dict[str, Callable[[Sequence[Row]], Table | None]] = {
    "comparison": comparison_table,
    "settings": set_ups_table,
    "problems": problems_table,
    "agreement": agreement_table,
    "accuracy": accuracy_table,
    "ideal": ideal_table,
    "masks": mask_table,
    "lm_head": head_table,
    "breakdown": breakdown_table,
    "speed_by_length": speed_by_length,
    "memory_by_length": memory_by_length,
    "results": results_table,
}
BEFORE_FIGURES = ("comparison",)  # tables that the page shows above the figures; on CPUs those of agreement
BEFORE_FIGURES_ON_CPUS = ("agreement", "accuracy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One drawn figure of a report; `name` is the stem of its files."""

    name: str
    title: str
    setup: str
    figure: Sheet

    @property
    def inline(self) -> tuple[str, str]:
        """The plot as elements of the page: for wide screens, and for phones."""
        return inline(self.figure, self.name)


def write_report(
    run_dirs: Sequence[Path],
    out: Path,
    formats: Iterable[str] = ALL_FORMATS,
    *,
    index: str = "",
    baseline: str | None = None,
    subject: str | None = None,
    labels: Mapping[str, str] | None = None,
    set_bad_aside: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write report.html, results.csv, figures/ and tables/ below `out` for all records of `run_dirs`.

    Returns where to look first: report.html, or `out` when html is not asked for. Records without a number are shown by
    status and reason. Records that cannot be used are renamed where `set_bad_aside` asks for it, and `say` is called
    with a sentence for each. `index` is the address of the page that links this one, where there is one; `baseline` the
    method that tables compare with (by default at every point the best other one), `subject` the one that is compared
    (by default burst), `labels` names that are shown instead of methods' own.
    Raises UsageError for an unknown format or method, when there is no record at all, and for records that cannot be
    used.
    """
    wanted = checked_formats(formats)
    records, rows = read_runs(run_dirs, set_bad_aside=set_bad_aside, say=say)
    if not records:
        places = ", ".join(map(str, run_dirs)) or "no directory"
        raise UsageError(
            f"no record below {places}; name directories that `burst run` left, holding trials/*/record.json, "
            "or packed runs (.jsonl)"
        )
    named, rows = named_runs(run_dirs), with_subject(rows, subject, labels or {})
    return write_report_of(
        records, rows, out, wanted, index=index, baseline=known_baseline(baseline, rows), run_dirs=named
    )


def checked_formats(formats: Iterable[str]) -> frozenset[str]:
    """The formats as a set. Raises UsageError for one that no report is written in."""
    wanted = frozenset(formats)
    if unknown := sorted(wanted - ALL_FORMATS):
        raise UsageError(f"format {unknown[0]!r} is unknown; choose from {', '.join(sorted(ALL_FORMATS))}")
    return wanted


def write_report_of(
    records: Sequence[Record],
    rows: Sequence[Row],
    out: Path,
    wanted: frozenset[str] = ALL_FORMATS,
    *,
    index: str = "",
    baseline: str | None = None,
    run_dirs: Mapping[str, Path] | None = None,
    site: Path | None = None,
) -> Path:
    """The report of records that have been read; returns where to look first. Those without a number are shown by
    status and reason. `run_dirs` holds each run by its name in the rows, by default `out`; a page of
    `site` links nothing outside it."""
    make_writable(out)
    if "csv" in wanted:
        write_results(out / "results.csv", rows)
    tables = report_tables(rows, baseline)
    plots, equal = figures_of(rows) if wanted & {"html", *figures.FORMATS} else ([], [])
    written: set[Path] = set()
    for table in tables:
        written.update(save_table(table, out / "tables", [kind for kind in TABLE_FORMATS if kind in wanted]))
    for plot in plots:
        written.update(save_figure(plot.figure, out / "figures" / plot.name, wanted & set(figures.FORMATS)))
    _remove_outdated(out, written, wanted)
    if "html" not in wanted:
        return out
    addresses = Addresses(out, run_dirs, site)
    headline = headline_of(rows, baseline)
    text = html_report(records, rows, headline, tables, plots, equal, addresses, frozenset(written), index=index)
    return write_atomic(out / "report.html", text)


def _remove_outdated(out: Path, written: set[Path], kinds: frozenset[str]) -> None:
    """Remove what an earlier report left below `out` and this one has no more: a table of problems since solved, say.

    Only files of the formats asked for now, with the name of a figure or table of ours. A figure of a part of the run
    has more in its name, as a user's own file may have: such a file goes only where that earlier report links it.
    """
    names = {"tables": frozenset(TABLES), "figures": frozenset(all_figures())}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        earlier = (out / "report.html").read_text(encoding="utf-8")
        names["figures"] |= set(re.findall(r"figures/([\w.-]+)\.\w+", earlier))
    for folder, ours in names.items():
        for path in (out / folder).glob("*"):
            if path not in written and path.suffix[1:] in kinds and path.stem in ours and path.is_file():
                path.unlink()


def read_runs(
    run_dirs: Sequence[Path], *, set_bad_aside: bool = False, say: Callable[[str], None] = lambda _: None
) -> tuple[list[Record], list[Row]]:
    """All records of the runs and their rows; a row's `run` is the run's name, made unique by its parents.

    Raises UsageError that lists the records of all runs that cannot be used, unless they are to be set aside.
    """
    runs = [RunRecords(path, name) for name, path in named_runs(run_dirs).items()]
    bad = [one for run in runs for one in run.read()]
    if not set_bad_aside:
        refuse_bad(bad)
    for before, now in set_aside(bad):
        say(f"{before} cannot be used and is now {now.name}")
    for gap in _gaps(runs):
        say(gap)
    return [record for run in runs for record in run.records()], [row for run in runs for row in run.rows()]


def _gaps(runs: Sequence[RunRecords]) -> Iterator[str]:
    """Sentences about trials of a plan that have no record, and about records that stand twice, as in a copied
    directory."""
    for run in runs:
        placed, path, planned = run.placed(), run.stored.path, list[str]()
        with contextlib.suppress(ValueError):  # what a damaged plan names is not known
            planned = run.stored.planned() or []
        if waiting := len(set(planned) - {record.trial_id for record, _ in placed}):
            having = f"{len(planned) - waiting} of {len(planned)} trials of {path} have a record"
            yield f"{having}; {shlex.join(['burst', 'status', str(path)])} names the others"
    yield from standing_twice(runs)


def named_runs(run_dirs: Sequence[Path]) -> dict[str, Path]:
    """Runs by the names that rows have for them; a run named twice is one run."""
    paths = list(dict.fromkeys(map(resolved, run_dirs)))
    refuse_one_name(paths)
    return dict(zip(_unique_names([stored_run(path).report_dir for path in paths]), paths, strict=True))


def report_tables(rows: Sequence[Row], baseline: str | None = None) -> list[Table]:
    """The report's tables in reading order, less those with nothing to say."""
    candidates = [comparison_table(rows, baseline) if make is comparison_table else make(rows)
                  for make in TABLES.values()]  # fmt: skip
    explained = slow_sentence(slow_baselines(rows).values())
    return [_with_mark_explained(table, explained) for table in candidates if table is not None]


def figures_of(rows: Sequence[Row]) -> tuple[list[Plot], list[str]]:
    """The figures of every set-up in the order of the page, and the sentences that stand in the place of figures which
    would show that all is equal. File names say the set-up only where there are several. Wrong trials have no place in
    any."""
    groups = groups_of([row for row in rows if row["status"] != "wrong"])
    found = [(name, group, shown) for group in groups for name, shown in shown_of(group).items()]
    sheets = [(name, group, shown) for name, group, shown in found if isinstance(shown, Sheet)]
    names: dict[int, str] = {}
    for name, alike in grouped(sheets, lambda one: one[0]).items():
        suffixes = _suffixes([group for _, group, _ in alike])
        names |= {id(sheet): name + suffix for (*_, sheet), suffix in zip(alike, suffixes, strict=True)}
    plots = [
        Plot(name=names[id(sheet)], title=sheet.title, setup=about(group), figure=sheet) for _, group, sheet in sheets
    ]
    return plots, list(dict.fromkeys(shown for *_, shown in found if isinstance(shown, str)))


def html_report(
    records: Sequence[Record],
    rows: Sequence[Row],
    headline: Headline,
    tables: Sequence[Table],
    plots: Sequence[Plot],
    equal: Sequence[str],
    addresses: Addresses,
    written: frozenset[Path] = frozenset(),
    *,
    index: str = "",
) -> str:
    """One HTML page with everything inside: style, script and figures; all text is escaped. `equal` stands for figures
    that would show that all is equal. Files are linked that this report has `written`, and records.

    First comes who is faster, with a plot of the largest size and a line for each other one; where no trial ran on a
    GPU, whether the methods compute the same thing.
    """
    csv_of = {path.stem: path for path in written if path.suffix == ".csv"}
    tables = [_without(one, headline.footnotes) for one in tables]
    grids = {one.name: grid_of(one, addresses, csv_of.get(one.name)) for one in tables}
    plot = dots_of(headline.rankings[0]) if headline.rankings else None
    first = [sizes_table(headline.rankings[1:] if plot else headline.rankings)]
    if all(map(on_cpu, rows)):
        first = [agreement_summary(rows)]
    early = BEFORE_FIGURES if headline.rankings else BEFORE_FIGURES_ON_CPUS
    parts: list[tuple[str, str, object]] = [(name, grids[name].title, grids[name]) for name in early if name in grids]
    if plots or equal:
        parts.append(("figures", "Figures", [(plot, _files_of(plot, addresses, written)) for plot in plots]))
    parts += [(name, grid.title, grid) for name, grid in grids.items() if name not in early]
    counts = counted(record.status for record in records)
    return render_page(
        "report.html.j2",
        title=" · ".join(dict.fromkeys(record.title or record.experiment for record in records)),
        wrong=wrong_sentences(rows),
        headline=headline,
        about=[text for text in (distinct(record.gpu for record in records), days_of(records)) if text],
        counts=counts,
        facts=provenance(records),
        plot=plot,
        equal=equal,
        first=[grid_of(table, addresses) for table in first if table is not None],
        parts=parts,
        sections=[
            ("verdict", "Verdict"),
            *((name, heading) for name, heading, _ in parts),
            ("provenance", "Where the numbers come from"),
            ("formulas", "How the numbers are defined"),
        ],
        formulas=[per_unit(formula, rows) for formula in FORMULAS.values()],
        index=index,
    )


def _without(table: Table, said: Sequence[str]) -> Table:
    """The table without the footnotes that stand above it on the page."""
    note = table.note
    for sentence in said:
        note = note.replace(f" {sentence}", "")
    return replace(table, note=note)


def _with_mark_explained(table: Table, sentence: str) -> Table:
    """The table with the sentence below it, where one of its cells or headers is marked."""
    cells = [column.header for column in table.columns] + [cell for row in table.rows for cell in row]
    if not sentence or not any(isinstance(cell, str) and MARK in cell for cell in cells):
        return table
    return replace(table, note=f"{table.note} {sentence}".strip())


def counted(statuses: Iterable[str]) -> list[tuple[str, int]]:
    """How many trials ended how, ok first."""
    return sorted(Counter(statuses).items(), key=lambda item: (item[0] != "ok", item[0]))


def _files_of(plot: Plot, addresses: Addresses, written: frozenset[Path]) -> list[tuple[str, str]]:
    """Kind and address of the figure's files."""
    named = {path.suffix[1:].upper(): path for path in written if path.stem == plot.name}
    return [(kind, addresses.file(named[kind])) for kind in ("PDF", "PNG", "SVG") if kind in named]


def days_of(records: Sequence[Record]) -> str:
    """The day of the first and of the last start, in UTC."""
    days = sorted({record.started_at[:10] for record in records if record.started_at})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""


def provenance(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Where the numbers come from: every distinct value of hardware, software, source and commit, labelled."""
    measured = [record.measurement for record in records if record.measurement is not None]
    versions = grouped((item for one in measured for item in one.software.items()), lambda item: item[0])
    software = [f"{name} {distinct(version for _, version in found)}" for name, found in versions.items()]
    data = [
        ", ".join(f"{k} {v}" for k, v in one.data.items() if v not in (None, "", [])) for one in measured if one.data
    ]
    started = sorted({record.started_at for record in records if record.started_at})
    facts = [
        ("Experiment", distinct(record.experiment for record in records)),
        ("Hardware", distinct(record.gpu for record in records)),
        ("Hosts", distinct(host for record in records for host in record.hosts)),
        ("Software", ", ".join(software)),
        ("Launcher", distinct(record.launcher for record in records)),
        ("Commit", distinct(record.commit for record in records)),
        ("Training data", distinct(data)),
        ("Started (UTC)", " to ".join(dict.fromkeys((*started[:1], *started[-1:])))),
    ]
    return [(label, text) for label, text in facts if text]


def distinct(values: Iterable[str]) -> str:
    """The different values in their order, in one line; empty ones are left out."""
    return "; ".join(dict.fromkeys(value for value in values if value))


def _unique_names(paths: Sequence[Path]) -> list[str]:
    """Shortest endings of the paths that tell them apart."""
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(paths):
            return names
    raise AssertionError("distinct paths have distinct parts")


def _suffixes(groups: Sequence[Sequence[Row]]) -> list[str]:
    """File name endings that tell set-ups apart by the keys in which they differ; empty for a single one."""
    if len(groups) < 2:
        return [""] * len(groups)
    names = ("run", "experiment", "task", "model", "dtype", "mask")
    differing = [name for name in names if len({group[0][name] for group in groups}) > 1]
    slugs = ["-".join(_slug(str(group[0][name])) for name in differing) for group in groups]
    # Set-ups may differ in what makes no readable name (two inline models of one name): those are numbered.
    repeated = len(set(slugs)) < len(slugs)
    return [f"-{slug}-{number}" if repeated else f"-{slug}" for number, slug in enumerate(slugs, start=1)]


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_") or "x"
