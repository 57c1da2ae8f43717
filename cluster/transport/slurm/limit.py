"""When Slurm ends the job that this program runs in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from cluster.inventory.allocation import slurm_job
from cluster.transport.slurm.steps import srun_environment

_SECONDS = 30.0  # for slurmctld to answer
_UNLIMITED = ("NONE", "N/A", "UNLIMITED", "INVALID", "")


def job_end(
    say: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
    *,
    otherwise: str = "--max-hours ends the run before it",
) -> datetime | None:
    """The time at which Slurm ends the job; None outside a job and in a job without a limit.

    squeue also knows a limit that was changed after the start. Without an answer of squeue, SLURM_JOB_END_TIME counts,
    which Slurm 23.02 and newer set. Without both, the result is None, and `say` is called with one sentence; it ends
    with `otherwise`, which names what the user can do.
    """
    job = slurm_job(environment)
    if job is None:
        return None
    try:
        done = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%A %e"],
            env={**srun_environment(environment), "SLURM_TIME_FORMAT": "standard"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        problem = " ".join(done.stderr.split())[:200] or f"squeue exited with {done.returncode}"
        if done.returncode == 0:
            # The number of an array's last task, or of a job's first component, also names the whole array or job.
            ends = dict(line.strip().partition(" ")[::2] for line in done.stdout.splitlines())
            if job in ends:
                said = ends[job].strip()
                return None if said in _UNLIMITED else datetime.fromisoformat(said).astimezone()
            problem = "squeue does not list it"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        problem = " ".join(str(error).split())[:200]
    seconds = environment.get("SLURM_JOB_END_TIME", "")
    if seconds.isascii() and seconds.isdecimal():
        return datetime.fromtimestamp(int(seconds), UTC).astimezone()
    say(f"the end of Slurm's job {job} is not known ({problem}); {otherwise}")
    return None
