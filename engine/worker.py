"""One rank of one trial: `python -m engine.worker TRIAL_DIR`, started torchrun-style.

Reads TRIAL_DIR/trial.json. Rank 0 appends progress.jsonl and leaves measurement.json; a rank that fails leaves
errors/rank<r>.json and exits with 1. Importing this module starts nothing: no process group, no CUDA, no thread, so
that a fork server may load it once for many ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch._dynamo  # every optimizer loads it when constructed; here a fork server does so once for all ranks

from engine.distributed import World, check_world_size, join, leave, limit_threads
from engine.linear.kernels import linear_refused_on
from engine.measurement import CHECK_UNFINISHED, PROFILE, UNCHECKED, unfinished, write_json, write_measurement
from engine.method import NativeMethod, in_worker, method_unsupported_reason
from engine.profile.capture import StepProfiler, step_to_trace
from engine.settings import TrialSettings, from_json
from engine.tasks.attention import AttentionTask
from engine.tasks.linear import LinearTask
from engine.tasks.lm_head import HeadTask
from engine.tasks.task import DTYPES, AroundStep, Refused, Task, progress_to
from engine.tasks.train import TrainTask

REASON_CHARACTERS = 200  # of an error's reason; the traceback has all of it

TASKS: dict[str, Callable[[TrialSettings, NativeMethod, World], Task]] = {
    "train": TrainTask,
    "attention": AttentionTask,
    "lm_head": HeadTask,
    "linear": LinearTask,
}


def main(arguments: list[str]) -> int:
    """Run the trial of the given directory and end the process; returns the exit code of a command line that names no
    directory."""
    if len(arguments) != 1:
        print("usage: python -m engine.worker TRIAL_DIR", file=sys.stderr)
        return 2
    trial_dir = Path(arguments[0])
    rank = int(os.environ.get("RANK", "0"))
    # A rank that is ended from outside, above all at its deadline, writes its stack to its log.
    faulthandler.register(signal.SIGTERM, chain=True)
    phases = PhaseTimer(shown=rank == 0, seconds=process_seconds())
    phases.end("start of the process and its imports")
    with exit_on_error(trial_dir, rank):
        task, profiler = _set_up(trial_dir, phases)
        measure(task, profiler, trial_dir, rank, phases)
        leave()
    raise AssertionError("a rank does not outlive its trial")


def measure(task: Task, profiler: StepProfiler | None, trial_dir: Path, rank: int, phases: PhaseTimer) -> None:
    """Run the task and write the measurement, on rank 0. Collective.

    It is written before any work that measures nothing, the trace of a `profiler` and the check of what was computed,
    and again after each: neither costs the trial its figures.
    """
    around_step: AroundStep = contextlib.nullcontext
    if profiler is not None and profiler.of == "measured_step":
        around_step = profiler.trace
    measurement = task.run(progress_to(trial_dir) if rank == 0 else silent, around_step)
    if profiler is not None:
        measurement.extra[PROFILE] = unfinished(profiler.of)
    measurement.extra[UNCHECKED] = CHECK_UNFINISHED
    if rank == 0:
        write_measurement(trial_dir, measurement)
    phases.end("warm-up and measuring")
    if profiler is not None:
        if profiler.of == "extra_step":
            with profiler.trace():
                task.again()
        measurement.extra[PROFILE] = profiler.summary()
        if rank == 0:
            write_measurement(trial_dir, measurement)
        phases.end("the trace")
    # Last: it gives memory of the GPU back, which a traced step would have to allocate again.
    del measurement.extra[UNCHECKED]
    measurement.extra |= task.check()
    if rank == 0:
        write_measurement(trial_dir, measurement)
    phases.end("the check against float64")


def _set_up(trial_dir: Path, phases: PhaseTimer) -> tuple[Task, StepProfiler | None]:
    """Task and profiler of the trial: all checks of its settings, before anything is measured. Raises Refused."""
    try:
        settings, method, profiled = read_trial(trial_dir)
        world = prepare(settings, method)
        phases.end("joining the other ranks")
        task = TASKS[settings.task](settings, method, world)
        phases.end("building the task")
        if world.rank == 0:  # ends start-up for the launcher, which has a limit of its own
            progress_to(trial_dir)({"step": 0, "of": settings.steps.total})
        return task, StepProfiler(trial_dir, world, step_to_trace(settings)) if profiled else None
    except ValueError as error:
        raise Refused(str(error)) from error


def prepare(settings: TrialSettings, method: NativeMethod) -> World:
    """This process as a rank that can run `settings`, among the others. Raises ValueError when it cannot."""
    unsupported_reason = method_unsupported_reason(method, settings)
    if unsupported_reason:
        raise ValueError(unsupported_reason)
    check_world_size(settings)
    limit_threads()
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed one
        torch.use_deterministic_algorithms(True)
    world = join(settings)
    if settings.task in ("train", "linear"):
        reason = linear_refused_on(world.device.type, DTYPES[settings.dtype], settings.model)
        if reason:
            raise ValueError(reason)
    return world


def read_trial(trial_dir: Path) -> tuple[TrialSettings, NativeMethod, bool]:
    """Settings and method of TRIAL_DIR/trial.json, and whether a step is to be traced."""
    trial = json.loads((trial_dir / "trial.json").read_text(encoding="utf-8"))
    method = in_worker(importlib.import_module(trial["method"]).METHOD)
    settings = from_json(TrialSettings, trial["settings"])
    return settings, method, bool(trial.get("profile", False))


def silent(step: dict[str, object]) -> None:
    """The progress callback of ranks other than 0: none."""


@contextlib.contextmanager
def exit_on_error(trial_dir: Path, rank: int) -> Iterator[None]:
    """Report an exception and end the process at once.

    Not by returning: interpreter shutdown would wait for communicators whose peers may be stuck in a collective.
    """
    failed = True
    try:
        yield
        failed = False
    finally:
        error = sys.exc_info()[1]
        if failed and isinstance(error, Exception):
            write_error(trial_dir, rank, error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def write_error(trial_dir: Path, rank: int, error: Exception) -> None:
    """Write errors/rank<r>.json and the traceback to the log."""
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr)
    directory = trial_dir / "errors"
    directory.mkdir(exist_ok=True)
    found = {"kind": error_kind(error), "reason": _one_sentence(error), "traceback": text}
    write_json(directory / f"rank{rank}.json", found)


def error_kind(error: Exception) -> str:
    """oom, refused or failed. Libraries below torch report exhausted memory as a RuntimeError."""
    if isinstance(error, Refused):
        return "refused"
    words = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    exhausted = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return "oom" if exhausted or isinstance(error, (torch.OutOfMemoryError, MemoryError)) else "failed"


def _one_sentence(error: Exception) -> str:
    """The whole message of `Refused`; of other errors, the sentences that fit one readable line."""
    if isinstance(error, Refused):
        return str(error)
    lines = str(error).strip().splitlines() or ["no message"]
    reason = f"{type(error).__name__}: {lines[0]}"
    if len(reason) <= REASON_CHARACTERS:
        return reason
    end = reason.rfind(". ", 0, REASON_CHARACTERS)
    return reason[: end + 1] if end > 0 else reason[: REASON_CHARACTERS - 3] + "..."


class PhaseTimer:
    """Seconds of each phase and since the start, printed where `shown`."""

    def __init__(self, *, shown: bool, seconds: float = 0.0) -> None:
        """`seconds` have passed already, in the first phase."""
        self._shown = shown
        self._started = self._last = time.monotonic() - seconds

    def end(self, phase: str) -> None:
        """Print how long the phase that ends here took; the next one begins."""
        now = time.monotonic()
        if self._shown:
            print(f"{now - self._started:8.2f} s: {phase} took {now - self._last:.2f} s", flush=True)
        self._last = now


def process_seconds() -> float:
    """Seconds since this process was started, or forked: as exact as the kernel's clock tick, 10 ms."""
    # The name in field 2 may hold spaces and brackets; the start, in ticks since the boot, is field 22.
    ticks = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
