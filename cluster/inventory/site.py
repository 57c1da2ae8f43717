"""A site: the expectations that a node is compared with, and the software it is set up with.

Read from experiments/sites/*.yaml, or from an inventory. A network setting that is null is discovered on each node, or
not judged.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cluster.files import reader
from cluster.inventory.software import Container as Container
from cluster.inventory.software import Mount as Mount
from cluster.inventory.software import RayPorts as RayPorts
from cluster.inventory.software import Software as Software
from cluster.inventory.software import SshDefaults as SshDefaults

_PATH_LISTS = ("PATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _check_percent(name: str, value: float) -> None:
    if not 0 < value <= 100:
        raise ValueError(f"{name} is {value:g}; expected a percentage above 0 and at most 100")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuExpectation:
    """GPUs of every node."""

    count: int | None = None  # null: any number; 0: none
    model: str = ""  # part of the name nvidia-smi prints, such as H200; empty takes any

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 0:
            raise ValueError(f"gpus.count is {self.count}; expected 0 or more, or null for any number")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemoryLimit:
    """GPU memory in use above which the node counts as busy.

    Sources: 15 MiB on one GPU, facebookresearch/gcm; 100 MB over all of them, check.sh of the BurstEngine artifact.
    """

    one_gpu_mib: float = 15.0
    all_gpus_mib: float = 100.0
    tries: int = 3  # the memory of a process that has just ended is released a moment later
    wait_seconds: float = 3.0

    def __post_init__(self) -> None:
        if self.one_gpu_mib < 0 or self.all_gpus_mib < 0:
            raise ValueError("gpu_memory has a limit below 0; give 0 or more MiB")
        if not 1 <= self.tries <= 20:
            raise ValueError(f"gpu_memory.tries is {self.tries}; expected 1 to 20")
        if not 0 <= self.wait_seconds <= 60:
            raise ValueError(f"gpu_memory.wait_seconds is {self.wait_seconds}; expected 0 to 60")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemoryLimit:
    """Host memory in use, in percent of all there is."""

    warn_percent: float = 90.0

    def __post_init__(self) -> None:
        _check_percent("host_memory.warn_percent", self.warn_percent)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskLimit:
    """One path that needs free space. Percentages are of the space an unprivileged user can have, as `df` counts it."""

    path: str
    warn_percent: float = 90.0
    fail_percent: float = 95.0  # source: imbue-ai/cluster-health

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"disks has the path {self.path!r}; expected an absolute path such as /data")
        _check_percent(f"fail_percent of {self.path}", self.fail_percent)
        _check_percent(f"warn_percent of {self.path}", self.warn_percent)
        if self.warn_percent > self.fail_percent:
            raise ValueError(
                f"{self.path} warns at {self.warn_percent:g}% but fails at {self.fail_percent:g}% already; "
                "give warn_percent at most fail_percent"
            )


_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14}")  # the kernel allows 15 characters
_HCA = re.compile(r"[A-Za-z0-9_]+(:\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkExpectation:
    """Interfaces and adapters that carry a trial's traffic, and the rates they must have."""

    interface: str | None = None  # for NCCL's and gloo's sockets; null: the one with the route to the head node
    hcas: tuple[str, ...] | None = None  # exact names, mlx5_2 or mlx5_2:1; null: chosen by discovery; []: none
    mtu: int | None = None  # bytes, of `interface`
    port_rate_gbps: float | None = None  # least rate of each port in `hcas`; null: that of the GPU's profile
    gid_index: int | None = None  # NCCL_IB_GID_INDEX; null leaves the choice to NCCL

    def __post_init__(self) -> None:
        if self.interface is not None and not _INTERFACE.fullmatch(self.interface):
            raise ValueError(f"network.interface is {self.interface!r}; expected one interface's name such as eth0")
        for hca in self.hcas or ():
            if not _HCA.fullmatch(hca):
                raise ValueError(
                    f"network.hcas has {hca!r}; expected names such as mlx5_2 or mlx5_2:1, without '=' or '^'"
                )
        if self.mtu is not None and not 576 <= self.mtu <= 65536:
            raise ValueError(f"network.mtu is {self.mtu}; expected 576 to 65536 bytes")
        if self.port_rate_gbps is not None and self.port_rate_gbps <= 0:
            raise ValueError(f"network.port_rate_gbps is {self.port_rate_gbps:g}; expected more than 0, or null")
        if self.gid_index is not None and not 0 <= self.gid_index <= 255:
            raise ValueError(f"network.gid_index is {self.gid_index}; expected 0 to 255, or null to leave it to NCCL")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPath:
    """One folder that every node must see, the same on all."""

    path: str
    write: bool = True  # false: a read-only mount is fine
    min_free_gib: float = 0.0
    probe_seconds: float = 10.0  # deadline of this path, so that a hanging file server does not delay the check further

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"storage.shared has the path {self.path!r}; expected an absolute path such as /data")
        if self.min_free_gib < 0:
            raise ValueError(f"min_free_gib of {self.path} is {self.min_free_gib:g}; expected 0 or more")
        if not 0 < self.probe_seconds <= 300:
            raise ValueError(
                f"probe_seconds of {self.path} is {self.probe_seconds:g}; expected above 0 and at most 300"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Shared folders, and the servers behind them."""

    shared: tuple[SharedPath, ...] = ()
    # IP addresses of file servers: adapters with the route to one of them carry storage and are left out of NCCL's.
    servers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for server in self.servers:
            try:
                ipaddress.ip_address(server)
            except ValueError:
                raise ValueError(f"storage.servers has {server!r}; expected an IP address such as 10.0.0.9") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Everything a node is compared with and set up by. The defaults fit any single machine."""

    name: str = "local"
    gpus: GpuExpectation = field(default_factory=GpuExpectation)
    gpu_memory: GpuMemoryLimit = field(default_factory=GpuMemoryLimit)
    host_memory: HostMemoryLimit = field(default_factory=HostMemoryLimit)
    disks: tuple[DiskLimit, ...] = (DiskLimit(path="/"),)
    network: NetworkExpectation = field(default_factory=NetworkExpectation)
    storage: Storage = field(default_factory=Storage)
    software: Software = field(default_factory=Software)
    container: Container = field(default_factory=Container)
    ray: RayPorts = field(default_factory=RayPorts)
    ranks_per_node: int | None = None  # null: one per GPU, or 1 on a node without
    environment: Mapping[str, str] = field(default_factory=dict)  # wins over every rendered variable
    ssh: SshDefaults = field(default_factory=SshDefaults)

    def __post_init__(self) -> None:
        if self.ranks_per_node is not None and not 1 <= self.ranks_per_node <= 1024:
            raise ValueError(f"ranks_per_node is {self.ranks_per_node}; expected 1 to 1024, or null for one per GPU")
        for name, value in self.environment.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"environment has the name {name!r}; expected letters, digits and '_'")
            if "\0" in value:
                raise ValueError(f"environment.{name} holds a zero byte, which no variable can; remove it")
            if problem := _path_problem(name, value):
                raise ValueError(f"environment.{name} is {value!r}; {problem}")


def _path_problem(name: str, value: str) -> str:
    """The problem of a variable that lists paths; "" when there is none, and for all other variables.

    No shell reads the value. A relative or empty part stands for the current folder, which is the trial's.
    """
    if name not in _PATH_LISTS:
        return ""
    if "$" in value:
        return "no shell expands a '$' on the nodes; write every path out"
    parts = re.split(r"[:\s]+", value) if name == "LD_PRELOAD" else value.split(":")
    if not all(part.startswith("/") for part in parts):
        return "expected absolute paths with ':' between them"
    return ""


def load_site(path: Path) -> Site:
    """Read a site file. Raises ValueError with file and line for anything but a valid site."""
    return reader.load(Site, path, "site file")
