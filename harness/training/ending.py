"""When a training run in a Slurm job stops: early enough to be saved before the job ends."""

from __future__ import annotations

from collections.abc import Callable

from cluster.transport.slurm.limit import job_end
from harness.run.bounds import RUN_RESERVE, Reserve, StopTime, ahead_of_allocation

_SHARE = 0.25  # of a job's time: the most that is kept for saving


def stop_time(say: Callable[[str], None], grace_seconds: float) -> StopTime | None:
    """The time by which the run is to have ended, with `grace_seconds` and a minute for saving; None outside a job and
    in a job without a limit. Where the limit is not known, `say` is called with one sentence."""
    end = job_end(say, otherwise="with sbatch --signal=B:USR1@SECONDS the run is saved that long before it")
    return ahead_of_allocation(end, Reserve(seconds=grace_seconds + RUN_RESERVE.seconds, share=_SHARE))
