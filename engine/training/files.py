"""Files in the directory of a training run.

RUN/training.json            the run, as configured; its presence makes RUN the directory of a training run
RUN/metrics.jsonl            one line per step and per evaluation
RUN/tensorboard/             the same as event files, where asked for
RUN/checkpoints/step-<n>/    one checkpoint; `latest` names the newest
RUN/attempts/<n>/            order.json, progress.jsonl, logs/ and errors/ of the n-th start
"""

from __future__ import annotations

from pathlib import Path

RUN_FILE = "training.json"
ORDER_FILE = "order.json"
METRICS_FILE = "metrics.jsonl"
OUTCOME_FILE = "outcome.json"  # of an attempt that ended without an error: {"step", "finished"}


def run_of(attempt: Path) -> Path:
    """The run an attempt belongs to."""
    return attempt.parent.parent


def attempt_directory(run: Path, number: int) -> Path:
    return run / "attempts" / str(number)


def checkpoints_directory(run: Path) -> Path:
    return run / "checkpoints"


def tensorboard_directory(run: Path) -> Path:
    return run / "tensorboard"
