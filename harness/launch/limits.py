"""The limits of one job on this host: start-up, the time between two signs of progress, and the whole job.

Start-up ends with the first line of progress.jsonl, which the engine's worker writes when its task is built. Only the
host of rank 0 sees that file, so the hosts of other ranks have one limit: start-up and job together.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.launch.launcher import SET, Job, Limit

# What comes next may take so many times the longest time between two lines of progress so far, unless the user has set
# the limit: steps of some tasks differ in length.
LONGEST_STEPS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """A limit that a job has passed, its length in seconds, and where that is from, in words."""

    limit: Limit
    seconds: float
    origin: str = ""


class JobLimits:
    """Which limit a job has passed. All times are seconds of one clock that never goes back."""

    def __init__(self, job: Job, started: float) -> None:
        self._job = job
        self._started = started
        self._begun: float | None = None  # when the first line of progress came
        self._last = started  # when the newest line came
        self._longest = 0.0  # time between two lines

    def progressed(self, now: float) -> None:
        """A line of progress came."""
        if self._begun is None:
            self._begun = now
        else:
            self._longest = max(self._longest, now - self._last)
        self._last = now

    def passed(self, now: float) -> Passed | None:
        """The limit that is passed at `now`, if any."""
        job, start = self._job, self._job.start_seconds
        if 0 not in job.own_ranks or start is None:
            whole = longest_seconds(job)
            if now >= self._started + whole:
                return self._of("trial", whole)
        elif self._begun is None:
            return self._of("start", start) if now >= self._started + start else None
        elif now >= self._begun + job.deadline_seconds:
            return self._of("trial", job.deadline_seconds)
        if self._begun is None or job.hang_seconds is None or now < self._last + job.hang_seconds:
            return None
        stretched = LONGEST_STEPS * self._longest
        if stretched <= job.hang_seconds or job.limits_from.get("hang") == SET:
            return self._of("hang", job.hang_seconds)
        if now < self._last + stretched:
            return None
        origin = f"{LONGEST_STEPS:g} times the longest time between two signs of progress before"
        return Passed(limit="hang", seconds=stretched, origin=origin)

    def _of(self, limit: Limit, seconds: float) -> Passed:
        return Passed(limit=limit, seconds=seconds, origin=self._job.limits_from.get(limit, ""))


def longest_seconds(job: Job) -> float:
    """The longest that any host's part of a job may run."""
    return job.deadline_seconds + (job.start_seconds or 0.0)
