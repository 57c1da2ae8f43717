"""How fast the link between nodes is, measured in the trial that is bound by it and in the pattern of its ring.

A bound formed from another day's link says little: on shared machines it varies from run to run.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from engine.attention.context import ContextParallel
from engine.attention.like import likes
from engine.distributed import World

REPEATS = 3
_GIB = 1 << 30


def across_gib_per_second(world: World, cp: ContextParallel, message: Tensor) -> float | None:
    """GiB per second that a rank sends to the next node while all ranks do, and receive as much; None on one node.

    `message` has the size of what a ring would send. The median of three rounds, each as slow as its slowest rank.
    Collective.
    """
    if cp.node_size == cp.size:
        return None
    route = cp.routes(cp.ring("double_ring"), "direct").across
    assert route is not None
    nodes, node = cp.size // cp.node_size, cp.rank // cp.node_size
    message = message.detach()
    seconds = []
    for _ in range(REPEATS + 1):
        world.barrier()
        _finish(message)
        started = time.perf_counter()
        route.start((message,), (node + 1) % nodes, likes((message,)), (node - 1) % nodes).wait()
        _finish(message)
        seconds.append(time.perf_counter() - started)
    slowest = world.slowest(seconds)[1:]  # the first round opens connections
    return message.numel() * message.itemsize / _GIB / statistics.median(slowest)


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
