"""A driver's connection to a Ray cluster. It needs a raylet on this machine, which offers no resources to others."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sys
import tempfile
import threading
from types import ModuleType

from cluster.files.errors import without_color
from cluster.ray_cluster.commands import SETTINGS
from cluster.ray_cluster.node import NodeError, ask
from cluster.ray_cluster.state import ClusterState, StateDirectory
from cluster.transport.reach import LocalRunner
from harness.launch.ray.janitor import MARK, Janitor
from harness.launch.ray.launcher import environment_set, import_ray, signal_handlers_kept
from harness.machine.addresses import address_towards
from harness.records.provenance import PROJECT_ROOT

_UNSET = ("RAY_ADDRESS", "RAY_AUTH_TOKEN")  # the user's own, for another Ray
START_SECONDS = 60.0
SHUTDOWN_SECONDS = 10.0  # of Ray's own, which waits for a head that may be gone
HEADLESS_SHUTDOWN_SECONDS = 1.0  # where it is known to be


class ClusterLost(Exception):
    """The cluster cannot be joined, or its head is gone; one sentence."""


class RayGuest:
    """A connection to a cluster: the driver, and a raylet where no node of the cluster is on this machine."""

    def __init__(self, state: ClusterState, states: StateDirectory) -> None:
        """Raises ClusterLost when the cluster cannot be joined."""
        # Ray reads how to authenticate when it is first imported, and keeps that for the life of the process.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(states.token_path)}
        with environment_set({**SETTINGS, **token}, without=_UNSET):
            self.ray: ModuleType = import_ray()
        self.stuck = False  # Ray waits for a head that is gone, and would do so for minutes when the program exits
        self._janitor: Janitor | None = None
        self._directory = ""
        self._mark = f"{state.session}/guest-{secrets.token_hex(4)}"
        address = address_towards(state.head.address)
        try:
            if address not in {node.address for node in state.nodes}:
                self._start_raylet(state, states, address)
            with environment_set({**SETTINGS, **token}, without=_UNSET), signal_handlers_kept():
                self.ray.init(
                    address=state.head_address,
                    _node_ip_address=address,
                    namespace=f"burst-{secrets.token_hex(4)}",
                    log_to_driver=False,  # ranks log to files
                    logging_level="ERROR",
                )
        except (NodeError, ConnectionError, RuntimeError, ValueError) as error:
            self.close()
            said = " ".join(without_color(str(error)).split())[:300]
            if isinstance(error, NodeError) and error.log:
                said += f"; its log: {states.keep_log('this machine', error.log)}"
            raise ClusterLost(
                f"the cluster's head {state.head.name} ({state.head_address}) cannot be joined ({said}); "
                "see burst cluster status"
            ) from error

    def close(self, *, head_lost: bool = False) -> None:
        """Leave the cluster and end the processes started here. Idempotent."""
        # Without the head Ray's shutdown waits for minutes or for ever; the raylet is ended all the same.
        leaving = threading.Thread(target=self.ray.shutdown, daemon=True)
        leaving.start()
        leaving.join(HEADLESS_SHUTDOWN_SECONDS if head_lost else SHUTDOWN_SECONDS)
        self.stuck = leaving.is_alive()
        if self._directory:
            with contextlib.suppress(NodeError):  # the janitor ends what is left
                ask(
                    LocalRunner(),
                    [sys.executable],
                    "stop",
                    seconds=START_SECONDS,
                    mark=self._mark,
                    directory=f"{self._directory}/own",
                )
        if self._janitor is not None:
            self._janitor.finish()
            self._janitor = None
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = ""

    def _start_raylet(self, state: ClusterState, states: StateDirectory, address: str) -> None:
        self._directory = tempfile.mkdtemp(prefix="burst-guest-", dir="/tmp")
        self._janitor = Janitor(self._directory)  # should this process be killed
        own = f"{self._directory}/own"
        ask(
            LocalRunner(),
            [sys.executable],
            "start",
            seconds=START_SECONDS + 10,
            mark=self._mark,
            directory=own,
            token=states.token(),
            command=[
                *(sys.executable, "-u", "-m", "ray.scripts.scripts", "start"),
                *(f"--address={state.head_address}", f"--node-ip-address={address}", f"--temp-dir={own}/ray"),
                *("--object-store-memory=107374182", "--num-cpus=0", "--num-gpus=0"),
                *("--include-log-monitor=false", "--disable-usage-stats"),
            ],
            environment={**SETTINGS, MARK: self._directory, "PYTHONPATH": str(PROJECT_ROOT)},
            wait_seconds=START_SECONDS,
            reach=state.head_address,
        )
