"""One rank of a training run: `python -m engine.training.worker ATTEMPT_DIR`, started torchrun-style.

Reads ATTEMPT_DIR/order.json and writes the files of `engine.training.files`. SIGTERM makes all ranks finish the current
step, save, and exit with 0.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import cast

from engine.distributed import leave
from engine.measurement import write_json
from engine.method import NativeMethod
from engine.settings import from_json
from engine.tasks.task import Refused, progress_to
from engine.training.config import Order
from engine.training.files import ORDER_FILE, OUTCOME_FILE, run_of
from engine.training.run import StopRequest, TrainingRun
from engine.worker import exit_on_error, prepare, silent


def main(arguments: list[str]) -> int:
    """Run the attempt of the given directory and end the process; returns the exit code of a command line that names no
    directory."""
    if len(arguments) != 1:
        print("usage: python -m engine.training.worker ATTEMPT_DIR", file=sys.stderr)
        return 2
    attempt = Path(arguments[0])
    rank = int(os.environ.get("RANK", "0"))
    stop = StopRequest()
    with exit_on_error(attempt, rank):
        training = set_up(attempt, stop)
        finished = training.run(progress_to(attempt) if rank == 0 else silent)
        if rank == 0:
            write_json(attempt / OUTCOME_FILE, {"step": training.steps_done, "finished": finished})
        leave()
    raise AssertionError("a rank does not outlive its run")


def set_up(attempt: Path, stop: StopRequest) -> TrainingRun:
    """The run, after all checks of its order. Raises Refused."""
    try:
        data = json.loads((attempt / ORDER_FILE).read_text(encoding="utf-8"))
        order = cast(Order, from_json(Order, data))
        method = cast(NativeMethod, importlib.import_module(order.method).METHOD)
        # torchrun starts ranks again with the same store, which still has the addresses of those that failed.
        start = 1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return TrainingRun(order, method, prepare(order.config.settings, method, start), run_of(attempt), stop)
    except ValueError as error:
        raise Refused(str(error)) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
