"""The rank processes of one job on this host."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from harness.launch.environment import rank_environment, trial_environment
from harness.launch.forkserver import ForkServer
from harness.launch.launcher import Job
from harness.launch.ports import reserve_port
from harness.launch.verdict import Exit

RECORDER_PIPES = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # beginning of the names of pipes that ask for its dump


class Ranks:
    """Started by `begin`. The caller calls `end`, whatever the job's outcome."""

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
