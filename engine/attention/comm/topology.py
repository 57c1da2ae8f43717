"""Which ranks share a node, from the host name of each rank. No torch."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from itertools import groupby


def host_name() -> str:
    """Name of this rank's node: NCCL_HOSTID, with which NCCL emulates nodes, or else the host's name."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


def ranks_by_node(hosts: Sequence[str]) -> list[int]:
    """Lengths of the runs of consecutive ranks on one host, in rank order."""
    return [len(list(run)) for _, run in groupby(hosts)]


def node_size_of(hosts: Sequence[str]) -> int | None:
    """Consecutive ranks per node when every node has equally many, else None. `hosts` are all ranks' in rank order."""
    runs = ranks_by_node(hosts)
    return runs[0] if len(set(runs)) == 1 and len(runs) == len(set(hosts)) else None


def shared_node_size(hosts: Sequence[str]) -> int:
    """Most consecutive ranks that always share a host when all ranks are cut into equal runs of so many.

    On equal nodes that is a node. Where one host has more ranks than another, or ranks alternate between hosts, it is
    less: one node never spans two hosts, whose GPUs cannot address each other's memory.
    """
    return math.gcd(*ranks_by_node(hosts))
