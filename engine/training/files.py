"""Files in the directory of a training run, and its metrics. No torch: the harness reads them as well.

RUN/training.json            the run, as configured; its presence makes RUN the directory of a training run
RUN/metrics.jsonl            one line per step and per evaluation
RUN/tensorboard/, RUN/wandb/ the same for a tracker (engine/training/trackers.py); RUN/tracker_id names the run there
RUN/checkpoints/step-<n>/    one checkpoint; `latest` names the newest
RUN/attempts/<n>/            order.json, progress.jsonl, logs/ and errors/ of the n-th start
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Required, TypedDict, cast

from engine.atomic import write_atomic
from engine.reader import from_json, parse_json

if TYPE_CHECKING:
    from engine.training.trackers import Tracker

RUN_FILE = "training.json"
ORDER_FILE = "order.json"
METRICS_FILE = "metrics.jsonl"
OUTCOME_FILE = "outcome.json"  # of an attempt that ended without an error: {"step", "finished"}


class MetricLine(TypedDict, total=False):
    """What is read again of a line of metrics, which may hold further figures."""

    kind: Required[Literal["step", "evaluation"]]
    step: Required[int]
    loss: Required[float]
    seconds: float
    padding: float
    peak_memory_gib: float


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
        kept = [line for line in read_metrics(run) if line["step"] <= from_step]
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


def read_metrics(run: Path) -> list[MetricLine]:
    """Lines of metrics.jsonl; none where there is no file. An unfinished last line and blank ones do not count.

    Raises ValueError for a file that cannot be read, and for a line that is no metric.
    """
    path = run / METRICS_FILE
    try:
        *whole, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); mend it or move it away, since no checkpoint needs it"
        ) from error
    found = []
    for number, line in enumerate(whole, start=1):
        try:
            if line.strip():
                found.append(_metric(line))
        except ValueError as error:
            raise ValueError(
                f"{path} holds a line that is no metric (line {number}: {error}); remove that line, which no "
                "checkpoint needs"
            ) from error
    return found


def _metric(line: bytes) -> MetricLine:
    try:
        values = parse_json(line.decode())
    except ValueError as error:  # whose words count lines within this one
        raise ValueError("it is no JSON in UTF-8") from error
    from_json(MetricLine, values)
    return cast(MetricLine, values)


def _line(values: Mapping[str, object]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"
