"""The nodes of the Slurm job that this program runs in, read from the variables that Slurm sets there.

Source of the variables: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES", of Slurm 22.05.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.files.errors import UsageError
from cluster.inventory import ranges
from cluster.inventory.hosts import Host, parse_hosts
from cluster.inventory.site import RayPorts, Site

SLURM = "slurm"  # the word that stands for the nodes of the allocation wherever nodes are named
# Jobs on one node share its ports, so Ray takes free ones (0).
ALLOCATED = Site(name=SLURM, ray=RayPorts(head_port=0))

_JOB = re.compile(r"\d+")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # as in 2(x3),1


def slurm_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """The number of the Slurm job that this program runs in; None outside one."""
    job = environment.get("SLURM_JOB_ID", "")
    return job if _JOB.fullmatch(job) else None


def slurm_run(environment: Mapping[str, str] = os.environ) -> str | None:
    """Job number and number of restarts, as in `7.0`: a requeued job keeps its job number. None outside a job."""
    job = slurm_job(environment)
    return f"{job}.{environment.get('SLURM_RESTART_COUNT') or 0}" if job else None


def hosts_of(target: str, environment: Mapping[str, str] = os.environ) -> list[Host]:
    """Hosts of one target as `parse_hosts` reads it, where the word `slurm` is the nodes of the allocation."""
    return allocated_hosts(environment) if target == SLURM else parse_hosts(target)


def allocated_hosts(environment: Mapping[str, str] = os.environ) -> list[Host]:
    """The nodes of the allocation, in Slurm's order, each with its ranks. Raises UsageError outside a job.

    A node takes as many ranks of a trial as it has GPUs in the allocation. Where no variable gives their number, the
    node's GPUs are counted later. In a job without GPUs a node takes one rank for each of its Slurm tasks.
    """
    job = slurm_job(environment)
    listed = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if job is None or not listed:
        absent = "SLURM_JOB_ID" if job is None else "SLURM_JOB_NODELIST"
        raise UsageError(
            f"slurm stands for the nodes of a Slurm job, but this program runs in none ({absent} is not set); "
            "submit it with sbatch as docs/cluster.md shows, or start it in the shell of salloc"
        )
    try:
        names = ranges.expand(listed)
        addresses = _addresses(environment)
        return [
            Host(name=name, address=addresses.get(name, name), slurm_job=job, ranks=ranks)
            for name, ranks in zip(names, _ranks(environment, len(names)), strict=True)
        ]
    except ValueError as error:
        raise UsageError(f"the variables of Slurm's job {job} cannot be read: {error}") from None


def allotted(host: Host, site: Site) -> Site:
    """The site, with the ranks of the host's allocation where it names none of its own."""
    if host.ranks is None or site.ranks_per_node is not None:
        return site
    return replace(site, ranks_per_node=host.ranks)


def _addresses(environment: Mapping[str, str]) -> dict[str, str]:
    """Addresses by node, of clouds whose nodes no name server knows: `n1:10.0.0.7:host1,n2:[fd00::7]:host2`."""
    found = {}
    for entry in environment.get("SLURM_NODE_ALIASES", "").split(","):
        name, _, rest = entry.partition(":")
        address = rest.rpartition(":")[0].removeprefix("[").removesuffix("]")
        if address:
            found[name] = address
    return found


def _ranks(environment: Mapping[str, str], nodes: int) -> Sequence[int | None]:
    """Ranks of each node; None where the GPUs of the node are counted later."""
    if requested := environment.get("SLURM_GPUS_PER_NODE"):  # 8, or h100:8, or a:4,b:4
        counts = [entry.rpartition(":")[2] for entry in requested.split(",")]
        if not all(count.isascii() and count.isdecimal() for count in counts):
            raise ValueError(f"SLURM_GPUS_PER_NODE is {requested!r}; expected a number such as 8 or h100:8")
        return [sum(map(int, counts)) or None] * nodes
    if environment.get("SLURM_GPUS_ON_NODE", "0") != "0" or environment.get("SLURM_JOB_GPUS"):
        return [None] * nodes  # these describe one node alone: others may have another number
    return _tasks(environment, nodes)


def _tasks(environment: Mapping[str, str], nodes: int) -> Sequence[int]:
    """Tasks of each node: `2(x3),1` is 2, 2, 2, 1."""
    text = environment.get("SLURM_TASKS_PER_NODE", f"1(x{nodes})")
    entries = [_REPEATED.fullmatch(entry) for entry in text.split(",")]
    tasks = [int(entry[1]) for entry in entries if entry for _ in range(int(entry[2] or 1))]
    if not all(entries) or len(tasks) != nodes:
        raise ValueError(f"SLURM_TASKS_PER_NODE is {text!r}; expected a number for each of {nodes} nodes, as 2(x3),1")
    return tasks
