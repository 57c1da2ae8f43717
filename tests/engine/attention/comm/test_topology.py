"""Which ranks count as one node: never ranks of two hosts."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel
from engine.attention.masks import Causal
from engine.attention.problem import shared_node_size
from tests.engine.attention.parity.test_parity import dense, distributed, problem, worst_error
from tests.ranks import run_on_ranks


@pytest.mark.parametrize(
    ("hosts", "size"),
    [("a", 1), ("aaaa", 4), ("aabb", 2), ("abcd", 1), ("aaab", 1), ("aaaabb", 2), ("abab", 1), ("aabbaa", 2)],
)
def test_a_node_never_spans_two_hosts(hosts: str, size: int) -> None:
    assert shared_node_size(list(hosts)) == size
    assert all(len(set(hosts[first : first + size])) == 1 for first in range(0, len(hosts), size))


def on_unequal_hosts(hosts: str) -> tuple[int, float]:
    """(node size found, worst error) with this rank on the host that is named for it."""
    os.environ["NCCL_HOSTID"] = hosts[dist.get_rank()]
    cp = ContextParallel()
    whole = problem(2 * 4 * cp.size, 4, 2, batch=1)
    return cp.node_size, worst_error(distributed(cp, whole, Causal(), torch.float64), dense(*whole, Causal()))


def test_unequal_hosts_share_a_sequence_as_several_nodes() -> None:
    for node_size, error in run_on_ranks(3, on_unequal_hosts, "aab"):
        assert node_size == 1
        assert error < 1e-10
