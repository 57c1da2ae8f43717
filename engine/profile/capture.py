"""One step of a trial under torch's profiler, on every rank.

Rank 0 leaves its trace in the trial's directory; each rank makes its breakdown of its own events, and the slowest
rank's is what the trial records.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

from torch.profiler import ProfilerActivity, profile

from engine.atomic import write_atomic
from engine.distributed import World
from engine.profile.timeline import Breakdown, breakdown_of

TRACE_FILE = "trace.json.gz"  # of a trial, in the Chrome trace format
_GZIP_LEVEL = 6

Of = Literal["extra_step", "measured_step"]  # which step: one more, or the only one that was measured


class StepProfiler:
    """Traces one step on this rank, and afterwards says where its time went. Both calls are collective."""

    def __init__(self, trial_dir: Path, world: World) -> None:
        self._trial_dir, self._world = trial_dir, world
        self._of: Of = "extra_step"
        self._profile: profile | None = None

    @contextlib.contextmanager
    def trace(self, of: Of) -> Iterator[None]:
        """Profile what is done inside, of which range STEP is the step. All ranks begin together."""
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._of = of
        # acc_events, shapes, stacks and memory off: each would slow the host down, which a short step waits for.
        with profile(activities=activities, acc_events=False) as self._profile:
            self._world.barrier()  # ranks take unequally long to start profiling
            yield

    def summary(self) -> dict[str, Any]:
        """Where the time of the traced step went, as the record has it; rank 0 writes the trace.

        `of` says which step, `rank` whose it is: the one whose events span the longest time, `span_seconds`; `seconds`
        by category add up to that. Where the profiler was shown nothing, a `reason` stands for the numbers.
        """
        trace, self._profile = _exported(self._profile), None
        if self._world.rank == 0:
            write_atomic(self._trial_dir / TRACE_FILE, gzip.compress(trace, _GZIP_LEVEL))
        mine = breakdown_of(json.loads(trace)["traceEvents"])
        ranks = cast(list[Breakdown], self._world.gather(mine))
        rank = max(range(len(ranks)), key=lambda rank: ranks[rank].span_seconds)
        slowest = ranks[rank]
        on_gpu = self._world.device.type == "cuda"
        if slowest.span_seconds == 0 or (on_gpu and any(one.on != "gpu" for one in ranks)):
            reason = "the profiler saw nothing run on some rank's device; see logs/ for why CUPTI gave it no events"
            return {"of": self._of, "reason": reason}
        return {
            "of": self._of,
            "on": slowest.on,
            "rank": rank,
            "span_seconds": slowest.span_seconds,
            "seconds": dict(slowest.seconds),
        }


def _exported(traced: profile | None) -> bytes:
    """The trace as the profiler writes it: JSON."""
    assert traced is not None, "summary() before trace()"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        traced.export_chrome_trace(str(path))
        return path.read_bytes()


def traced_if(profiler: StepProfiler | None, of: Of) -> contextlib.AbstractContextManager[None]:
    """`profiler.trace(of)`, or nothing at all without a profiler."""
    return contextlib.nullcontext() if profiler is None else profiler.trace(of)
