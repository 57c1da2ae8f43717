"""What ends a run before all of its trials have run, and how often it repeats a trial that lost its host or hung."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from harness.base.errors import UsageError
from harness.records.record import Status

# Ends of a trial that say something about a host rather than the method. Host memory that ran out is a result: the
# trial needs as much elsewhere.
INFRASTRUCTURE: frozenset[Status] = frozenset({"node_lost", "hang"})

_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeReserve:
    """The time from the end of the ranks to the end of their run: the smaller of two limits."""

    seconds: float
    share: float  # of the time from the start of the run to its end


RUN_RESERVE = TimeReserve(seconds=60.0, share=0.05)  # for records, tables and the report


class StopTime:
    """The wall-clock time by which a run is to have ended. Its ranks are ended earlier, by a reserve."""

    def __init__(
        self, at: datetime, option: str, started: datetime | None = None, reserve: TimeReserve = RUN_RESERVE
    ) -> None:
        """`at` has a time zone; `option` is the argument that asked for it, as typed, or names what ends then; the run
        starts at `started`, by default now."""
        self.at = at
        self.option = option
        started = started or datetime.now().astimezone()
        span = (at - started).total_seconds()
        self.ranks_end = at - timedelta(seconds=min(reserve.seconds, reserve.share * span))

    @property
    def passed(self) -> bool:
        """Whether the ranks are to have ended."""
        return datetime.now().astimezone() >= self.ranks_end

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """A block of the main thread that is interrupted, as by SIGUSR1, when the ranks are to end."""
        seconds = (self.ranks_end - datetime.now().astimezone()).total_seconds()
        end = (threading.get_ident(), signal.SIGUSR1)
        timer = threading.Timer(min(max(0.0, seconds), threading.TIMEOUT_MAX), signal.pthread_kill, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The bounds of one `burst run`; 0 stands for none."""

    retries: int = 0  # of a trial's round that ended by INFRASTRUCTURE
    failures_in_a_row: int = 0
    trials: int = 0  # that are executed
    stop: StopTime | None = None

    @property
    def out_of_time(self) -> str:
        """The option that ends the run now, as typed; empty while there is time."""
        return self.stop.option if self.stop is not None and self.stop.passed else ""


def stop_time(
    before: str | None,
    hours: float | None,
    now: Callable[[], datetime] = datetime.now,
    allocation_end: datetime | None = None,
) -> StopTime | None:
    """The earliest of `--stop-before`, `--max-hours` from now and the end of Slurm's job; None without any.

    Raises UsageError.
    """
    started = now().astimezone()
    times = []
    if before is not None:
        times.append(StopTime(_time_of(before, started), f"--stop-before {before}", started))
    if hours is not None:
        try:
            at = started + timedelta(hours=hours)
        except (OverflowError, ValueError):
            at = started
        if at <= started:
            raise UsageError(f"--max-hours {hours:g}: expected hours above 0, such as 8")
        times.append(StopTime(at, f"--max-hours {hours:g}", started))
    ahead = ahead_of_allocation(allocation_end, RUN_RESERVE, started)
    if ahead is not None:
        times.append(ahead)
    return min(times, key=lambda time: time.at, default=None)


_SQUEUE_SECONDS = 30.0  # for slurmctld to answer
_NO_LIMIT = ("NONE", "N/A", "UNLIMITED", "INVALID", "")


def job_end(
    say: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
    *,
    otherwise: str = "--max-hours ends the run before it",
) -> datetime | None:
    """The time at which Slurm ends the job that this program runs in; None outside a job and in one without a limit.

    squeue also knows a limit that was changed after the start. Without an answer of squeue, SLURM_JOB_END_TIME counts,
    which Slurm 23.02 and newer set. Without both, the result is None, and `say` is called with one sentence; it ends
    with `otherwise`, which names what the user can do. Source of the variables: sbatch(1), "OUTPUT ENVIRONMENT
    VARIABLES".
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not (job.isascii() and job.isdecimal()):
        return None
    try:
        done = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%A %e"],
            env={**environment, "SLURM_TIME_FORMAT": "standard"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SQUEUE_SECONDS,
        )
        problem = " ".join(done.stderr.split())[:200] or f"squeue exited with {done.returncode}"
        if done.returncode == 0:
            # The number of an array's last task, or of a job's first component, also names the whole array or job.
            ends = dict(line.strip().partition(" ")[::2] for line in done.stdout.splitlines())
            if job in ends:
                end = ends[job].strip()
                return None if end in _NO_LIMIT else datetime.fromisoformat(end).astimezone()
            problem = "squeue does not list it"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        problem = " ".join(str(error).split())[:200]
    seconds = environment.get("SLURM_JOB_END_TIME", "")
    if seconds.isascii() and seconds.isdecimal():
        return datetime.fromtimestamp(int(seconds), UTC).astimezone()
    say(f"the end of Slurm's job {job} is not known ({problem}); {otherwise}")
    return None


def ahead_of_allocation(end: datetime | None, reserve: TimeReserve, started: datetime | None = None) -> StopTime | None:
    """The time to stop ahead of the end of Slurm's job; None without an end.

    An end in the past is that of another job than the one in which this program runs, and counts as none.
    """
    started = started or datetime.now().astimezone()
    if end is None or end <= started:
        return None
    named = f"the end of Slurm's job at {end:%Y-%m-%dT%H:%M:%S}"
    return StopTime(end, named, started, reserve)


def _time_of(text: str, now: datetime) -> datetime:
    """`06:50` as the next such time of this machine's clock, or a date with a time. Raises UsageError."""
    clock = _CLOCK.fullmatch(text.strip())
    try:
        if clock:
            hour, minute, second = (int(part or 0) for part in clock.groups())
            at = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
            if at <= now:
                at = (at.replace(tzinfo=None) + timedelta(days=1)).astimezone()
        elif "T" in text or " " in text.strip():
            at = datetime.fromisoformat(text.strip()).astimezone()
        else:
            raise ValueError(text)
    except (ValueError, OverflowError):
        raise UsageError(
            f"--stop-before {text!r}: expected a time such as 06:50, or a date with a time such as 2026-12-24T06:50"
        ) from None
    if at <= now:
        raise UsageError(f"--stop-before {text}: that time is over; now it is {now:%Y-%m-%dT%H:%M:%S}")
    return at
