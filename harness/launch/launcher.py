"""Launchers: start the ranks of one trial, watch them, end them, and say how it went.

One interface serves one machine without Ray (`local`), embedded Ray, and a Ray cluster over SSH (both `ray`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness.records.record import Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One host's share of a job over several: consecutive ranks, and where all ranks meet."""

    first_rank: int
    ranks: int  # the same number on every host of a job
    address: str  # of the host that rank 0 runs on
    port: int  # reserved there


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One trial to execute: `ranks` processes of `command`, torchrun-style environment added per rank."""

    trial_id: str
    trial_dir: Path  # trial.json is there; the workers leave measurement.json, progress.jsonl, errors/, logs/
    command: list[str]
    ranks: int
    environment: dict[str, str] = field(default_factory=dict)  # added to every rank's
    deadline_seconds: float = 1200.0
    grace_seconds: float | None = None  # from SIGTERM to SIGKILL when asked to stop; None: the launcher's usual few
    emulate_nodes: int = 1  # logical nodes the ranks are split into
    part: Part | None = None  # None: all ranks, on one host
    share: str | None = None  # ranks that ended a job with the same words, and are like its own, may be given this one

    @property
    def own_ranks(self) -> range:
        """The ranks that the host which is given this job starts."""
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
    turn: int = 0  # among the jobs its ranks were given, from 1; 0: it had ranks of its own


class Launcher(Protocol):
    """Runs jobs one after another; every job gets a deadline, and fresh processes unless it may share them. A launcher
    need not share: `Outcome.turn` says what it did."""

    name: str

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        """Execute the job to its end, calling `on_progress` with each line of progress.jsonl. Never raises for what
        a worker did; KeyboardInterrupt ends the ranks first and is then re-raised."""
        ...

    def close(self) -> None:
        """End everything this launcher started, and nothing else."""
        ...


LAUNCHERS = ("ray", "local")


def default_launcher() -> str:
    """Ray where it is installed, else local."""
    return "ray" if importlib.util.find_spec("ray") is not None else "local"


def make_launcher(name: str) -> Launcher:
    """A launcher by name, for this machine. Raises UsageError when it cannot be used here."""
    if name == "ray":
        from harness.launch.ray.launcher import RayLauncher

        return RayLauncher()
    assert name == "local", name
    from harness.launch.supervisor import LocalLauncher

    return LocalLauncher()
