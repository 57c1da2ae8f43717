"""One step of a trial under torch's profiler, on every rank.

Rank 0 writes its trace to the trial's directory; each rank makes a breakdown of its own events, and the trial records
that of the slowest rank. An error of the profiler itself on some rank is recorded in place of the numbers: it does not
end the trial, and that rank still takes part in all collective calls.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from engine.atomic import write_atomic
from engine.distributed import World
from engine.measurement import TRACE_FILE, Of, StepProfile
from engine.profile.breakdown import Breakdown, breakdown_of
from engine.settings import TrialSettings

_GZIP_LEVEL = 6
_REASON_CHARACTERS = 200  # of an error's first line


def step_to_trace(settings: TrialSettings) -> Of:
    """One step more, or in task train the measured one itself where a single one is: such a step takes minutes."""
    return "measured_step" if settings.task == "train" and settings.steps.after_warmup == 1 else "extra_step"


class StepProfiler:
    """Traces one step on this rank, and then gives the breakdown of its time. Both calls are collective."""

    def __init__(self, trial_dir: Path, world: World, of: Of) -> None:
        """`of` says which step is going to be traced; see `step_to_trace`."""
        self._trial_dir, self._world, self.of = trial_dir, world, of
        self._profile: profile | None = None
        self._error = ""  # the profiler's first error on this rank

    @contextlib.contextmanager
    def trace(self) -> Iterator[None]:
        """Profile the work inside, whose range STEP is the step. All ranks begin together.

        Raises errors of that work, and none of starting or stopping the profiler.
        """
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        running = contextlib.ExitStack()
        with self._noting_errors():
            # acc_events, shapes, stacks and memory off: each would slow the host, which a short step waits for.
            self._profile = running.push(profile(activities=activities, acc_events=False))
            self._profile.start()
        try:
            self._world.barrier()  # ranks take unequally long to start profiling
            yield
        finally:
            with self._noting_errors():
                running.close()

    def summary(self) -> StepProfile:
        """The breakdown of the traced step, as recorded; rank 0 writes the trace.

        `of` names the step, `rank` the rank whose events span the longest time, `span_seconds`; `seconds` by category
        add up to that. Where the profiler failed or saw no events, a `reason` replaces the numbers.
        """
        found = self._world.gather(self._breakdown())
        ranks = [one for one in found if not isinstance(one, str)]
        if len(ranks) < len(found):
            rank, message = next((rank, one) for rank, one in enumerate(found) if isinstance(one, str))
            return {"of": self.of, "reason": f"rank {rank} has no trace of its step: {message}"}
        rank = max(range(len(ranks)), key=lambda rank: ranks[rank].span_seconds)
        slowest = ranks[rank]
        on_gpu = self._world.device.type == "cuda"
        if slowest.span_seconds == 0 or (on_gpu and any(one.on != "gpu" for one in ranks)):
            reason = "the profiler saw nothing run on some rank's device; see logs/ for why CUPTI gave it no events"
            return {"of": self.of, "reason": reason}
        return {
            "of": self.of,
            "on": slowest.on,
            "rank": rank,
            "span_seconds": slowest.span_seconds,
            "seconds": {str(name): seconds for name, seconds in slowest.seconds.items()},
        }

    def _breakdown(self) -> Breakdown | str:
        """This rank's breakdown, or its profiler's error. The profiler's events are freed either way."""
        assert self._profile is not None or self._error, "summary() before trace()"
        with self._noting_errors():
            try:
                trace = b"" if self._error or self._profile is None else _exported(self._profile)
            finally:
                self._profile = None
            if trace:
                if self._world.rank == 0:
                    write_atomic(self._trial_dir / TRACE_FILE, gzip.compress(trace, _GZIP_LEVEL))
                return breakdown_of(json.loads(trace)["traceEvents"])
        return self._error or "the profiler wrote an empty one"

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Store the first error's message: the exception would keep alive the objects of its frames."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the trial's figures are valid without a trace
            traceback.print_exc()
            line = (str(error).strip().splitlines() or ["no message"])[0]
            self._error = self._error or f"{type(error).__name__}: {line}"[:_REASON_CHARACTERS]


def _exported(traced: profile) -> bytes:
    """The trace as the profiler writes it: JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        traced.export_chrome_trace(str(path))
        return path.read_bytes()
