"""LoongTrain with head and context parallelism, native: heads traded inside a node, a ring of shards across nodes.

Sources: LoongTrain's 2D-attention (arXiv:2406.18485), part of InternEvo, with heads placed inside the node first; the
same split as USP (arXiv:2405.07719). On one node all ranks trade heads and no ring is left.
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
