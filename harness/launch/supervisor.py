"""Runs one job's ranks on this host and ends all their processes. `local` uses it here, `ray` in an actor.

The ranks are children of a fork server (`harness.launch.zygote`), which ends them when this process dies.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.measurement import PROGRESS_FILE
from harness.base.interrupts import end_at_once, look
from harness.launch.environment import rank_environment, trial_environment
from harness.launch.forkserver import ForkServer, ServerLost
from harness.launch.launcher import Job, JobLimits, Outcome, ProgressTail, is_module_command
from harness.launch.ports import reserve_port
from harness.launch.stacks import STACKS_DIRECTORY, ask_flight_recorder, dump_stacks, log_sizes, stacks_in_logs
from harness.launch.verdict import ERRORS_DIRECTORY, Exit, Watched, judge, oom_kills

Progress = Callable[[dict[str, object]], None]

# Modules that every rank of the engine imports. torch alone takes most of the time.
ENGINE_PRELOAD = ("torch", "engine.worker")
# A sweep over sizes alternates between a few environments (threads per rank); an idle server costs about 200 MB.
MAX_SERVERS = 3

RECORDER_PIPES = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # beginning of the names of pipes that ask for its dump

_ServerKey = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long each stage of ending a job waits, in seconds."""

    failure: float = 3.0  # from the first failure, for the other ranks to write their errors
    terminate: float = 5.0  # from SIGTERM to SIGKILL
    poll: float = 0.1  # between looks at progress, errors and the clock


class Supervisor:
    """Executes jobs one after another on this host. `cancel` may be called from another thread."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        preload: Sequence[str] = ENGINE_PRELOAD,
        patience: Patience | None = None,
    ) -> None:
        """`environment` is the one jobs add theirs to; by default this process's own. `preload` names the modules a
        fork server imports once for all `python -m` jobs with the same environment."""
        self._environment = dict(os.environ if environment is None else environment)
        self._preload = tuple(preload)
        self._patience = patience or Patience()
        self._cancel = threading.Event()
        self._stacks_wanted = False  # of the job that is cancelled
        self._may_save = True  # likewise
        self._servers: dict[_ServerKey, ForkServer] = {}  # the one used last is last

    def run(self, job: Job, on_progress: Progress | None = None) -> Outcome:
        """Execute one job to its end; see `harness.launch.launcher.Launcher.run`."""
        started = time.monotonic()
        watched = self.watch(job, on_progress)
        status, reason = judge(job, watched)
        return Outcome(
            status=status,
            reason=reason,
            wall_seconds=time.monotonic() - started,
            hosts=[socket.gethostname()],
        )

    def watch(self, job: Job, on_progress: Progress | None = None) -> Watched:
        """Execute one job, or this host's part of one, to its end, and return what the supervisor saw of it."""
        started = time.monotonic()
        self._cancel.clear()
        self._stacks_wanted, self._may_save = False, True
        kills_before = oom_kills()
        watched = Watched()
        (job.trial_dir / "logs").mkdir(parents=True, exist_ok=True)
        try:
            ranks = Ranks(self._server_for(job), job)
            try:
                ranks.begin({**self._environment, **job.environment})
                self._watch(ranks, job, watched, JobLimits(job, started), on_progress)
                if self._wants_stacks(watched):
                    self._take_stacks(ranks, job, watched)
            finally:  # also at Ctrl-C, which then goes on
                self._end(ranks, job, watched)
        except ServerLost as loss:
            watched.server_lost = str(loss)
            self.close()
        except BaseException:
            self.close()
            raise
        watched.oom_killed = oom_kills() > kills_before
        return watched

    def cancel(self, stacks: bool = False, may_save: bool = True) -> None:
        """End the running job, if any; its outcome is then `interrupted`. `stacks`: leave its ranks' stacks before.

        `may_save` false: ranks of other hosts are gone, so the job's grace would be waited for in vain.
        """
        self._stacks_wanted, self._may_save = stacks, may_save
        self._cancel.set()

    def close(self) -> None:
        """End everything this supervisor started. Idempotent."""
        while self._servers:
            self._servers.popitem()[1].close()

    def _server_for(self, job: Job) -> ForkServer:
        """A running fork server that suits the job, else a new one in place of the one that was idle for longest."""
        preload = self._preload if is_module_command(job.command) else ()
        key = (preload, tuple(sorted(job.environment.items())))
        server = self._servers.pop(key, None)
        if server is not None and server.ended:  # while it was idle, which is no job's fault
            server.close()
        if server is None or server.closed:
            while len(self._servers) >= MAX_SERVERS:
                self._servers.pop(next(iter(self._servers))).close()
            server = ForkServer({**self._environment, **job.environment}, preload)
        self._servers[key] = server
        return server

    def _watch(self, ranks: Ranks, job: Job, watched: Watched, limits: JobLimits, on_progress: Progress | None) -> None:
        """Return when all ranks have ended, or when they should be ended: late, cancelled, or failed for a while."""
        tail = ProgressTail(job.trial_dir / PROGRESS_FILE)
        give_up: float | None = None
        while True:
            look()
            watched.exits += ranks.exits(self._patience.poll)
            for line in tail.new():
                watched.progress = line
                limits.progressed(time.monotonic())
                if on_progress is not None:
                    on_progress(line)
            if len(watched.exits) == len(job.own_ranks):
                return
            if self._cancel.is_set():
                watched.cancelled = True
                return
            now = time.monotonic()
            # An error file counts as a failure at once: a rank can hang in tearing down its communicators.
            if give_up is None and (any(end.returncode for end in watched.exits) or any(_error_files(job))):
                give_up = now + self._patience.failure
            if give_up is not None and now >= give_up:
                return
            if (passed := limits.passed(now)) is not None:
                if give_up is None:
                    watched.passed, watched.timed_out_at = passed, time.time()
                return

    def _wants_stacks(self, watched: Watched) -> bool:
        """Whether the ranks are ended at a limit: of this host's part of the job, or of another host's."""
        return watched.passed is not None or (watched.cancelled and self._stacks_wanted)

    def _take_stacks(self, ranks: Ranks, job: Job, watched: Watched) -> None:
        """Leave what the ranks were doing in the trial's directory, before they are ended."""
        folder = job.trial_dir / STACKS_DIRECTORY
        try:
            watched.places = dump_stacks(ranks.pids, folder)
            ask_flight_recorder(ranks.pipes, (job.trial_dir / "logs").absolute())
        except OSError as error:  # a full disk: the trial's end is recorded all the same
            watched.no_stacks = f"{error.filename or folder.name}: {error.strerror}"

    def _end(self, ranks: Ranks, job: Job, watched: Watched) -> None:
        """SIGTERM, time to react, then SIGKILL for all processes left, also of ranks that ended by themselves.

        The job's own grace is for ranks that can still save: after a failure they wait for the rank that is gone.
        """
        if ranks.server.closed:
            return
        exits, since = list(watched.exits), time.monotonic()
        logs = job.trial_dir / "logs"
        sizes = log_sizes(set(ranks.pids) - set(watched.places), logs) if self._wants_stacks(watched) else {}
        with contextlib.suppress(ServerLost):  # `sweep` raises it too
            if len(exits) < len(job.own_ranks):
                ranks.server.terminate()
            while len(exits) < len(job.own_ranks):
                failed = not self._may_save or any(end.returncode for end in exits) or any(_error_files(job))
                patience = self._patience.terminate if failed or job.grace_seconds is None else job.grace_seconds
                if time.monotonic() >= since + patience or end_at_once():
                    break
                exits += ranks.exits(self._patience.poll)
        watched.left += ranks.end()
        with contextlib.suppress(OSError):
            watched.places |= stacks_in_logs(sizes, logs, job.trial_dir / STACKS_DIRECTORY)


class Ranks:
    """The rank processes of one job on this host: started by `begin`; the caller calls `end`, whatever the outcome."""

    def __init__(self, server: ForkServer, job: Job) -> None:
        """Reserves what the ranks need; starts nothing."""
        self.server = server
        self._job = job
        self._gone: set[int] = set()  # ranks whose process has ended
        with contextlib.ExitStack() as held:
            self._port = job.part.port if job.part else held.enter_context(reserve_port())
            self.pipes = Path(held.enter_context(server.new_directory("pipes-")))
            self._held = held.pop_all()

    def begin(self, environment: Mapping[str, str]) -> None:
        """Start them. `environment` is the server's. Raises ServerLost."""
        job, own = self._job, self._job.own_ranks
        logs = (job.trial_dir / "logs").absolute()
        shared = trial_environment(str(logs), environment)
        shared.setdefault(RECORDER_PIPES, environment.get(RECORDER_PIPES, f"{self.pipes}/rank"))
        for rank in own:
            placed = rank_environment(
                rank,
                ranks=job.ranks,
                port=self._port,
                emulate_nodes=job.emulate_nodes,
                address=job.part.address if job.part else "127.0.0.1",
                host_ranks=len(own),
            )
            self.server.start(rank, job.command, {**shared, **placed}, logs / f"rank{rank}.log")

    @property
    def pids(self) -> dict[int, int]:
        """Process of each rank whose process runs."""
        return {rank: pid for rank, pid in self.server.pids.items() if rank not in self._gone}

    def exits(self, seconds: float) -> list[Exit]:
        """Ranks whose process ended since the last call, waiting up to `seconds`. Raises ServerLost."""
        ended = [event for event in self.server.events(seconds) if event["event"] == "exited"]
        self._gone |= {event["rank"] for event in ended}
        return [Exit(rank=event["rank"], returncode=event["returncode"], at=event["at"]) for event in ended]

    def end(self) -> list[int]:
        """Kill the ranks and their children; returns the processes that SIGKILL did not end. Raises ServerLost."""
        with self._held:
            return [] if self.server.closed else self.server.sweep()


def _error_files(job: Job) -> Iterator[Path]:
    """The error files of failed ranks so far."""
    return (job.trial_dir / ERRORS_DIRECTORY).glob("rank*.json")


class LocalLauncher:
    """`--launcher local`: one machine without Ray; the supervisor runs in this process."""

    name = "local"

    def __init__(self, supervisor: Supervisor | None = None) -> None:
        self._supervisor = supervisor or Supervisor()

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        return self._supervisor.run(job, on_progress)

    def close(self) -> None:
        self._supervisor.close()
