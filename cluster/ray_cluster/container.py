"""Command lines of docker and podman: one container per node that holds Ray and its ranks. Only containers we started
are ended."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.images import gpu_options
from cluster.inventory.site import Container, Site
from cluster.ray_cluster.state import StartedNode

LABEL = "burst.ray.node"  # carries the same mark as the environment of our processes


def run_command(container: Container, *, mark: str, name: str) -> list[str]:
    """Start the node's container, which then idles: Ray is started inside it. Prints the container's id.

    No --privileged unless the site says so; `--init` reaps the zombies that Ray's workers leave.
    """
    command = [container.engine, "run", "--detach", "--init", "--name", name, "--label", f"{LABEL}={mark}"]
    command += ["--network", container.network, "--ipc", container.ipc]
    if container.shm_size:
        command += ["--shm-size", container.shm_size]
    if container.gpus:
        command += gpu_options(container.engine, container.gpus)
    for limit, value in container.ulimits.items():
        command += ["--ulimit", f"{limit}={value}"]
    for mount in container.mounts:
        parts = ["type=bind", f"source={mount.source}", f"target={mount.target or mount.source}"]
        command += ["--mount", ",".join(parts + (["readonly"] if mount.read_only else []))]
    if container.privileged:
        command.append("--privileged")
    assert container.image, container
    return [*command, *container.extra_arguments, "--entrypoint", "sleep", container.image, "infinity"]


def find_command(engine: str, mark: str) -> list[str]:
    """Print ids of the containers with our mark, running or not: after a crash only the mark identifies them."""
    return [engine, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}={mark}"]


def remove_command(engine: str, ids: Sequence[str]) -> list[str]:
    """End and remove exactly these containers."""
    assert ids
    return [engine, "rm", "--force", "--volumes", *ids]


def interpreter(node: StartedNode) -> list[str]:
    """The command that runs the node's Python with our standard input, inside the container where there is one."""
    return [node.engine, "exec", "--interactive", node.container_id, node.python] if node.container else [node.python]


def uses_container(site: Site) -> bool:
    """Whether this site's nodes run everything in a container."""
    return site.container.engine != "none"
