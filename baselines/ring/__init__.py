"""RingAttention, native: contiguous shards on a flat ring (arXiv:2310.01889). Causal work is not balanced."""

from __future__ import annotations

from baselines.ring_baseline import KeyValueRing


class RingAttention(KeyValueRing):
    """K and V travel in both passes over contiguous shards."""

    name = "ring"
    system = "RingAttention"
    source = "arXiv:2310.01889"
    sharding = "contiguous"


METHOD = RingAttention()
