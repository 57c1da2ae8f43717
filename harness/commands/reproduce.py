"""`burst reproduce`: the figures and claims of the paper beside our records, and the run of one of its figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.files.errors import shown
from cluster.files.progress import Progress, say
from harness.base.errors import UsageError
from harness.commands.run import COMMAND as RUN
from harness.commands.run import add_run_arguments

if TYPE_CHECKING:
    from harness.report.tables.table import Table
    from harness.reproduce.claims import JudgedClaim
    from harness.reproduce.comparison import FigureComparison
    from harness.reproduce.figures import PaperFigure
    from harness.reproduce.points import MeasuredRun

CLAIMS, AUDIT = "claims", "audit"
# Options that the tables, which run nothing, would pass over.
_OF_FIGURES = (
    "scale", "hardware", "draw_only", "overrides", "launcher", "ray", "nodes", "only", "again", "limit", "max_hours",
    "stop_before", "retry", "max_failures", "resume", "retry_failed", "set_aside_bad", "mix", "profile",
)  # fmt: skip


class ReproduceCommand:
    help = "the paper's figures and claims beside our records; run a figure again and draw it beside the published one"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "figure", nargs="?", metavar="FIGURE|claims|audit",
            help="a figure to run and draw; the claims with verdicts; published TFLOP/s and MFU recomputed. "
            "Without it: every figure with what is published, measured and predicted",
        )  # fmt: skip
        parser.add_argument(
            "--scale", metavar="NAME",
            help="paper, node, one_gpu or smoke (default: the largest that this machine holds); a figure that is "
            "computed is run only where this is given",
        )  # fmt: skip
        parser.add_argument(
            "--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE",
            help="replace one value of the figure's experiment; may be repeated",
        )  # fmt: skip
        parser.add_argument(
            "--draw-only", action="store_true", help="run nothing; draw what is published, measured and predicted"
        )
        parser.add_argument(
            "--hardware", metavar="NAME",
            help="also predict the scale on nodes of eight such GPUs (a file of experiments/hardware/, such as h100)",
        )  # fmt: skip
        parser.add_argument("--json", action="store_true", help="print tables as one JSON value; runs nothing")
        add_run_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.reproduce.figures import figure_named
        from harness.spec.experiment import load_experiment

        if arguments.figure in (None, CLAIMS, AUDIT):
            for option in _OF_FIGURES:
                if getattr(arguments, option):
                    name = "--set" if option == "overrides" else f"--{option.replace('_', '-')}"
                    raise UsageError(f"{name} belongs to a figure; name one (`burst reproduce` lists them)")
            return _tables(arguments)
        figure = figure_named(arguments.figure)
        code, out = 0, arguments.out or Path("results", "runs", figure.name)
        if arguments.nodes and not arguments.scale:
            raise UsageError("--nodes: the scale depends on how many GPUs they have; add --scale node or --scale paper")
        scale = arguments.scale or _scale_here()
        load_experiment(figure.experiment, scale, arguments.overrides)
        if not (arguments.draw_only or arguments.json or (figure.computed and not arguments.scale)):
            code = _run(arguments, figure, scale)
        _draw(arguments, figure, scale, out)
        return code


def _run(arguments: argparse.Namespace, figure: PaperFigure, scale: str) -> int:
    """The figure's experiment by `burst run` itself."""
    chosen = vars(arguments) | {"experiment": figure.experiment, "scale": scale}
    return RUN.run(argparse.Namespace(**chosen))


def _scale_here() -> str:
    """The largest scale that this machine has the GPUs for."""
    from harness.machine.this_machine import discover

    machine = discover()
    if machine.device != "cuda":
        return "smoke"
    return "one_gpu" if machine.gpu_count < 4 else "node"


def _draw(arguments: argparse.Namespace, figure: PaperFigure, scale: str, out: Path) -> None:
    from harness.metrics.hardware import hardware_named
    from harness.reproduce.comparison import beside, points_table, verdict
    from harness.reproduce.page import FOLDER, write_figure
    from harness.reproduce.points import PLACES, runs_in
    from harness.reproduce.predicted import predicted_entries, predicted_for_paper

    with Progress(f"predicting {figure.name}", quiet=arguments.json) as progress:
        predicted = predicted_for_paper(figure)
        if arguments.hardware is not None:
            predicted += predicted_entries(figure, scale, hardware_named(arguments.hardware))
        progress.stage("reading the records of all runs")
        runs = runs_in((*PLACES, *([] if _below_places(out, PLACES) else [out])))
        found = beside(figure, runs, predicted)
    _say_bad(runs)
    if arguments.json:
        _print_json([points_table(found)])
        return
    said, why = verdict(found)
    _print_points(points_table(found))
    print(shown(f"Verdict: {said}: {why}"))
    with Progress(f"drawing {figure.name}"):
        page = write_figure(found, out / FOLDER)
    print(shown(f"Reproduction: {page}"))


def _below_places(out: Path, places: Sequence[Path]) -> bool:
    return any(out.resolve().is_relative_to(place.resolve()) for place in places)


def _tables(arguments: argparse.Namespace) -> int:
    """The list of figures, the claims or the audit; with --out files and a page of everything."""
    from harness.metrics.hardware import hardware_named
    from harness.reproduce.points import PLACES, runs_in
    from harness.reproduce.predicted import PAPER_HARDWARE, predictor_words

    with Progress("reading the records of all runs", quiet=arguments.json) as progress:
        runs = runs_in()
        progress.stage("comparing them with the paper")
        predictor = predictor_words(hardware_named(PAPER_HARDWARE))
        tables, sentences = _asked_for(arguments.figure, runs, predictor)
    if not runs:
        say(
            f"note: no records were found in {' or '.join(map(str, PLACES))} below this directory; ours are in the "
            "project's own directory, so run this there"
        )
    _say_bad(runs)
    if arguments.json:
        _print_json(tables)
    else:
        for table in tables if arguments.figure != CLAIMS else ():
            if table.rows:
                _print_table(table)
        for sentence in sentences:
            print(shown(sentence))
    if arguments.out is not None:
        from harness.reproduce.page import write_all

        with Progress("predicting and drawing the figures", quiet=arguments.json) as progress:
            path = write_all(_drawn_figures(runs, progress.so_far), runs, predictor, arguments.out)
        if not arguments.json:
            print(shown(f"Page: {path}"))
    return 0


def _asked_for(name: str | None, runs: Sequence[MeasuredRun], predictor: str) -> tuple[list[Table], list[str]]:
    """The tables of that name, by default the list of figures, and the sentences below them."""
    from harness.reproduce.points import all_rows

    if name == AUDIT:
        from harness.reproduce.audit import all_tables

        return all_tables(all_rows(runs)), []
    if name == CLAIMS:
        from harness.reproduce.claims import claims_table, judged, statements

        claims = judged(all_rows(runs))
        table = claims_table(claims)
        return [table], [*map(_claim_text, claims), table.note, *statements().values()]
    from harness.reproduce.comparison import list_table

    said = "`burst reproduce FIGURE` runs and draws one; `burst reproduce claims` and `audit` are tables."
    return [list_table(_all_figures(runs), predictor)], [said]


def _all_figures(runs: Sequence[MeasuredRun]) -> list[tuple[FigureComparison, str]]:
    """Every figure with its published and our numbers, and the words on what is predicted."""
    from harness.reproduce.comparison import beside
    from harness.reproduce.figures import paper_figures
    from harness.reproduce.predicted import predicted_words

    return [(beside(figure, runs), predicted_words(figure)) for figure in paper_figures().values()]


def _drawn_figures(
    runs: Sequence[MeasuredRun], so_far: Callable[[str], None]
) -> Iterator[tuple[FigureComparison, str]]:
    """The same with predicted values; `so_far` is called after each, which takes seconds to predict and to draw."""
    from harness.reproduce.comparison import beside
    from harness.reproduce.figures import paper_figures
    from harness.reproduce.predicted import predicted_for_paper, predicted_words

    figures = list(paper_figures().values())
    for count, figure in enumerate(figures, 1):
        yield beside(figure, runs, predicted_for_paper(figure)), predicted_words(figure)
        so_far(f"{count} of {len(figures)}")


def _say_bad(runs: Sequence[MeasuredRun]) -> None:
    for run in runs:
        for bad in run.bad:
            say(f"burst: {bad.reason}; its row is left out")


def _claim_text(claim: JudgedClaim) -> str:
    """A claim as lines of a terminal, which a table with whole sentences does not fit."""
    lines = [f"{claim.verdict}: {claim.claim} ({claim.said_in})", f"  {claim.why}"]
    return "\n".join([*lines, *(f"  {path}" for path in claim.records)]) + "\n"


def _print_points(table: Table) -> None:
    """The points of a figure; notes stand below, each once, since a column of sentences leaves no room for numbers."""
    headers = [column.header for column in table.columns]
    if "note" not in headers:
        _print_table(table)
        return
    place = headers.index("note")
    notes = dict.fromkeys(str(row[place]) for row in table.rows if row[place])
    rows = tuple(row[:place] + row[place + 1 :] for row in table.rows)
    columns = table.columns[:place] + table.columns[place + 1 :]
    _print_table(replace(table, columns=columns, rows=rows))
    for note in notes:
        print(shown(f"Note of a source: {note}"))


def _print_json(tables: Sequence[Table]) -> None:
    values: dict[str, list[dict[str, Any]]] = {
        table.name: [
            {column.header: value for column, value in zip(table.columns, row, strict=True)} for row in table.rows
        ]
        for table in tables
    }
    print(json.dumps(values, indent=1, ensure_ascii=False))


def _print_table(table: Table) -> None:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    from harness.base.terminal import print_table, stdout_console
    from harness.report.tables.table import without_empty_columns

    table = without_empty_columns(table)
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        drawn.add_column(column.header, justify="right" if column.numeric else "left", overflow="fold")
    for texts in table.texts():
        drawn.add_row(*map(Text, texts))
    console = stdout_console()
    console.print(table.title, markup=False, highlight=False, soft_wrap=True)
    print_table(console, drawn)
    if table.note:
        console.print(table.note, markup=False, highlight=False, soft_wrap=True)


COMMAND = ReproduceCommand()
