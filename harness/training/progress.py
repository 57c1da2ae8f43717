"""Progress of a training run: a live line on a terminal, else a line now and then; its line in `burst status`, and the
command that goes on with it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from cluster.files.errors import shown_value
from cluster.files.progress import Progress
from engine.reader import read_json
from engine.training.files import (
    OUTCOME_FILE,
    RUN_FILE,
    attempt_directory,
    checkpoints_directory,
    read_metrics,
)
from engine.training.manifest import checkpoints, step_of
from harness.base.errors import UsageError
from harness.run.directory import RunDirectory, command_of, next_attempt
from harness.run.progress import describe_step

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as LiveProgress


class TrainingView:
    """Called with every line of progress.jsonl; a context that opens and closes the terminal's live line."""

    def __init__(self, console: Console, steps: int, progress: Progress) -> None:
        """`progress` is that of the command."""
        self._console, self._steps, self._progress = console, steps, progress
        self._live: LiveProgress | None = None

    def __enter__(self) -> TrainingView:
        if self._console.is_terminal:
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as LiveProgress

            self._progress.stage("")  # the live line says it
            self._live = LiveProgress(
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", style="cyan", markup=False),
                console=self._console,
                transient=True,
            )
            self._task = self._live.add_task("starting", total=self._steps)
            self._live.start()
        else:
            self._progress.stage("training")
            self._progress.so_far("starting")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stage("")
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
        elif line.get("step") == self._steps and not inside:
            self.say(sentence)
        else:
            self._progress.so_far(sentence)

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
        facts = _facts(directory)
        steps, started = facts["config"]["steps"], facts["started_at"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{directory / RUN_FILE} does not describe a training run ({type(error).__name__}); "
            "start the run again with --resume to mend it"
        ) from error
    parts = [f"{directory.resolve().name} {_WORDS[_doing(directory)]}"]
    try:
        parts += _last_figures(directory, steps)
    except ValueError as error:
        raise UsageError(str(error)) from error
    saved = checkpoints(checkpoints_directory(directory))
    parts.append(f"saved after step {step_of(saved[0])}" if saved else "no checkpoint yet")
    parts.append(f"started {started}")
    return "; ".join(parts)


def training_next_steps(directory: Path) -> list[str]:
    """What to do with a training run, as sentences with a command each: look at its ranks' output while it runs or
    where an error ended it, go on with one that stopped, export the model of one that has ended."""
    doing, attempt = _doing(directory), _last_attempt(directory)
    steps = []
    if doing in ("runs", "broke off") and any(attempt.glob("logs/rank*.log")):
        steps.append(f"see what its ranks print with: {shlex.join(['burst', 'status', '--logs', str(attempt)])}")
    if doing == "ended" and checkpoints(checkpoints_directory(directory)):
        line = ["burst", "train", "export", str(directory), "--out", str(directory / "model")]
        steps.append(f"write its model for transformers with: {shlex.join(line)}")
    if doing in ("broke off", "stopped"):
        typed = _facts(directory).get("command")
        command = [str(word) for word in typed] if isinstance(typed, list) and typed else []
        command = command or ["burst", "train", "CONFIG.yaml", "--out", str(directory)]
        steps.append(next_step(directory, command_of(directory, command)))
    return steps


# What a training run does: the ranks ran all steps, they were asked to stop, or an error or a kill ended them.
_WORDS = {
    "runs": "runs", "ended": "has ended", "stopped": "stopped before its end", "broke off": "broke off before its end",
}  # fmt: skip


def _doing(directory: Path) -> Literal["runs", "ended", "stopped", "broke off"]:
    if RunDirectory(directory).in_use():
        return "runs"
    try:
        finished = cast(dict[str, Any], read_json(_last_attempt(directory) / OUTCOME_FILE))["finished"]
    except (OSError, ValueError, KeyError, TypeError):
        return "broke off"
    return "ended" if finished else "stopped"


def _last_attempt(directory: Path) -> Path:
    """The directory of the newest start, which need not exist."""
    attempts = attempt_directory(directory, 1).parent
    return attempt_directory(directory, max(1, next_attempt(attempts) - 1))


def _facts(directory: Path) -> dict[str, Any]:
    return cast(dict[str, Any], read_json(directory / RUN_FILE))


def next_step(run_dir: Path, again: Sequence[str], changes: Mapping[str, int] = MappingProxyType({})) -> str:
    """The end of the sentence about a run that ended early: what is saved, and the command line, `again` with `changes`
    of settings, that goes on from it."""
    step = next((step_of(path) for path in checkpoints(checkpoints_directory(run_dir))), None)
    if step is None:
        return f"no checkpoint was written, start again with: {shlex.join(resuming(again, changes)[:-1])}"
    return f"the state after step {step} is saved, go on with: {shlex.join(resuming(again, changes))}"


def resuming(again: Sequence[str], changes: Mapping[str, int]) -> list[str]:
    """A command line with --resume, and with other values of some settings."""
    kept: list[str] = []
    words = iter(word for word in again if word != "--resume")
    for word in words:
        given = [word, next(words, "")] if word == "--set" else [word]
        if given[-1].removeprefix("--set=").partition("=")[0] not in changes:
            kept += given
    return [*kept, "--resume", *(word for key, value in changes.items() for word in ("--set", f"{key}={value}"))]


def _last_figures(directory: Path, steps: object) -> list[str]:
    """The last step and evaluation as sentences."""
    lines = read_metrics(directory)
    last = {line["kind"]: line for line in lines}
    parts = []
    if step := last.get("step"):
        parts.append(f"step {step['step']} of {steps}, loss {step['loss']:.4f}")
        if "seconds" in step:
            parts[-1] += f", {step['seconds']:.2f} s per step"
        if padding := [line["padding"] for line in lines if "padding" in line]:
            parts[-1] += f", {sum(padding) / len(padding):.1%} of the rows padding"
    else:
        parts.append(f"no step of {steps} yet")
    if evaluation := last.get("evaluation"):
        parts.append(f"evaluation loss {evaluation['loss']:.4f} after step {evaluation['step']}")
    return parts
