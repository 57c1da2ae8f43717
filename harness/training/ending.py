"""When a training run in a Slurm job stops: early enough to be saved before the job ends."""

from __future__ import annotations

from collections.abc import Callable

from cluster.transport.slurm.limit import job_end
from harness.run.bounds import RESERVE_SECONDS, StopTime, ahead_of_allocation

RESERVE_SHARE = 0.25  # the most of a job's time that is kept for saving


def stop_time(say: Callable[[str], None], grace_seconds: float) -> StopTime | None:
    """The time by which the run is to have ended, with `grace_seconds` and a minute for saving; None outside a job and
    in a job without a limit. Where the limit is not known, `say` is called with one sentence."""
    end = job_end(say, otherwise="with sbatch --signal=B:USR1@SECONDS the run is saved that long before it")
    return ahead_of_allocation(end, grace_seconds + RESERVE_SECONDS, RESERVE_SHARE)
