"""Speed of the link between nodes, measured in the process that uses it.

On shared machines it varies from run to run by more than schedules differ, so the cost model reads this measurement;
and a bound formed from another day's link says little about a trial.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.accumulate.accumulators import tensor_specs
from engine.attention.comm.p2p import PointToPoint, Traffic

REPEATS = 3
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Link:
    """The speed of the link between nodes that a schedule was chosen with."""

    gib: float  # per second and rank
    measured: bool  # on these nodes, in this process; otherwise the constant of `planning.cost_model.HardwareModel`

    def __str__(self) -> str:
        """As recorded."""
        return f"{self.gib:.2f} GiB/s between nodes" + ("" if self.measured else ", assumed: deterministic")


def across_gib_per_second(group: dist.ProcessGroup, node_size: int, message: Tensor) -> float:
    """GiB per second that each rank sends to the next node, while all ranks of `group` send and receive as much.

    Each node holds `node_size` consecutive ranks, and there are several; `message` is of one size on all. The median of
    three rounds, each as slow as its slowest rank: the same number on every rank. Collective over `group`.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    assert node_size < size, "a single node has no link to another"
    # A count of bytes apart from attention's. The group's communicator, which also finds the slowest rank.
    transport = PointToPoint(group, Traffic())
    message = message.detach()
    seconds = []
    for _ in range(REPEATS + 1):
        _slowest([0.0], group, message.device)  # all start together
        started = time.perf_counter()
        transport.start(
            (message,), (rank + node_size) % size, tensor_specs((message,)), (rank - node_size) % size
        ).wait()
        _finish(message)
        seconds.append(time.perf_counter() - started)
    rounds = _slowest(seconds, group, message.device)[1:]  # the first round opens connections
    return message.numel() * message.itemsize / _GIB / statistics.median(rounds)


def _slowest(seconds: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Entry by entry, the time of the group's slowest rank; all work of the device is done. Collective."""
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    _finish(times)
    return times.tolist()


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
