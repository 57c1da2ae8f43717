"""Reports as one self-contained HTML file: every check of every node, and a heat map of the speeds between nodes."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cluster.active.judge import Pair, Speed, nodes_of
from cluster.files.errors import UsageError, quantity
from cluster.files.filesystem import is_foreign, write_whole
from cluster.health.nodes import NodeReport
from cluster.render.grouping import faults, of_sites, shown, well
from cluster.render.text import headline, summary_line


def html_page(
    reports: Sequence[NodeReport],
    heat_maps: Sequence[HeatMap] = (),
    *,
    only_faults: bool = False,
    now: datetime | None = None,
) -> str:
    """The page. Everything a node printed is escaped. Raises UsageError without jinja2."""
    try:
        import jinja2
    except ModuleNotFoundError:
        raise UsageError("--html needs jinja2, which is not installed; pip install jinja2") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found = shown(reports, only_faults=only_faults)
    checks = list(dict.fromkeys(name for _, verdicts in found for name, _ in sorted(verdicts)))
    return environment.get_template("summary.html.j2").render(
        time=(now or datetime.now(UTC)).isoformat(sep=" ", timespec="seconds"),
        summary=summary_line(reports),
        checks=checks,
        sites=of_sites(reports),
        faults=faults(reports),
        well=[] if only_faults else well(reports),
        nodes=[(report, headline(report), verdicts, dict(verdicts)) for report, verdicts in found],
        heat_maps=heat_maps,
    )


def pair_map(speeds: Mapping[Pair, Speed]) -> HeatMap:
    """The exchanges between nodes, each beside the median of all."""
    by_pair = {frozenset(pair): speed if isinstance(speed, float) else None for pair, speed in speeds.items()}
    good = [speed for speed in by_pair.values() if speed is not None]
    title = "Send and receive between two nodes, GB/s both ways together"
    return heat_map(title, nodes_of(speeds), by_pair, statistics.median(good) if good else None)


_OURS = re.compile(rb"[^\0]{,800}<title>Nodes[^<]*: [\d,]+ nodes?\b")  # how every page begins (summary.html.j2)


def refuse_foreign(path: Path) -> None:
    """Raise UsageError where `path` is a file that is no earlier page: a user's own."""
    if is_foreign(path, _OURS):
        raise UsageError(f"{path} is no page of this command and would be overwritten; give --html another name")


def write_page(path: Path, page: str) -> None:
    """Leave the page whole or not at all. Raises UsageError where it cannot be written."""
    try:
        write_whole(path, page.encode(), 0o644)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); give --html a file you can write") from None


_WEAK, _GOOD = (214, 69, 65), (245, 245, 240)  # of the worst cell, and of the median and above


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One pair: the text of its field, and its colour."""

    text: str
    colour: str  # CSS


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatMap:
    """Rows and columns are the same nodes in the same order."""

    title: str
    nodes: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def heat_map(
    title: str, nodes: Sequence[str], speeds: Mapping[frozenset[str], float | None], median: float | None
) -> HeatMap:
    """`speeds` by pair; None for a pair that failed, absent for one that was not tried. Red is far below the median."""
    rows = tuple(tuple(_cell(one, other, speeds, median) for other in nodes) for one in nodes)
    return HeatMap(title=title, nodes=tuple(nodes), rows=rows)


def _cell(one: str, other: str, speeds: Mapping[frozenset[str], float | None], median: float | None) -> Cell:
    pair = frozenset((one, other))
    if one == other or pair not in speeds:
        return Cell(text="", colour="#ffffff")
    speed = speeds[pair]
    if speed is None:
        return Cell(text="failed", colour="#999999")
    share = min(1.0, speed / median) if median else 1.0
    # Half of the median and less is as red as it gets.
    weight = max(0.0, 2 * share - 1)
    colour = ", ".join(str(round(weak + (good - weak) * weight)) for weak, good in zip(_WEAK, _GOOD, strict=True))
    return Cell(text=quantity(speed), colour=f"rgb({colour})")
