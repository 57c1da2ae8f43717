"""Command lines and environment of Ray's own processes, and of a node's container, where it has one. Pure, so that
they are tested as whole strings.

Source of the options: `ray start --help` of Ray 2.60.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.images import gpu_options
from cluster.inventory.site import Container, RayPorts
from cluster.inventory.software import RAY_SETTINGS

LABEL = "burst.ray.node"  # of a container: the same mark as in the environment of our processes
# Paths of Unix sockets may have 107 characters, and Ray adds `/session_<date>_<pid>/sockets/plasma_store`.
MAX_DIRECTORY_CHARACTERS = 40

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


def start_command(python: str, ray: RayPorts, *, address: str, directory: str, head: str) -> list[str]:
    """`ray start` on a node. `head` is address:port of the head, which is also a node that ranks run on; empty: this
    node becomes it."""
    first = [
        "--head",
        f"--port={ray.head_port}",
        f"--include-dashboard={'true' if ray.dashboard else 'false'}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={ray.dashboard_port}",
    ]
    return [
        # -u: of a start that hangs, the output so far is in its log. A remote shell may have no `ray` on its PATH.
        *(python, "-u", "-c", _WITHOUT_CLIENT_SERVER, "start"),
        *([f"--address={head}"] if head else first),
        f"--node-ip-address={address}",
        f"--node-manager-port={ray.node_manager_port}",
        f"--object-manager-port={ray.object_manager_port}",
        f"--min-worker-port={ray.worker_port_first}",
        f"--max-worker-port={ray.worker_port_last}",
        f"--temp-dir={directory}/ray",
        f"--object-store-memory={int(ray.object_store_gib * 2**30)}",
        "--num-cpus=1",  # for the supervisor of the ranks, which are no Ray workers
        "--include-log-monitor=false",  # ranks log to files
        "--disable-usage-stats",
    ]


def fixed_ports(ray: RayPorts, *, head: bool) -> dict[str, int]:
    """Ports that must be free on a node before Ray starts there, by the name of their setting."""
    names = ["node_manager_port", "object_manager_port"]
    if head:
        names += ["head_port", *(["dashboard_port"] if ray.dashboard else [])]
    return {name: port for name in names if (port := getattr(ray, name))}


def run_container(container: Container, *, mark: str) -> list[str]:
    """Start the node's container, which then idles: Ray is started inside it. Prints the container's id.

    No --privileged unless the site's extra arguments have it; `--init` reaps the zombies that Ray's workers leave.
    """
    name = f"burst-ray-{mark.replace('/', '-')}"
    command = [container.engine, "run", "--detach", "--init", "--name", name, "--label", f"{LABEL}={mark}"]
    command += ["--network", "host", "--ipc", container.ipc]
    if container.gpus:
        command += gpu_options(container.engine, container.gpus)
    for limit, value in container.ulimits.items():
        command += ["--ulimit", f"{limit}={value}"]
    for mount in container.mounts:
        parts = ["type=bind", f"source={mount.source}", f"target={mount.target or mount.source}"]
        command += ["--mount", ",".join(parts + (["readonly"] if mount.read_only else []))]
    assert container.image, container
    return [*command, *container.extra_arguments, "--entrypoint", "sleep", container.image, "infinity"]


def find_containers(engine: str, mark: str) -> list[str]:
    """Print ids of the containers with our mark, running or not: after a crash only the mark identifies them."""
    return [engine, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}={mark}"]


def remove_containers(engine: str, ids: Sequence[str]) -> list[str]:
    """End and remove exactly these containers."""
    assert ids
    return [engine, "rm", "--force", "--volumes", *ids]
