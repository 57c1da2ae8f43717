"""A cluster that serves one run alone, and ends with it: `burst run --nodes` where no cluster is up."""

from __future__ import annotations

from collections.abc import Callable

from cluster.ray_cluster.down import end_cluster
from cluster.ray_cluster.state import ClusterState, StateDirectory
from cluster.transport.reach import connection
from harness.base.errors import UsageError
from harness.launch import Job, Outcome
from harness.launch.nodes.launcher import ClusterLauncher

SECONDS = 60.0  # for one answer of one node


class OwnCluster:
    """The launcher of such a cluster."""

    def __init__(
        self, launcher: ClusterLauncher, states: StateDirectory, state: ClusterState, say: Callable[[str], None]
    ) -> None:
        self.name = launcher.name
        self._launcher = launcher
        self._states = states
        self._state = state
        self._say = say

    @property
    def stuck(self) -> bool:
        """See `ClusterLauncher.stuck`."""
        return self._launcher.stuck

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        return self._launcher.run(job, on_progress)

    def close(self) -> None:
        """End the ranks, then the cluster. Idempotent."""
        try:
            self._launcher.close()
        finally:
            end_own(self._states, self._state, self._say)


def end_own(states: StateDirectory, started: ClusterState, say: Callable[[str], None]) -> None:
    """End the cluster that was started, unless somebody has done so and perhaps started another."""
    try:
        with states.held("end the cluster of this run"):
            state = states.load()
            if state is None or state.session != started.session:
                return
            connect = connection([node.host for node in state.nodes], known_hosts=state.known_hosts)
            problems = end_cluster(states, state, connect, SECONDS)
    except UsageError as error:  # the run has its results, whatever became of the cluster
        problems = {"the cluster": str(error)}
    for name, sentence in problems.items():
        say(f"{name} could not be ended ({sentence}); burst cluster down tries again")
