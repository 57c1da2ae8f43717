"""The rank processes of a job on this host; where jobs share ranks, of several jobs in turn.

A job with fewer ranks than were started runs on the first of them; the others wait, and are none of its business: not
their output, nor their stacks, nor their end, after which the set is not used again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from engine.measurement import TrialQueue
from harness.launch.environment import rank_environment, trial_environment
from harness.launch.forkserver import ForkServer, ServerLost
from harness.launch.launcher import Job
from harness.launch.ports import reserve_port
from harness.launch.verdict import Exit
from harness.launch.zygote import fields_of, is_module_command

# Programs that can run one trial after another: the engine's worker, and the one that runs this worker in a compared
# system's interpreter.
TURNS_MODULES = ("engine.worker", "baselines.enter")
RECORDER_PIPES = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # beginning of the names of pipes that ask for its dump
TURNS_POLL_SECONDS = 0.02  # between looks for ranks that have finished: no process ends, so no event reports it


class Ranks:
    """Started by their first job. The caller calls `end`, whatever the job's outcome."""

    def __init__(self, server: ForkServer, job: Job) -> None:
        """Reserves what ranks for `job`, and for jobs like it, need; starts nothing."""
        self.server = server
        self.turn = 0  # number of jobs they have run; always 0 where jobs do not share ranks
        self._kind = kind(job)
        self._numbers = job.own_ranks if self._kind is None else range(max(job.ranks, job.set_ranks))
        self._current = job.own_ranks  # that the job they were given last has
        self._same_size = 0  # ranks of the jobs so far with `same_size`; 0: there was none
        self._gone: set[int] = set()  # ranks whose process has ended
        self.logs = Path()  # of the job they were started with
        self._through: set[int] = set()  # ranks that have finished the current job, their process ended or not
        with contextlib.ExitStack() as held:
            self._port = job.part.port if job.part else held.enter_context(reserve_port())
            self.pipes = Path(held.enter_context(server.new_directory("pipes-")))
            self._turns: TrialQueue | None = None
            if self._kind is not None:
                self._turns = TrialQueue(Path(held.enter_context(server.new_directory("turns-"))))
            self._held = held.pop_all()

    def begin(self, job: Job, environment: Mapping[str, str]) -> None:
        """Start ranks with the job, or give it to waiting ones. `environment` is the server's. Raises ServerLost."""
        self._through, self._current = set(), job.own_ranks
        if job.same_size:
            self._same_size = job.ranks
        if self._turns is not None:
            self.turn += 1
            self._turns.give(self.turn, job.trial_dir, job.ranks)
        if self.turn > 1:
            return
        self.logs = logs = (job.trial_dir / "logs").absolute()
        shared = trial_environment(str(logs), environment) | (self._turns.environment if self._turns else {})
        shared.setdefault(RECORDER_PIPES, environment.get(RECORDER_PIPES, f"{self.pipes}/rank"))
        for rank in self._numbers:
            own = rank_environment(
                rank,
                ranks=job.ranks if job.part else len(self._numbers),
                port=self._port,
                emulate_nodes=job.emulate_nodes,
                address=job.part.address if job.part else "127.0.0.1",
                host_ranks=len(self._numbers),
            )
            log = logs / f"rank{rank}.log" if rank in self._current else Path(os.devnull)
            self.server.start(rank, job.command, {**shared, **own}, log)

    @property
    def pids(self) -> dict[int, int]:
        """Process of each of the job's ranks whose process runs."""
        return {rank: pid for rank, pid in self.server.pids.items() if rank in self._current and rank not in self._gone}

    @property
    def idle(self) -> int:
        """Ranks that have no part in the job."""
        return len(self._numbers) - len(self._current)

    def exits(self, seconds: float) -> list[Exit]:
        """Ranks of the job that finished it since the last call, waiting up to `seconds`: those whose process ended,
        and, as if it had ended with 0, those that wait for another job. Raises ServerLost."""
        events = self.server.events(min(seconds, TURNS_POLL_SECONDS) if self._turns else seconds)
        found = []
        if self._turns is not None:
            waiting = sorted(self._turns.through(self.turn) - self._through)
            found = [Exit(rank=rank, returncode=0, at=time.time()) for rank in waiting]
        for event in events:
            if event["event"] == "exited":
                self._gone.add(event["rank"])
                known = self._through.union(end.rank for end in found)
                if event["rank"] in self._current and event["rank"] not in known:
                    found.append(Exit(rank=event["rank"], returncode=event["returncode"], at=event["at"]))
        self._through |= {end.rank for end in found}
        return found

    @property
    def waiting(self) -> bool:
        """Whether all ranks of the job have finished it, and all that were started wait for another."""
        return self._turns is not None and not self._gone and self._through == set(self._current)

    def suit(self, job: Job) -> bool:
        """Whether the ranks wait, and the job may be given to them."""
        if not self.waiting or self._kind != kind(job) or job.ranks > len(self._numbers):
            return False
        if job.same_size and self._same_size not in (0, job.ranks):
            return False
        with contextlib.suppress(ServerLost):
            self.exits(0)  # one may have died while it waited
            return self.waiting and not any(map(has_ended, self.server.pids.values()))
        return False

    def end(self) -> list[int]:
        """Kill the ranks and their children; returns the processes that SIGKILL did not end. Raises ServerLost."""
        with self._held:
            return [] if self.server.closed else self.server.sweep()


def has_ended(pid: int) -> bool:
    """Whether a process has ended, also one that nothing has reaped yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return fields_of(stat)[0] in "ZX"


def tells_start(command: list[str]) -> bool:
    """Whether this is one of TURNS_MODULES, whose first line of progress says that start-up has ended."""
    return is_module_command(command) and command[2] in TURNS_MODULES


def kind(job: Job) -> tuple[object, ...] | None:
    """A key that is equal for jobs that the same ranks may run, where there are enough of them (`Ranks.suit` says what
    else must hold); None for a job that needs ranks of its own."""
    if job.share is None or job.part is not None:
        return None
    if not tells_start(job.command):
        return None
    command = tuple(word for word in job.command if word != str(job.trial_dir))
    ranks = job.ranks if job.emulate_nodes > 1 else 0  # which node a rank is on depends on how many there are
    return command, ranks, job.emulate_nodes, tuple(sorted(job.environment.items())), job.share
