"""How far a training run has come, also while it runs."""

from __future__ import annotations

from pathlib import Path

from engine.plain_json import read_json
from engine.training.files import METRICS_FILE, RUN_FILE, checkpoints_directory
from engine.training.manifest import checkpoints, step_of
from engine.training.metrics import read_metrics
from harness.base.errors import UsageError
from harness.run.directory import RunDirectory


def is_training_run(directory: Path) -> bool:
    """Whether `burst train` filled this directory."""
    return (directory / RUN_FILE).is_file()


def training_status(directory: Path) -> str:
    """One line: whether it runs, its last step and evaluation, and what it can be gone on from. Raises UsageError."""
    try:
        facts = read_json(directory / RUN_FILE)
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
            "line, of which a checkpoint needs nothing"
        ) from error
    saved = checkpoints(checkpoints_directory(directory))
    parts.append(f"saved after step {step_of(saved[0])}" if saved else "no checkpoint yet")
    parts.append(f"started {started}")
    return "; ".join(parts)


def _last_figures(directory: Path, steps: object) -> list[str]:
    """The last step and evaluation in words."""
    last = {line["kind"]: line for line in read_metrics(directory)}
    parts = []
    if step := last.get("step"):
        parts.append(f"step {step['step']} of {steps}, loss {step['loss']:.4f}, {step['seconds']:.2f} s per step")
    else:
        parts.append(f"no step of {steps} yet")
    if evaluation := last.get("evaluation"):
        parts.append(f"evaluation loss {evaluation['loss']:.4f} after step {evaluation['step']}")
    return parts
