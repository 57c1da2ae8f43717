"""Command lines and environment of Ray's own processes. Pure, so that they are tested as whole strings.

Source of the options: `ray start --help` of Ray 2.60.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from cluster.inventory.site import RayPorts
from cluster.inventory.software import RAY_SETTINGS

# Paths of Unix sockets may have 107 characters, and Ray adds `/session_<date>_<pid>/sockets/plasma_store`.
MAX_DIRECTORY_CHARACTERS = 40
SUPERVISORS_PER_NODE = 1  # Ray's one CPU of a node; ranks are not Ray workers

# `ray start --head` opens port 10001 for Ray Client wherever grpc can be imported, and no option turns that off.
_WITHOUT_CLIENT_SERVER = (
    "import ray.scripts.scripts as ray; ray.get_ray_client_dependency_error = lambda: True; ray.main()"
)

SETTINGS: Mapping[str, str] = {
    **RAY_SETTINGS,
    # A node that is cut off without closing its connections is noticed after period x threshold + timeout: 11 s in
    # place of 25 s.
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
    # Without the head a node's Ray ends, and with it the ranks there: after this long in place of 60 s.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
}


def node_resource(name: str) -> str:
    """The resource that a node alone has: how a placement group asks for exactly this node."""
    return f"burst_node_{name}"


def head_command(python: str, ports: RayPorts, *, address: str, name: str, directory: str) -> list[str]:
    """Start the head, which is also the first node that ranks run on."""
    return [
        *_start(python, ports, address=address, directory=directory),
        "--head",
        f"--port={ports.head_port}",
        f"--include-dashboard={'true' if ports.dashboard else 'false'}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={ports.dashboard_port}",
        *_workers(ports, name),
    ]


def worker_command(python: str, ports: RayPorts, *, address: str, name: str, directory: str, head: str) -> list[str]:
    """Start one more node; `head` is address:port."""
    return [*_start(python, ports, address=address, directory=directory), f"--address={head}", *_workers(ports, name)]


def guest_command(python: str, *, address: str, directory: str, head: str) -> list[str]:
    """Let this machine join without resources: Ray's drivers need a raylet on their own machine."""
    return [
        *_start(python, RayPorts(object_store_gib=0.1), address=address, directory=directory),
        f"--address={head}",
        "--num-cpus=0",
    ]


def fixed_ports(ports: RayPorts, *, head: bool) -> dict[str, int]:
    """Ports that must be free on a node before Ray starts there, by the name of their setting."""
    names = ["node_manager_port", "object_manager_port"]
    if head:
        names += ["head_port", *(["dashboard_port"] if ports.dashboard else [])]
    return {name: port for name in names if (port := getattr(ports, name))}


def _start(python: str, ports: RayPorts, *, address: str, directory: str) -> list[str]:
    # A remote shell may not have `ray` on its PATH.
    return [
        # -u: of a start that hangs, the output so far is in its log.
        *(python, "-u", "-c", _WITHOUT_CLIENT_SERVER, "start"),
        f"--node-ip-address={address}",
        f"--node-manager-port={ports.node_manager_port}",
        f"--object-manager-port={ports.object_manager_port}",
        f"--temp-dir={directory}",
        f"--object-store-memory={int(ports.object_store_gib * 2**30)}",
        "--num-gpus=0",  # the ranks take the GPUs, and Ray does not start the ranks
        "--include-log-monitor=false",  # ranks log to files
        "--disable-usage-stats",
    ]


def _workers(ports: RayPorts, name: str) -> list[str]:
    return [
        f"--num-cpus={SUPERVISORS_PER_NODE}",
        f"--resources={json.dumps({node_resource(name): 1})}",
        f"--min-worker-port={ports.worker_port_first}",
        f"--max-worker-port={ports.worker_port_last}",
    ]
