"""Progress of trials for the user: a live line on a terminal, plain lines in a log file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cluster.files.errors import shown_value
from cluster.files.progress import Progress
from harness.launch.verdict import step_of
from harness.records.record import Record

if TYPE_CHECKING:
    from rich.console import Console

    from harness.spec.trial import Trial

STYLES = {"ok": "green", "refused": "yellow", "oom": "yellow", "host_oom": "yellow", "interrupted": "yellow"}


class ProgressView(Protocol):
    """Shows every trial of every round in order."""

    def begin(self, total: int, title: str = "", done: int = 0) -> None:
        """Before the first of the `total` trials of a round, which is called `title` where there are several; and again
        where the round gets more of them, with the number `done` by then."""
        ...

    def trial_began(self, trial: Trial) -> None: ...

    def step(self, line: dict[str, object]) -> None:
        """One line of the running trial's progress.jsonl."""
        ...

    def trial_ended(self, record: Record, *, kept: bool = False) -> None:
        """`kept`: the record is of an earlier run and nothing was executed."""
        ...

    def note(self, message: str) -> None:
        """A line between those of trials."""
        ...

    def end(self) -> None:
        """After the last trial, or when the run stops early."""
        ...


def view_for(console: Console, progress: Progress) -> ProgressView:
    """A live view on a terminal, else a plain one. `progress` is that of the command."""
    if not console.is_terminal:
        return PlainView(progress)
    progress.stage("")  # the live line says it
    return LiveView(console)


class PlainView:
    """One line per finished trial, for logs and pipes; and now and then how far one is that takes long."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._total = self._done = 0
        self._round = self._trial = ""

    def begin(self, total: int, title: str = "", done: int = 0) -> None:
        self._total, self._done = total, done
        self._round = f", {title}" if title else ""
        self._progress.stage("running the trials")

    def trial_began(self, trial: Trial) -> None:
        self._trial = f"{self._place(self._done + 1)} {trial.id}"
        self._progress.so_far(f"{self._trial}  starting")

    def step(self, line: dict[str, object]) -> None:
        self._progress.so_far(f"{self._trial}  {describe_step(line)}")

    def trial_ended(self, record: Record, *, kept: bool = False) -> None:
        self._done += 1
        self._progress.say(f"{self._place(self._done)} {describe(record, kept)}")

    def note(self, message: str) -> None:
        self._progress.say(message)

    def end(self) -> None:
        self._progress.stage("")

    def _place(self, number: int) -> str:
        return f"[{number}/{self._total}{self._round}]"


class LiveView:
    """A bar over all trials with the running one's last step, above it the finished ones."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Column

        self._console = console
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),  # on a narrow terminal the bar shrinks, not these
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[round]}", markup=False),
            TextColumn("{task.fields[trial]}", markup=False),
            TextColumn("{task.fields[step]}", style="cyan", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, round="", trial="", step="")
        self._round = ""

    def begin(self, total: int, title: str = "", done: int = 0) -> None:
        self._round = title
        self._progress.update(self._task, total=total, completed=done, round=title)
        self._progress.start()

    def trial_began(self, trial: Trial) -> None:
        self._progress.update(self._task, trial=shown_value(trial.id), step="starting")

    def step(self, line: dict[str, object]) -> None:
        self._progress.update(self._task, step=shown_value(describe_step(line)))

    def trial_ended(self, record: Record, *, kept: bool = False) -> None:
        self._progress.update(self._task, trial="", step="")
        self._progress.advance(self._task)
        self._progress.console.print(
            describe(record, kept) + (f"  {self._round}" if self._round else ""),
            style=STYLES.get(record.status, "red"),
            markup=False,
            highlight=False,
        )

    def note(self, message: str) -> None:
        self._progress.console.print(message, style="yellow", markup=False, highlight=False)

    def end(self) -> None:
        self._progress.stop()


def describe(record: Record, kept: bool = False) -> str:
    """One finished trial in a line; its seconds are those of all its rounds."""
    time = "kept from before" if kept else f"{record.wall_seconds:.1f} s"
    return f"{record.trial_id}  {record.status}  {time}" + (f"  {record.reason}" if record.reason else "")


def describe_step(line: dict[str, object]) -> str:
    """One line of progress.jsonl for a reader; keys that are missing are left out."""
    parts = [step_of(line)]
    loss, seconds = line.get("loss"), line.get("seconds")
    if isinstance(loss, int | float):
        parts.append(f"loss {loss:.4f}")
    if isinstance(seconds, int | float):
        parts.append(f"{seconds:.2f} s")
    return "  ".join(parts)
