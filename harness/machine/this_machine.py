"""The GPUs, cores and memory of this machine, found without importing torch: planning is quick, also on a laptop."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine.memory.gpu_state import query_gpus, visible_gpus
from harness.base.errors import UsageError

if TYPE_CHECKING:
    from cluster.inventory.site import Site

# Without a GPU ranks are processes that share the cores. More ranks than cores are slow but correct, so that a laptop
# can try CP 4 or 8. Beyond this, memory for one copy of torch per rank is the limit.
CPU_RANKS = 8

_CGROUP = Path("/sys/fs/cgroup")
ANY_NUMBER = 1 << 16  # GPUs of imagined hosts

_DRIVER_VERSION = Path("/sys/module/nvidia/version")  # of the loaded kernel module


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One host that trials may use, or several alike."""

    hostname: str
    device: Literal["cuda", "cpu"]
    cores: int  # that this process may use
    memory_gib: float  # host memory that this process may use; 0 when unknown
    gpu_name: str = ""  # as nvidia-smi prints it; empty without a GPU
    gpu_count: int = 0
    gpu_memory_gib: float = 0.0  # of the smallest GPU
    driver: str = ""  # version of NVIDIA's driver; empty without a GPU, or where it is not known
    gpu_problem: str = ""  # one sentence when the machine seems to have GPUs that cannot be used
    nodes: int = 1  # hosts; every other figure is of one of them
    ranks_per_node: int | None = None  # of one trial; None: one per GPU, or processes when there is no GPU

    @property
    def node_ranks(self) -> int:
        """Ranks of one trial that a host takes."""
        if self.ranks_per_node is not None:
            return self.ranks_per_node
        return self.gpu_count if self.device == "cuda" else max(CPU_RANKS, self.cores)

    @property
    def max_ranks(self) -> int:
        """Ranks one trial may have here."""
        return self.nodes * self.node_ranks

    def nodes_for(self, ranks: int) -> int | None:
        """Hosts that a trial of so many ranks takes: as few as hold them in equal shares. None when it cannot be."""
        counts = range(-(-ranks // self.node_ranks), self.nodes + 1)
        return next((count for count in counts if ranks % count == 0), None)


def together(machines: Sequence[Machine], ranks_per_node: int) -> Machine:
    """Several hosts as one machine, with the least that any has. Raises UsageError when some have GPUs, some not."""
    kinds = sorted({machine.gpu_name or "no GPU" for machine in machines})
    if len({machine.device for machine in machines}) > 1:
        raise UsageError(f"the nodes have {' and '.join(kinds)}; name nodes of one kind with --nodes")
    return Machine(
        hostname=",".join(machine.hostname for machine in machines),
        device=machines[0].device,
        cores=min(machine.cores for machine in machines),
        memory_gib=min(machine.memory_gib for machine in machines),
        gpu_name="" if machines[0].device == "cpu" else " + ".join(kinds),
        gpu_count=min(machine.gpu_count for machine in machines),
        gpu_memory_gib=min(machine.gpu_memory_gib for machine in machines),
        driver=" + ".join(sorted({machine.driver for machine in machines})),
        nodes=len(machines),
        ranks_per_node=ranks_per_node,
    )


def imagined(gpu_name: str, gpu_memory_gib: float, gpus_per_node: int | None = None) -> Machine:
    """Any number of GPUs of a kind, to plan for hardware that is not here: on one host, or on hosts of so many each."""
    return Machine(
        hostname="", device="cuda", cores=1, memory_gib=0.0,
        gpu_name=gpu_name, gpu_count=gpus_per_node or ANY_NUMBER, gpu_memory_gib=gpu_memory_gib,
        nodes=ANY_NUMBER // gpus_per_node if gpus_per_node else 1,
    )  # fmt: skip


def discover() -> Machine:
    """This machine. Honours CUDA_VISIBLE_DEVICES, CPU affinity and the control group's limits."""
    gpus, problem = query_gpus()
    gpus = visible_gpus(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Machine(
        hostname=socket.gethostname(),
        device="cuda" if gpus else "cpu",
        cores=_cores(),
        memory_gib=round(_memory_bytes() / 2**30, 1),
        gpu_name=gpus[0].name if gpus else "",
        gpu_count=len(gpus),
        gpu_memory_gib=min((gpu.memory_gib for gpu in gpus), default=0.0),
        driver=_driver() if gpus else "",
        gpu_problem=problem,
    )


def _driver() -> str:
    try:
        return _DRIVER_VERSION.read_text(encoding="ascii").strip()
    except OSError:  # a container that hides it
        return ""


def _cores() -> int:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _cgroup_limit("cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        return max(1, min(affinity, int(quota) // int(period)))
    return affinity


def _memory_bytes() -> int:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # the platform does not say
        return 0
    limit = _cgroup_limit("memory.max")
    return min(total, int(limit)) if limit.isdecimal() else total


def _cgroup_limit(name: str) -> str:
    """A limit of this process's control group (v2, as containers see it), or empty when there is none."""
    try:
        return (_CGROUP / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def ranks_of(machine: Machine, site: Site) -> int:
    """Ranks of one trial that a host takes: the site's number, else one per GPU, or one where there is none.

    Raises ValueError for GPUs that cannot be used, and for more ranks than GPUs.
    """
    if machine.gpu_problem:
        raise ValueError(machine.gpu_problem)
    ranks = site.ranks_per_node or machine.gpu_count or 1
    if 0 < machine.gpu_count < ranks:
        raise ValueError(f"ranks_per_node is {ranks}, but it has {machine.gpu_count} GPUs; give at most that many")
    return ranks


def address_towards(host: str) -> str:
    """This machine's IPv4 address on the route to `host`. Raises OSError where its name has none, or no route leads
    there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(host), 9))
        return str(probe.getsockname()[0])
