"""LoongTrain's double ring, native: circles inside the nodes, joined by one across them; K, V and gradients circulate.

Source: LoongTrain (arXiv:2406.18485), part of InternEvo. There the inner circle has a size of its own; here it is the
node, where its transfers are cheapest.
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
