"""How far a training run has come, also while it runs."""

from __future__ import annotations

import json
from pathlib import Path

from engine.training.files import RUN_FILE, checkpoints_directory
from engine.training.manifest import checkpoints, step_of
from engine.training.metrics import read_metrics
from harness.errors import UsageError
from harness.run_directory import RunDirectory


def is_training_run(directory: Path) -> bool:
    """Whether `burst train` filled this directory."""
    return (directory / RUN_FILE).is_file()


def training_status(directory: Path) -> str:
    """One line: whether it runs, its last step and evaluation, and what it can be gone on from. Raises UsageError."""
    try:
        facts = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
        steps, started = facts["config"]["steps"], facts["started_at"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{directory / RUN_FILE} does not describe a training run ({type(error).__name__}); "
            "start the run again with --resume to mend it"
        ) from error
    parts = [f"{directory.resolve().name} {'runs' if RunDirectory(directory).in_use() else 'is not running'}"]
    last = {line["kind"]: line for line in read_metrics(directory)}
    if step := last.get("step"):
        parts.append(f"step {step['step']} of {steps}, loss {step['loss']:.4f}, {step['seconds']:.2f} s per step")
    else:
        parts.append(f"no step of {steps} yet")
    if evaluation := last.get("evaluation"):
        parts.append(f"evaluation loss {evaluation['loss']:.4f} after step {evaluation['step']}")
    saved = checkpoints(checkpoints_directory(directory))
    parts.append(f"saved after step {step_of(saved[0])}" if saved else "no checkpoint yet")
    parts.append(f"started {started}")
    return "; ".join(parts)
