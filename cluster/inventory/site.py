"""A site: the expectations that a node is compared with, and the software it is set up with.

Read from experiments/sites/*.yaml, or from an inventory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cluster.files import reader
from cluster.inventory.expectations import DiskLimit as DiskLimit
from cluster.inventory.expectations import GpuExpectation as GpuExpectation
from cluster.inventory.expectations import GpuMemoryLimit as GpuMemoryLimit
from cluster.inventory.expectations import HostMemoryLimit as HostMemoryLimit
from cluster.inventory.expectations import NetworkExpectation as NetworkExpectation
from cluster.inventory.expectations import SharedPath as SharedPath
from cluster.inventory.expectations import Storage as Storage
from cluster.inventory.software import Container as Container
from cluster.inventory.software import Mount as Mount
from cluster.inventory.software import RayPorts as RayPorts
from cluster.inventory.software import Software as Software
from cluster.inventory.software import SshDefaults as SshDefaults

_PATH_LISTS = ("PATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
    ranks_per_node: int | None = None  # null: one per GPU; nodes without GPUs need a number
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
