"""The launcher for one machine without Ray: the supervisor runs in this process."""

from __future__ import annotations

from collections.abc import Callable

from harness.launch import Job, Outcome
from harness.launch.supervisor import Supervisor


class LocalLauncher:
    """`--launcher local`."""

    name = "local"

    def __init__(self, supervisor: Supervisor | None = None) -> None:
        self._supervisor = supervisor or Supervisor()

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        return self._supervisor.run(job, on_progress)

    def close(self) -> None:
        self._supervisor.close()
