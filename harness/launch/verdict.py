"""One status and one sentence from the exits, errors and out-of-memory kills of a job's ranks."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.environment.value import shown
from cluster.files.errors import quantity
from harness.launch.launcher import Job, Passed
from harness.launch.stacks import STACKS_DIRECTORY, places_sentence
from harness.records.record import Status

ERRORS_DIRECTORY = "errors"
# A peer notices a dead rank within milliseconds, and file times are coarser than process times (one clock tick): an
# error file this much older than an exit may still be its consequence. A busy machine notices exits later than that,
# which matters where peers fail at once: at SIGKILL, which no failure of a peer ever sends.
CLOCK_SLACK_SECONDS = 0.05
_RANK = re.compile(r"^(?:\[\w+\]: ?)+")  # what torchrun and torch put before a line of a rank
_WARNING = re.compile(r"warning\b|^\[W\d", re.IGNORECASE)
_TRACEBACK = "Traceback (most recent call last):"
_ERROR_FILE = re.compile(r"rank(\d+)\.json", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """One rank's end, before anything was sent to it."""

    rank: int
    returncode: int  # negative: the signal that killed it
    at: float  # seconds since the epoch


@dataclass(kw_only=True, slots=True)
class Watched:
    """The supervisor's observations of one job."""

    exits: list[Exit] = field(default_factory=list)
    timed_out_at: float | None = None  # when ranks were ended at a limit, in seconds since the epoch
    passed: Passed | None = None  # that limit; None: the whole job's
    places: dict[int, str] = field(default_factory=dict)  # by rank: function, file and line it was at by then
    no_stacks: str = ""  # why its stacks could not be written, should it be so
    cancelled: bool = False
    server_lost: str = ""  # how the fork server ended, should it have
    oom_killed: bool = False  # the kernel's count of out-of-memory kills rose meanwhile
    progress: dict[str, object] = field(default_factory=dict)  # the last line of progress.jsonl
    left: list[int] = field(default_factory=list)  # processes that SIGKILL did not end in time


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerError:
    """errors/rank<r>.json, as a worker left it."""

    rank: int
    kind: str  # oom, refused or failed
    reason: str
    at: float  # seconds since the epoch


def judge(job: Job, watched: Watched) -> tuple[Status, str]:
    """Status and reason of a job that has ended.

    A cancelled job is interrupted, whatever its errors. An out-of-memory or refusal is the cause wherever it appears,
    because every other error then follows from it, and so is a rank that was killed. Otherwise the first event counts,
    a failure or the deadline: one rank's end makes its peers fail too, with messages about lost connections that
    explain nothing. What a program said last is a part of the reason, without its secrets.
    """
    status, reason = _judge(job, watched)
    reason = shown("", reason)
    if watched.left:
        reason += f" (processes {', '.join(map(str, watched.left))} did not end after SIGKILL; look for a stuck driver)"
    return status, reason


def _judge(job: Job, watched: Watched) -> tuple[Status, str]:
    if watched.cancelled:
        return "interrupted", f"interrupted{_after(watched.progress)}"
    errors = read_errors(job.trial_dir)
    for error in errors:
        if error.kind == "oom":
            return "oom", f"rank {error.rank}: {error.reason}"
    for error in errors:
        if error.kind == "refused":
            return "refused", error.reason

    explained = {error.rank for error in errors}
    late = math.inf if watched.timed_out_at is None else watched.timed_out_at
    errors = [error for error in errors if error.at < late]
    first_exit = min(
        (end for end in watched.exits if end.returncode != 0 and end.rank not in explained and end.at < late),
        key=lambda end: (not _killed(end), end.at),
        default=None,
    )
    if first_exit and (not errors or _killed(first_exit) or first_exit.at - CLOCK_SLACK_SECONDS <= errors[0].at):
        return _unexplained(job, watched, first_exit)
    if errors:
        first = errors[0]
        return "failed", f"rank {first.rank}: {first.reason} (see {_log(first.rank)})"
    if watched.server_lost:
        return ("host_oom" if watched.oom_killed else "failed"), f"{watched.server_lost}, and the ranks ended with it"
    if watched.timed_out_at is not None:
        return _late(job, watched)
    if len(watched.exits) != job.ranks:
        return "failed", f"{len(watched.exits)} of {job.ranks} ranks are known to have ended; see {_log(0)}"
    return "ok", ""


def _late(job: Job, watched: Watched) -> tuple[Status, str]:
    """A job that was ended at one of its limits."""
    passed = watched.passed or Passed(
        limit="trial", seconds=job.deadline_seconds, origin=job.limits_from.get("trial", "")
    )
    told = {*watched.places, *(end.rank for end in watched.exits)}
    where = places_sentence(watched.places, [rank for rank in range(job.ranks) if rank not in told])
    seen = f"{where}; stacks in {STACKS_DIRECTORY}/" if where else f"see {_log(0)} for where it stopped"
    if watched.no_stacks:
        seen += f" (stacks could not be written: {watched.no_stacks})"
    seconds, after = quantity(passed.seconds), _after(watched.progress)
    if passed.limit == "start":
        return "hang", f"start-up did not end within its {seconds} s ({_named(passed)}); {seen}"
    if passed.limit == "hang":
        return "hang", f"no progress for {seconds} s{after} ({_named(passed)}); {seen}"
    return "timeout", f"not finished within its {seconds} s{after} ({_named(passed)}); {seen}"


def _named(passed: Passed) -> str:
    """A limit for a sentence: its setting, where its value is from, and how to change it."""
    setting = f"limits.{passed.limit}_seconds"
    return f"{setting}{passed.origin and f', {passed.origin}'}; --set {setting}=SECONDS changes it"


def _killed(end: Exit) -> bool:
    return end.returncode == -signal.SIGKILL


def _unexplained(job: Job, watched: Watched, end: Exit) -> tuple[Status, str]:
    """A rank that died without leaving an error."""
    if end.returncode < 0:
        name = signal_name(-end.returncode)
        if _killed(end) and watched.oom_killed:
            return "host_oom", f"rank {end.rank} was killed by the kernel because host memory ran out"
        return "failed", f"rank {end.rank} was killed by {name}{_after(watched.progress)} (see {_log(end.rank)})"
    said = last_words(job.trial_dir / _log(end.rank))
    return "failed", f"rank {end.rank} exited with code {end.returncode}{said} (see {_log(end.rank)})"


def read_errors(trial_dir: Path) -> list[WorkerError]:
    """The workers' files in errors/, earliest first."""
    found = []
    for path in trial_dir.glob(f"{ERRORS_DIRECTORY}/rank*.json"):
        named = _ERROR_FILE.fullmatch(path.name)
        if named is None:  # a copy that someone made
            continue
        rank, at = int(named[1]), time.time()
        try:
            at = path.stat().st_mtime
            data = json.loads(path.read_text(encoding="utf-8"))
            error = WorkerError(rank=rank, kind=data["kind"], reason=data["reason"], at=at)
        except (OSError, ValueError, KeyError, TypeError) as problem:
            error = WorkerError(rank=rank, kind="failed", reason=f"left an unreadable error file ({problem})", at=at)
        found.append(error)
    return sorted(found, key=lambda error: (error.at, error.rank))


def signal_name(number: int) -> str:
    """Such as SIGKILL; real-time signals, most of which have none, are `signal 40`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(log: Path, limit: int = 200) -> str:
    """The line of a log that says best why its program ended, cut to `limit` characters, for a sentence; empty when
    there is none.

    That is the last one, unless libraries warned as the process ended: then it is the exception before these warnings.
    """
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            end = file.read().decode("utf-8", errors="replace")
    except OSError:  # none, or one that cannot be read: the sentence does without it
        return ""
    lines = [line.rstrip() for line in end.splitlines() if line.strip()]
    if not lines:
        return ""
    said = [_RANK.sub("", line) for line in lines]
    while said and _WARNING.search(said[-1]):
        said.pop()
    if len(said) < len(lines) and (error := _exception(said)):
        return f", its last error: {error[:limit]}"
    return f", its last line: {lines[-1].strip()[:limit]}"


def _exception(lines: Sequence[str]) -> str:
    """The exception of the last traceback: the first line behind its frames, which are indented. Empty without one."""
    begins = [index for index, line in enumerate(lines) if line == _TRACEBACK]
    return next((line for line in lines[begins[-1] + 1 :] if not line[0].isspace()), "") if begins else ""


def _log(rank: int) -> str:
    """Relative to the trial directory: reasons are published, and paths of a machine mean nothing elsewhere."""
    return f"logs/rank{rank}.log"


def after_step(progress: Mapping[str, object]) -> str:
    """The last step of a job for a sentence, or the one it is in, by its last line of progress; empty before the first
    step."""
    if not progress.get("step"):  # no line, or step 0: start-up has ended
        return ""
    return f" {'in' if 'phase' in progress else 'after'} {step_of(progress)}"


def step_of(progress: Mapping[str, object]) -> str:
    """The step of a line of progress, and the place inside it: `step 3 of 5, backward, layer 12 of 32`."""
    parts = [f"step {progress.get('step', '?')} of {progress.get('of', '?')}"]
    if "phase" in progress:
        parts.append(str(progress["phase"]))
    if "layer" in progress:
        parts.append(f"layer {progress['layer']} of {progress.get('layers', '?')}")
    return ", ".join(parts)


def _after(progress: Mapping[str, object]) -> str:
    return after_step(progress) or " before its first step"


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Processes that the kernel has killed for memory: in this process's cgroup, else (no counter there) on this host.

    A SIGKILL alone does not show that host memory ran out; a rise of this count does.

    0 where the kernel keeps no count.
    """
    for counter in (*_cgroup_counters(proc / "self" / "cgroup", cgroups), proc / "vmstat"):
        count = _field(counter, "oom_kill")
        if count is not None:
            return count
    return 0


def _cgroup_counters(membership: Path, cgroups: Path) -> list[Path]:
    """Files with an `oom_kill` line for the cgroup this process is in; version 2 first, then version 1.

    Inside a container the path named by the kernel may not be visible; the mount's root is then the container's own.
    """
    found: list[Path] = []
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.exists() else []
    for line in sorted(lines):  # "0::/path" is version 2, "4:memory:/path" version 1
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [cgroups / path.lstrip("/") / "memory.events", cgroups / "memory.events"]
        elif "memory" in controllers.split(","):
            found += [
                cgroups / "memory" / path.lstrip("/") / "memory.oom_control",
                cgroups / "memory" / "memory.oom_control",
            ]
    return found


def _field(file: Path, name: str) -> int | None:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:  # this kernel, or this kind of cgroup, does not have the file
        return None
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None
