"""Progress of a push, and its results."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from cluster.images.delivery import Stage
from cluster.images.push import Outcome

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {"present": "dim", "loaded": "green", "failed": "bold red"}


@contextmanager
def progress_on_stderr() -> Iterator[ProgressBars]:
    """A bar for each node on a terminal; where stderr is none, a line for each stage a node enters."""
    console = Console(stderr=True, emoji=False)
    if not console.is_terminal:
        yield ProgressBars(None)
        return
    columns = (
        TextColumn("{task.fields[node]}", markup=False),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        yield ProgressBars(bars)


class ProgressBars:
    """The `Watch` of a push, and the receiver of the progress of saving an image."""

    def __init__(self, bars: Progress | None) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def stage(self, node: str, stage: Stage) -> None:
        self._enter(node, stage)

    def progress(self, node: str, done_bytes: int, all_bytes: int) -> None:
        if self._bars is not None:
            self._bars.update(self._tasks[node], completed=done_bytes, total=all_bytes)

    def saved(self, image: str, written_bytes: int) -> None:
        """An image is being saved here; its compressed size is not known yet."""
        if image not in self._tasks:
            self._enter(image, "saving")
        if self._bars is not None:
            self._bars.update(self._tasks[image], completed=written_bytes, total=None)

    def _enter(self, name: str, what: str) -> None:
        if self._bars is None:
            self._tasks[name] = TaskID(0)
            print(f"{name}: {what}", file=sys.stderr, flush=True)
        elif name in self._tasks:
            self._bars.update(self._tasks[name], description=what)
        else:
            self._tasks[name] = self._bars.add_task(what, total=None, node=name)


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per node: its state, the bytes sent and the time taken."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("node", "image", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("sent", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for outcome in outcomes:
        table.add_row(
            Text(outcome.node),
            Text(outcome.image),
            Text(outcome.state, style=_STYLES[outcome.state]),
            Text(f"{outcome.sent_bytes / 2**20:,.1f} MiB" if outcome.sent_bytes else ""),
            Text(f"{outcome.seconds:,.1f} s" if outcome.seconds else ""),
            Text(outcome.finding),
        )
    return table
