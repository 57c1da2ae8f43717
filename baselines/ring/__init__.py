"""RingAttention, native: contiguous shards on a flat ring (arXiv:2310.01889). Causal work is not balanced.

Gradients are sent in fp32, as by the authors' code (github.com/haoliuhl/ringattention): dK and dV have the dtype of K
there, which its option `float32_logits`, on by default, makes fp32.

Differences from the original. The last permutation of each pass, which returns K and V (and in backward the gradients)
to where they began, is left out. K is sent in the inputs' dtype; with `float32_logits` the original sends it in fp32.
"""

from __future__ import annotations

from baselines.ring_baseline import KeyValueRing


class RingAttention(KeyValueRing):
    """Ranks send K and V around the ring in both passes; shards are contiguous."""

    name = "ring"
    system = "RingAttention"
    source = "arXiv:2310.01889"
    sharding = "contiguous"


METHOD = RingAttention()
