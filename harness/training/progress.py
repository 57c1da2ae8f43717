"""Progress of a training run: a live line on a terminal, else a line every 10 s; and its line in `burst status`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cluster.files.errors import shown_value
from engine.reader import read_json
from engine.training.files import METRICS_FILE, RUN_FILE, checkpoints_directory, read_metrics
from engine.training.manifest import checkpoints, step_of
from harness.base.errors import UsageError
from harness.run.directory import RunDirectory
from harness.run.progress import describe_step

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


QUIET_SECONDS = 10.0  # between lines about steps where they are not overwritten


class TrainingView:
    """Called with every line of progress.jsonl; a context that opens and closes the terminal's live line."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._live: Progress | None = None
        self._said_at = float("-inf")

    def __enter__(self) -> TrainingView:
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            self._live = Progress(
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", style="cyan", markup=False),
                console=self._console,
                transient=True,
            )
            self._task = self._live.add_task("starting", total=self._steps)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, line: dict[str, object]) -> None:
        sentence = describe_line(line)
        inside = "phase" in line  # of a step that is not done
        if "loss" not in line and not inside:  # an evaluation, a checkpoint, a note: these stay
            self.say(sentence)
        elif self._live is not None:
            step = line.get("step")
            done = step - inside if isinstance(step, int) else None
            self._live.update(self._task, completed=done, description=shown_value(sentence))
        elif (line.get("step") == self._steps and not inside) or time.monotonic() - self._said_at >= QUIET_SECONDS:
            self._said_at = time.monotonic()
            self.say(sentence)

    def say(self, sentence: str) -> None:
        """A line of its own."""
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def describe_line(line: dict[str, object]) -> str:
    """One line of a training run's progress for a reader."""
    if "note" in line:
        return str(line["note"])
    parts = [describe_step(line)]
    evaluation, speed = line.get("evaluation_loss"), line.get("tokens_per_gpu_per_second")
    if isinstance(evaluation, int | float):
        parts.append(f"evaluation loss {evaluation:.4f}")
    if isinstance(speed, int | float):
        parts.append(f"{speed:,.0f} tok/s/GPU")
    if "saved" in line:
        parts.append("saved")
    return "  ".join(parts)


def is_training_run(directory: Path) -> bool:
    """Whether `burst train` filled this directory."""
    return (directory / RUN_FILE).is_file()


def training_status(directory: Path) -> str:
    """One line: whether it runs, its last step and evaluation, and its newest checkpoint. Raises UsageError."""
    try:
        facts = cast(dict[str, Any], read_json(directory / RUN_FILE))
        steps, started = facts["config"]["steps"], facts["started_at"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{directory / RUN_FILE} does not describe a training run ({type(error).__name__}); "
            "start the run again with --resume to mend it"
        ) from error
    parts = [f"{directory.resolve().name} {'runs' if RunDirectory(directory).in_use() else 'is not running'}"]
    try:
        parts += _last_figures(directory, steps)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{directory / METRICS_FILE} holds a line that is no metric ({type(error).__name__}: {error}); remove that "
            "line, which no checkpoint needs"
        ) from error
    saved = checkpoints(checkpoints_directory(directory))
    parts.append(f"saved after step {step_of(saved[0])}" if saved else "no checkpoint yet")
    parts.append(f"started {started}")
    return "; ".join(parts)


def _last_figures(directory: Path, steps: object) -> list[str]:
    """The last step and evaluation as sentences."""
    last = {line["kind"]: line for line in read_metrics(directory)}
    parts = []
    if step := last.get("step"):
        parts.append(f"step {step['step']} of {steps}, loss {step['loss']:.4f}, {step['seconds']:.2f} s per step")
    else:
        parts.append(f"no step of {steps} yet")
    if evaluation := last.get("evaluation"):
        parts.append(f"evaluation loss {evaluation['loss']:.4f} after step {evaluation['step']}")
    return parts
