"""Files in the directory of a training run, and its metrics. No torch: the harness reads them as well.

RUN/training.json            the run, as configured; its presence makes RUN the directory of a training run
RUN/metrics.jsonl            one line per step and per evaluation
RUN/tensorboard/, RUN/wandb/ the same for a tracker (engine/training/trackers.py); RUN/tracker_id names the run there
RUN/checkpoints/step-<n>/    one checkpoint; `latest` names the newest
RUN/attempts/<n>/            order.json, progress.jsonl, logs/ and errors/ of the n-th start
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from engine.atomic import write_atomic

if TYPE_CHECKING:
    from engine.training.trackers import Tracker

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


class MetricsWriter:
    """Appends lines that begin with `kind` ("step" or "evaluation"), `step` and `tokens` (trained on so far)."""

    def __init__(self, run: Path, *, from_step: int, tracker: Tracker | None = None) -> None:
        """Removes lines after `from_step`, whose steps will be repeated. `tracker` gets the same figures."""
        self._path = run / METRICS_FILE
        kept = [line for line in read_metrics(run) if float(line["step"]) <= from_step]
        write_atomic(self._path, "".join(map(_line, kept)))
        self._tracker = tracker

    def write(self, kind: str, step: int, tokens: int, **figures: float | None) -> None:
        """One line. Figures that are None were not measured, and are left out."""
        measured = {name: value for name, value in figures.items() if value is not None}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(_line({"kind": kind, "step": step, "tokens": tokens, **measured}))
        if self._tracker is not None:
            self._tracker.log({f"{kind}/{name}": value for name, value in measured.items()}, step)

    def flush(self) -> None:
        """Write what the tracker holds to disk, as the lines already are."""
        if self._tracker is not None:
            self._tracker.flush()

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()


def read_metrics(run: Path) -> list[dict[str, float | str]]:
    """Lines of metrics.jsonl; none where there is no file. An unfinished last line does not count."""
    path = run / METRICS_FILE
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _line(values: dict[str, float | str]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"
