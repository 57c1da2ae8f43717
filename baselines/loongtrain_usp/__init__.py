"""LoongTrain with head and context parallelism, native: an all-to-all inside a node, a ring across nodes.

Sources: LoongTrain's 2D-attention (arXiv:2406.18485), part of InternEvo, with heads placed inside the node first; the
same split as USP (arXiv:2405.07719). On one node the all-to-all covers all ranks, and there is no ring.
"""

from __future__ import annotations

from baselines.ring_baseline import KeyValueRing


class LoongTrainUSP(KeyValueRing):
    """Zigzag shards; all-to-all inside the node, K, V and their gradients circulate across nodes."""

    name = "loongtrain_usp"
    system = "InternEvo"
    source = "arXiv:2406.18485"
    sharding = "zigzag"
    schedule = "usp"


METHOD = LoongTrainUSP()
