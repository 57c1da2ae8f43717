"""This process as one rank of a trial: its device, its threads, its process groups.

Ranks are ordered with data parallel outermost: rank = replica x cp_size + cp_rank, so the context-parallel ranks, which
send the most, are on one node wherever they fit.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.attention.problem import host_name, node_size_of, ranks_by_node
from engine.settings import TrialSettings

_Result = TypeVar("_Result")

_WAITING_RANKS = 2048  # that may connect before rank 0 takes their connections; torch's own number


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """All ranks of one trial, seen from this one."""

    rank: int
    size: int
    replica: int  # data-parallel index
    device: torch.device
    fsdp_mesh: DeviceMesh  # one axis over all ranks; for hybrid sharding, nodes x ranks of a node; with tensor
    # parallelism, the ranks that hold the same part of each matrix
    cp_group: dist.ProcessGroup  # the ranks that share this replica's sequences, on communicators of their own

    def gather(self, value: _Result) -> list[_Result]:
        """Every rank's value, in rank order. Collective."""
        values: list[_Result | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return cast(list[_Result], values)

    def attempt(self, work: Callable[[], _Result], *errors: type[Exception]) -> tuple[_Result | None, dict[int, str]]:
        """What `work` returns on this rank, and what it raised of `errors`, in words by rank. Collective, so that no
        rank waits for one that failed: where there are failures, every rank knows of them and has to stop too."""
        result, failure = None, None
        try:
            result = work()
        except errors as error:
            failure = str(error).strip() or type(error).__name__
        return result, {rank: text for rank, text in enumerate(self.gather(failure)) if text is not None}

    def slowest(self, seconds: list[float]) -> list[float]:
        """Entry by entry, the time of the slowest rank. Collective."""
        times = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return times.tolist()

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


def local_device() -> torch.device:
    """The GPU of LOCAL_RANK, or the CPU where there is none. Raises ValueError when the host has too few GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} needs a GPU of its own, but this host shows {torch.cuda.device_count()}; start "
            "fewer ranks per host or make more GPUs visible"
        )
    return torch.device("cuda", local_rank)


def limit_threads() -> None:
    """Divide this host's cores between its ranks, because every rank's torch would otherwise use all of them.

    Does nothing where OMP_NUM_THREADS is set: torch then takes that many.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def check_world_size(settings: TrialSettings) -> None:
    """Raises ValueError when the launched ranks are not those of `settings`, or do not factor."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != settings.world_size:
        raise ValueError(
            f"the trial has world_size {settings.world_size}, but {launched} ranks were launched; launch as many"
        )
    together = settings.cp_size * settings.tp_size
    if settings.world_size % together:
        raise ValueError(
            f"world_size {settings.world_size} is not a multiple of cp_size x tp_size, {together}; choose one that is"
        )


def join(settings: TrialSettings, start: int = 1) -> World:
    """Enter the trial's process groups as torchrun's environment variables say; without them, as a world of one.

    NCCL on GPUs, gloo otherwise. Collective over all ranks. `start` counts how often the ranks were started
    with one store, where their launcher starts them again: the groups' keys in it are those of each start.
    """
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # No device_id: a group bound to a device splits communicators, which every rank of the parent must enter, and
    # context-parallel groups are created by their own members.
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        if os.environ["RANK"] == "0" and not store_is_of_agent():
            serve_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store, rank, size = next(dist.rendezvous("env://"))
        dist.init_process_group(backend, store=dist.PrefixStore(f"start{start}", store), rank=rank, world_size=size)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return arrange(settings, device)


def store_is_of_agent() -> bool:
    """Whether torchrun's agent serves the store at MASTER_PORT, and no rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@cache
def serve_store(address: str, port: int) -> dist.Store | None:
    """Let the store that this process serves at `port` listen on `address` alone: torch's own listens on all
    interfaces, and whoever reaches it reads and writes all keys. Later stores of this process with that port, and with
    torch's `multi_tenant`, are this one. Raises OSError where the port is taken.

    None, and nothing listens, for a name, which may mean another address elsewhere, and for an address that is none of
    this host's, such as one that a router translates: torch's own store is then the one that others reach.
    """
    try:
        [(family, kind, protocol, _, place), *_] = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:
        return None
    with socket.socket(family, kind, protocol) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the launcher's reservation has the port
        try:
            listening.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            raise
        listening.listen(_WAITING_RANKS)
        return dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening.detach(),
        )


def arrange(settings: TrialSettings, device: torch.device) -> World:
    """Divide the ranks into the process groups of `settings`. Collective over all ranks.

    Raises ValueError when parameters are to be sharded within nodes and the nodes differ.
    """
    together = settings.cp_size * settings.tp_size  # ranks that share a replica's sequences
    replica, size = dist.get_rank() // together, dist.get_world_size()
    fsdp_mesh = _parameter_mesh(settings, device)
    # Attention's traffic must not queue behind FSDP's, so its groups are never the world's own.
    groups = [
        dist.new_group(list(range(first, first + together)), group_desc="context_parallel")
        for first in range(0, size, together)
    ]
    return World(
        rank=dist.get_rank(),
        size=size,
        replica=replica,
        device=device,
        fsdp_mesh=fsdp_mesh,
        cp_group=groups[replica],
    )


def _parameter_mesh(settings: TrialSettings, device: torch.device) -> DeviceMesh:
    """The mesh of the parameters: sharded along the last axis, replicated along the one before it."""
    size = dist.get_world_size()
    if settings.tp_size > 1:  # a matrix is divided among the ranks of a replica, and its parts among the replicas
        shape = (size // settings.tp_size, settings.tp_size)
        return init_device_mesh(device.type, shape, mesh_dim_names=("fsdp", "tensor"))["fsdp"]
    if settings.sharding == "full":
        return init_device_mesh(device.type, (size,), mesh_dim_names=("fsdp",))
    hosts = [""] * size
    dist.all_gather_object(hosts, host_name())
    node_size = node_size_of(hosts)
    if node_size is None:
        raise ValueError(
            f"sharding hybrid needs equally many consecutive ranks on every node, found runs of {ranks_by_node(hosts)} "
            f"ranks on {len(set(hosts))} nodes; place the ranks evenly, one node after another, or choose sharding full"
        )
    return init_device_mesh(device.type, (size // node_size, node_size), mesh_dim_names=("replicate", "shard"))


def wait_for_all() -> None:
    """Wait for all ranks, so that none ends while another still exchanges messages with it. Collective."""
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


def leave() -> NoReturn:
    """End a rank, and its process, after a success. Collective.

    Not by returning. On GPUs an orderly end of NCCL's communicators takes seconds per trial and frees nothing that the
    end of the process does not free. On CPUs a thread of gloo may still hold a collective's tensors: if it drops them
    while the interpreter is shut down, asking for its lock ends the thread in a destructor, which aborts the process.
    """
    if dist.get_backend() == "nccl":
        wait_for_all()
    else:
        close_groups()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def close_groups(patience_seconds: float = 30.0) -> None:
    """Close the process groups. A shutdown that gets stuck ends the process, and does not undo a success."""
    guard = threading.Timer(patience_seconds, os._exit, args=(0,))
    guard.daemon = True
    guard.start()
    dist.destroy_process_group()
    guard.cancel()
