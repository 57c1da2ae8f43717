"""The interface of launchers: a job, its outcome, and the launcher that a run uses.

One interface serves one machine without Ray (`local`) and the hosts of a Ray cluster (`ray`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from cluster.files.filesystem import open_regular

if TYPE_CHECKING:
    from harness.records.record import Status

Limit = Literal["start", "hang", "trial"]
SET = "as set"  # a limit's origin where the user gave it


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One host's part of a job over several hosts: consecutive ranks, and the rendezvous of all ranks."""

    first_rank: int
    ranks: int  # the same number on every host of a job
    address: str  # of the host that rank 0 runs on
    port: int  # reserved there


class Folder(Protocol):
    """A directory on a host that does not see this machine's storage. Every method raises when the host is lost."""

    host: str
    path: str
    first: bool  # rank 0 runs there

    def files(self) -> dict[str, int]:
        """Size in bytes of every file, by path relative to the folder."""
        ...

    def read(self, name: str) -> Iterator[bytes]:
        """A file's content, piece by piece. Raises FileNotFoundError when it is gone."""
        ...

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Make a file, with its folders."""
        ...

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        ...


class Exchange(Protocol):
    """What ranks read and write besides the job's directory, where their hosts do not see this machine's storage."""

    root: Path  # holds the job's directory; a host of its own gets a folder that stands for it

    def begin(self, folders: Sequence[Folder], *, all_apart: bool) -> None:
        """Give the folders what the ranks read, and that alone: an earlier job may have left something in them.
        `all_apart`: no host sees `root`."""
        ...

    def progressed(self, line: dict[str, object], folders: Sequence[Folder]) -> None:
        """Called with each line of progress.jsonl. An exception ends the job."""
        ...

    def end(self, folders: Sequence[Folder]) -> None:
        """Take what the ranks have left, and remove the folders."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One trial to execute: `ranks` processes of `command`, torchrun-style environment added per rank."""

    trial_id: str
    trial_dir: Path  # trial.json is there; the workers leave measurement.json, progress.jsonl, errors/, logs/
    command: list[str]
    ranks: int
    environment: dict[str, str] = field(default_factory=dict)  # added to every rank's
    deadline_seconds: float = 1200.0  # from the end of start-up; without `start_seconds` start-up counts
    start_seconds: float | None = None  # until the first line of progress.jsonl; None: the program writes none then
    hang_seconds: float | None = None  # between two lines of progress.jsonl; None: no such limit
    limits_from: Mapping[Limit, str] = field(default_factory=dict)  # where each limit is from, in words
    avoid: tuple[str, ...] = ()  # hosts to be taken only where there are too few others
    grace_seconds: float | None = None  # from SIGTERM to SIGKILL; None: the launcher's default
    emulate_nodes: int = 1  # logical nodes the ranks are split into
    part: Part | None = None  # None: all ranks, on one host
    exchange: Exchange | None = None  # None: the files of `trial_dir` alone
    again: str = "--resume --retry-failed"  # what repeats the job after a host was lost; empty: its caller says it

    @property
    def own_ranks(self) -> range:
        """The ranks that this job's host starts."""
        if self.part is None:
            return range(self.ranks)
        return range(self.part.first_rank, self.part.first_rank + self.part.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended. `status` is ok only when every rank exited with 0."""

    status: Status
    reason: str
    wall_seconds: float
    hosts: list[str]
    lost: tuple[str, ...] = ()  # hosts that were lost


class Launcher(Protocol):
    """Runs jobs one after another; every job gets a deadline and fresh processes."""

    name: str

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        """Execute the job to its end, calling `on_progress` with each line of progress.jsonl. Never raises for an error
        of a worker; KeyboardInterrupt ends the ranks first and is then re-raised."""
        ...

    def close(self) -> None:
        """End everything this launcher started, and nothing else."""
        ...


LAUNCHERS = ("local", "ray")


# Programs whose first line of progress says that start-up has ended: the engine's worker, and the one that runs this
# worker in a compared system's interpreter.
_WORKERS = ("engine.worker", "baselines.enter")


def is_module_command(command: Sequence[str]) -> bool:
    """Whether this is `python -m MODULE ...` with this interpreter, which a fork replaces."""
    return len(command) > 2 and command[0] == sys.executable and command[1] == "-m"


def tells_start(command: Sequence[str]) -> bool:
    """Whether the program's first line of progress says that start-up has ended; a foreign one has none before its
    first step."""
    return is_module_command(command) and command[2] in _WORKERS


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
    """Which limit a job has passed. All times are seconds of one clock that never goes back.

    Only the host of rank 0 sees progress.jsonl, so the hosts of other ranks have one limit: start-up and job together.
    """

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


class ProgressTail:
    """Reads progress.jsonl while a worker appends to it: each line once, and only when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.last: dict[str, object] = {}  # the newest line; empty before the first

    def new(self) -> list[dict[str, object]]:
        """Lines completed since the last call. A line that is not a JSON object is skipped: progress is for display,
        and neither what a foreign program prints there nor a read that fails may end its trial."""
        try:
            with open_regular(self._path, "progress") as file:
                file.seek(self._offset)
                block = file.read()
        except (OSError, ValueError):  # not there yet, or a file system that does not answer at this moment
            return []
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = []
        for line in whole.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                lines.append(value)
        if lines:
            self.last = lines[-1]
        return lines
