"""LoongTrain's double ring, native: rings inside the nodes and one across them send K, V and their gradients.

Source: LoongTrain (arXiv:2406.18485), part of InternEvo. There the inner ring has a size of its own; here it is the
node, whose links are the fastest.
"""

from __future__ import annotations

from baselines.ring_baseline import KeyValueRing


class LoongTrainDoubleRing(KeyValueRing):
    """Zigzag shards on a double ring."""

    name = "loongtrain_double_ring"
    system = "InternEvo"
    source = "arXiv:2406.18485"
    sharding = "zigzag"
    schedule = "double_ring"


METHOD = LoongTrainDoubleRing()
