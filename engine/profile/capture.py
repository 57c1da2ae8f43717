"""One step of a trial under torch's profiler, on every rank.

Rank 0 leaves its trace in the trial's directory; each rank makes its breakdown of its own events, and the slowest
rank's is what the trial records. What goes wrong with the profiler itself on some rank stands in the record in place
of the numbers: it neither ends the trial nor keeps that rank from what all of them do together.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from torch.profiler import ProfilerActivity, profile

from engine.atomic import write_atomic
from engine.distributed import World
from engine.profile.timeline import Breakdown, breakdown_of
from engine.profile.unfinished import TRACE_FILE, Of
from engine.settings import TrialSettings

_GZIP_LEVEL = 6
_REASON_CHARACTERS = 200  # of an error's first line


def step_to_trace(settings: TrialSettings) -> Of:
    """One step more, or in task train the measured one itself where a single one is: such a step takes minutes."""
    return "measured_step" if settings.task == "train" and settings.steps.measured == 1 else "extra_step"


class StepProfiler:
    """Traces one step on this rank, and afterwards says where its time went. Both calls are collective."""

    def __init__(self, trial_dir: Path, world: World, of: Of) -> None:
        """`of` says which step is going to be traced; see `step_to_trace`."""
        self._trial_dir, self._world, self.of = trial_dir, world, of
        self._profile: profile | None = None
        self._trouble = ""  # the first thing that went wrong on this rank

    @contextlib.contextmanager
    def trace(self) -> Iterator[None]:
        """Profile what is done inside, of which range STEP is the step. All ranks begin together.

        Raises what is raised inside, and nothing that starting or stopping the profiler does.
        """
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        running = contextlib.ExitStack()
        with self._noting_trouble():
            # acc_events, shapes, stacks and memory off: each would slow the host down, which a short step waits for.
            self._profile = running.push(profile(activities=activities, acc_events=False))
            self._profile.start()
        try:
            self._world.barrier()  # ranks take unequally long to start profiling
            yield
        finally:
            with self._noting_trouble():
                running.close()

    def summary(self) -> dict[str, Any]:
        """Where the time of the traced step went, as the record has it; rank 0 writes the trace.

        `of` says which step, `rank` whose it is: the one whose events span the longest time, `span_seconds`; `seconds`
        by category add up to that. Where the profiler failed or was shown nothing, a `reason` stands for the numbers.
        """
        found = cast(list[Breakdown | str], self._world.gather(self._breakdown()))
        ranks = [one for one in found if not isinstance(one, str)]
        if len(ranks) < len(found):
            rank, trouble = next((rank, one) for rank, one in enumerate(found) if isinstance(one, str))
            return {"of": self.of, "reason": f"rank {rank} has no trace of its step: {trouble}"}
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
            "seconds": dict(slowest.seconds),
        }

    def _breakdown(self) -> Breakdown | str:
        """This rank's, or what went wrong on it. The profiler's events are given back either way."""
        assert self._profile is not None or self._trouble, "summary() before trace()"
        with self._noting_trouble():
            try:
                trace = b"" if self._trouble or self._profile is None else _exported(self._profile)
            finally:
                self._profile = None
            if trace:
                if self._world.rank == 0:
                    write_atomic(self._trial_dir / TRACE_FILE, gzip.compress(trace, _GZIP_LEVEL))
                return breakdown_of(json.loads(trace)["traceEvents"])
        return self._trouble or "the profiler wrote an empty one"

    @contextlib.contextmanager
    def _noting_trouble(self) -> Iterator[None]:
        """Keep the first error in words: the error itself would keep alive what its frames hold."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the figures are worth more
            traceback.print_exc()
            line = (str(error).strip().splitlines() or ["no message"])[0]
            self._trouble = self._trouble or f"{type(error).__name__}: {line}"[:_REASON_CHARACTERS]


def _exported(traced: profile) -> bytes:
    """The trace as the profiler writes it: JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        traced.export_chrome_trace(str(path))
        return path.read_bytes()
