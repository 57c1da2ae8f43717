"""Files of a reproduction: of one figure its drawings and table, and of all of them one page with claims and audit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.atomic import write_atomic
from harness.base.writable import make_writable
from harness.report.figures import save_figure
from harness.report.html import Addresses, grid_of, render_page
from harness.report.page import Plot
from harness.report.tables.table import FORMATS, Column, Table, save_table
from harness.reproduce.audit import audit_table, printed_by_systems, printed_table, recomputed_rows, systems_table
from harness.reproduce.claims import JudgedClaim, claims_table, judged, statements
from harness.reproduce.comparison import FigureComparison, list_table, points_table, verdict
from harness.reproduce.computed import ComputedNumber, digits_of
from harness.reproduce.drawing import draw_reproduction
from harness.reproduce.figures import METRICS
from harness.reproduce.points import MeasuredRun, all_rows
from harness.reproduce.predicted import PREDICTOR

FOLDER = (
    "reproduction"  # of a run's directory: apart from the files that `burst report` makes and `burst verify` checks
)
PAGE_FILE = "reproduction.html"
PICTURES = ("png", "pdf", "svg")


def plots_of(found: FigureComparison) -> list[Plot]:
    """A drawing for each metric of the figure that some number has."""
    plots = []
    for metric in found.figure.shows:
        drawn = draw_reproduction(found, metric, PREDICTOR)
        if drawn is not None:
            table = f"reproduction_{found.figure.name}"
            plots.append(
                Plot(name=f"{table}-{metric}", title=found.figure.title, setup=METRICS[metric].unit, figure=drawn)
            )
    return plots


def write_figure(found: FigureComparison, out: Path) -> Path:
    """Drawings, table and page of one figure below `out`; returns the page."""
    make_writable(out)
    tables, plots = _save_figure(found, out)
    said, why = verdict(found)
    return _page(out, f"{found.figure.title}", [f"Verdict: {said}. {why[:1].upper()}{why[1:]}."], tables, plots)


def write_all(
    found: Iterable[tuple[FigureComparison, str]],
    runs: Sequence[MeasuredRun],
    predictor: str,
    out: Path,
) -> Path:
    """Every figure, the claims, the statements and the audit as one page with its files; returns the page. A figure is
    drawn when `found` gives it."""
    make_writable(out)
    rows = all_rows(runs)
    claims = judged(rows)
    listed, tables, plots = [], [], []
    for one, predicted in found:
        of_figure, drawn = _save_figure(one, out)
        listed.append((one, predicted))
        tables += of_figure
        plots += drawn
    printed = printed_table(printed_by_systems(rows))
    overview = [list_table(listed, predictor), audit_table(recomputed_rows()), systems_table(), printed]
    for table in (*overview, claims_table(claims)):
        save_table(table, out / "tables", FORMATS)
    said = list(statements().values())
    title = "The paper beside our records"
    return _page(out, title, said[:1], [*overview, *tables], plots, claims, said[1:])


def digits_table(digits: Sequence[ComputedNumber]) -> Table:
    """Published numbers that need no measurement beside the computed ones, digit by digit."""
    name = digits[0].row.experiment
    return Table(
        name=f"digits_{name}",
        title="Computed beside published, to the last published digit",
        columns=(
            Column(header="what"), Column(header="model"), Column(header="tokens", numeric=True),
            Column(header="published", numeric=True), Column(header="computed", numeric=True),
            Column(header="all digits", numeric=True), Column(header="the same"),
        ),
        rows=tuple(
            (one.row.method, one.row.model, one.row.seq_len, one.row.text, str(one.rounded), one.computed, one.same)
            for one in digits
        ),
        marked=frozenset(place for place, one in enumerate(digits) if not one.same),
    )  # fmt: skip


def _save_figure(found: FigureComparison, out: Path) -> tuple[list[Table], list[Plot]]:
    """Write the tables and drawings of a figure below `out`; returns them."""
    tables, plots = [points_table(found)], plots_of(found)
    if digits := digits_of(found.figure):
        tables.append(digits_table(digits))
    for table in tables:
        save_table(table, out / "tables", FORMATS)
    for plot in plots:
        save_figure(plot.figure, out / "figures" / plot.name, PICTURES)
    return tables, plots


def _page(
    out: Path,
    title: str,
    sentences: Sequence[str],
    tables: Sequence[Table],
    plots: Sequence[Plot],
    claims: Sequence[JudgedClaim] = (),
    said: Sequence[str] = (),
) -> Path:
    addresses = Addresses(out)
    grids = [grid_of(table, addresses, out / "tables" / f"{table.name}.csv") for table in tables]
    linked = [(claim, [(str(place), addresses.file(place.file)) for place in claim.records]) for claim in claims]
    sections = [
        *([("claims", "Claims")] if claims else []),
        *([("statements", "What the published sheets show")] if said else []),
        *((grid.name, grid.title) for grid in grids),
    ]
    text = render_page(
        "reproduction.html.j2", title=title, index="", sentences=list(sentences), sections=sections, claims=linked,
        statements=list(said), grids=grids, plots=plots,
    )  # fmt: skip
    return write_atomic(out / PAGE_FILE, text)
