"""Speed of the link between nodes, measured in the process that uses it.

On shared machines it varies from run to run by more than schedules differ, so the cost model reads this measurement;
and a bound formed from another day's link says little about a trial.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.accumulate.accumulators import tensor_specs
from engine.attention.comm.p2p import PointToPoint, Traffic

REPEATS = 3
MESSAGE_BYTES = 64 << 20  # large enough for a link's full speed, small beside a shard
LATENCY_BYTES = 4096  # of a message that takes as long as a link's latency
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Link:
    """The speed of the link between nodes that a schedule was chosen with."""

    gib: float  # per second and rank
    measured: bool  # on these nodes, in this process; otherwise the constant of `engine.attention.cost.HardwareModel`

    def __str__(self) -> str:
        """As recorded."""
        return f"{self.gib:.2f} GiB/s between nodes" + ("" if self.measured else ", assumed: deterministic")


def across_gib_per_second(group: dist.ProcessGroup, node_size: int, message: Tensor, *, spread: bool = False) -> float:
    """GiB per second that each rank sends to other nodes, while all ranks of `group` send and receive as much.

    A message goes to the rank of the same place in the next node, as a ring and an all-to-all between nodes send it;
    with `spread`, an equal part of it to every rank of all other nodes, as an all-to-all among all ranks does. Each
    node holds `node_size` consecutive ranks, and there are several; `message` is of one size on all. The median of
    three rounds, each as slow as its slowest rank: the same number on every rank. Collective over `group`.
    """
    assert node_size < dist.get_world_size(group), "a single node has no link to another"
    sends = _to_all_peers(group, node_size, message.detach()) if spread else _to_one(group, node_size, message.detach())
    seconds = []
    for _ in range(REPEATS + 1):
        _slowest([0.0], group, message.device)  # all start together
        started = time.perf_counter()
        sends.send()
        _finish(message)
        seconds.append(time.perf_counter() - started)
    rounds = _slowest(seconds, group, message.device)[1:]  # the first round opens connections
    return sends.nbytes / GIB / statistics.median(rounds)


@dataclass(frozen=True, slots=True)
class _Sends:
    """Sends and receives `nbytes`, and waits for it, at every call of `send`."""

    nbytes: int
    send: Callable[[], object]


def _to_one(group: dist.ProcessGroup, node_size: int, message: Tensor) -> _Sends:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # A count of bytes apart from attention's. The group's communicator, which also finds the slowest rank.
    transport, specs = PointToPoint(group, Traffic()), tensor_specs((message,))
    to, source = (rank + node_size) % size, (rank - node_size) % size
    return _Sends(message.nbytes, lambda: transport.start((message,), to, specs, source).wait())


def _to_all_peers(group: dist.ProcessGroup, node_size: int, message: Tensor) -> _Sends:
    ranks, here = dist.get_process_group_ranks(group), dist.get_rank(group) // node_size
    peers = [rank for place, rank in enumerate(ranks) if place // node_size != here]
    flat = message.flatten()
    each = len(flat) // len(peers)  # equally long on all ranks
    parts = flat[: each * len(peers)].view(len(peers), each)
    received = torch.empty_like(parts)

    def send() -> None:
        pairs = list(zip(peers, parts, received, strict=True))
        operations = [dist.P2POp(dist.isend, sent, peer, group) for peer, sent, _ in pairs]
        operations += [dist.P2POp(dist.irecv, coming, peer, group) for peer, _, coming in pairs]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return _Sends(parts.nbytes, send)


def _slowest(seconds: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Entry by entry, the time of the group's slowest rank; all work of the device is done. Collective."""
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    _finish(times)
    return times.tolist()


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
