"""Software of a site's nodes: interpreter and checkout, container, Ray's ports and settings, SSH logins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cluster.inventory.hosts import is_user, parse_jump

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ULIMIT = re.compile(r"-1|\d+(:(-1|\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """The interpreter and the checkout on the nodes; inside the container where the site uses one."""

    python: str | None = None  # absolute path of the interpreter in its environment; null: the path of ours
    folder: str | None = None  # absolute path of this repository; null: the path of ours

    def __post_init__(self) -> None:
        for name, value in (("python", self.python), ("folder", self.folder)):
            if value is not None and not value.startswith("/"):
                raise ValueError(f"software.{name} is {value!r}; expected an absolute path on the nodes, or null")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A folder of the node inside the container."""

    source: str
    target: str | None = None  # null: the same path
    read_only: bool = False

    def __post_init__(self) -> None:
        for path in (self.source, self.target or self.source):
            if not path.startswith("/") or "," in path:
                raise ValueError(f"container.mounts has {path!r}; expected an absolute path without a comma")


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """How a container is started on a node, where one is used at all."""

    engine: Literal["none", "docker", "podman"] = "none"
    image: str | None = None  # name:tag
    image_id: str | None = None  # sha256:... that the engine must show; null: any image of that name
    gpus: str = "all"  # docker's --gpus, or podman's nvidia.com/gpu=...; empty: none
    mounts: tuple[Mount, ...] = ()
    ipc: Literal["host", "private", "shareable"] = "host"
    # Registered memory is locked memory, and NCCL's threads need stack; NVIDIA documents these limits for its
    # containers.
    ulimits: Mapping[str, str] = field(default_factory=lambda: {"memlock": "-1", "stack": "67108864"})
    extra_arguments: tuple[str, ...] = ()  # of the engine's `run`, each one argument, such as --shm-size=64g

    def __post_init__(self) -> None:
        if self.engine != "none" and not self.image:
            raise ValueError(f"container.engine is {self.engine} but container.image is empty; name the image")
        if self.image is not None and (not self.image or self.image.startswith("-") or len(self.image.split()) != 1):
            raise ValueError(f"container.image is {self.image!r}; expected a name such as burst:latest")
        if self.image_id is not None and not _DIGEST.fullmatch(self.image_id):
            raise ValueError(f"container.image_id is {self.image_id!r}; expected sha256: and 64 hexadecimal digits")
        for name, value in self.ulimits.items():
            if not name.isalpha() or not _ULIMIT.fullmatch(value):
                raise ValueError(f"container.ulimits has {name}: {value}; expected numbers such as memlock: -1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RayPorts:
    """Ports and folders of `burst cluster up`. 0 lets the node choose a free port."""

    head_port: int = 6379
    dashboard: bool = False  # on the head's loopback only; needs ray[default]
    dashboard_port: int = 8265
    node_manager_port: int = 0
    object_manager_port: int = 0
    worker_port_first: int = 20000
    worker_port_last: int = 20999
    temp_dir: str | None = None  # absolute path on the nodes; null: one of its own for each cluster, below /tmp
    object_store_gib: float = 1.0  # we pass messages through Ray, never tensors
    ready_seconds: float = 120.0  # until every node must have joined

    def __post_init__(self) -> None:
        for name in ("head_port", "dashboard_port", "node_manager_port", "object_manager_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise ValueError(f"ray.{name} is {getattr(self, name)}; expected 0 to 65535")
        if not 1024 <= self.worker_port_first <= self.worker_port_last < 65536:
            raise ValueError(
                f"ray's worker ports are {self.worker_port_first} to {self.worker_port_last}; "
                "expected a range within 1024 to 65535"
            )
        fixed = (
            self.head_port,
            self.dashboard_port,
            self.node_manager_port,
            self.object_manager_port,
        )
        for port in fixed:
            if port and (fixed.count(port) > 1 or self.worker_port_first <= port <= self.worker_port_last):
                raise ValueError(
                    f"ray would use port {port} twice; give each service, and the workers, ports of their own"
                )
        if self.temp_dir is not None and not self.temp_dir.startswith("/"):
            raise ValueError(f"ray.temp_dir is {self.temp_dir!r}; expected an absolute path on the nodes, or null")
        if self.object_store_gib < 0.1:
            raise ValueError(f"ray.object_store_gib is {self.object_store_gib:g}; expected at least 0.1")
        if self.ready_seconds <= 0:
            raise ValueError(f"ray.ready_seconds is {self.ready_seconds:g}; expected more than 0")


USAGE_REPORTS = "RAY_USAGE_STATS_ENABLED"  # Ray sends them to its makers unless this is 0

# Read by Ray's own processes, which inherit them; the ranks do not.
RAY_SETTINGS: Mapping[str, str] = {
    USAGE_REPORTS: "0",
    "RAY_memory_monitor_refresh_ms": "0",  # out of host memory, the kernel should end a rank, not its supervisor
    "RAY_worker_niceness": "0",  # Ray's own 15 lets ranks wait for everything else that runs on the host
    # Ray's setproctitle writes the title over a part of the environment that /proc shows, and so over the mark by which
    # processes of ours are found, unless this is set.
    "SPT_NOENV": "1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SshDefaults:
    """SSH settings of hosts that have none of their own."""

    user: str | None = None
    port: int | None = None
    key: Path | None = None  # private key file; `~` is the home directory
    known_hosts: Path | None = None  # file with the keys of hosts and jump hosts; null: ~/.ssh/known_hosts
    jump: str | None = None  # a host to go through, as [user@]host[:port]; several, separated by commas, in this order
    jump_key: Path | None = None  # private key for the jump hosts; null: the same as `key`

    def __post_init__(self) -> None:
        if self.user is not None and not is_user(self.user):
            raise ValueError(f"ssh.user is {self.user!r}; expected letters, digits, '_', '-' or '.', without host")
        if self.port is not None and not 0 < self.port < 65536:
            raise ValueError(f"ssh.port is {self.port}; expected a number from 1 to 65535")
        if self.jump is not None:
            parse_jump(self.jump, None)  # raises ValueError for a wrong one
