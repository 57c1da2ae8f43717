"""Reports as one self-contained HTML file: every check of every node, and what the active tests measured."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from cluster.active.pairing import Pair, nodes_of
from cluster.files.errors import UsageError
from cluster.health.nodes import NodeReport
from cluster.render.heat_map import HeatMap, heat_map
from cluster.render.table import headline, summary_line, worst_first


def html_page(reports: Sequence[NodeReport], heat_maps: Sequence[HeatMap] = (), now: datetime | None = None) -> str:
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
    checks = list(dict.fromkeys(name for report in reports for name in report.verdicts))
    return environment.get_template("summary.html.j2").render(
        time=(now or datetime.now(UTC)).isoformat(sep=" ", timespec="seconds"),
        summary=summary_line(reports),
        checks=checks,
        nodes=[(report, headline(report), worst_first(report)) for report in reports],
        heat_maps=heat_maps,
    )


def pair_map(speeds: Mapping[Pair, float | None]) -> HeatMap:
    """The exchanges between nodes, each beside the median of all."""
    good = [speed for speed in speeds.values() if speed is not None]
    by_pair = {frozenset(pair): speed for pair, speed in speeds.items()}
    title = "Send and receive between two nodes, GB/s both ways together"
    return heat_map(title, nodes_of(speeds), by_pair, statistics.median(good) if good else None)


def write_page(path: Path, page: str) -> None:
    """Written aside and renamed, so that a reader never meets half a page. Raises UsageError where it cannot be."""
    try:
        descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(page)
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); give --html a file you can write") from None
