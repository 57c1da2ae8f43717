"""LoongTrain's double ring, native: rings inside the windows and one across them send K, V and their gradients.

Source: LoongTrain (arXiv:2406.18485), part of InternEvo. There a window has a size of its own; here it is the node,
whose links are the fastest. dK and dV are sent in fp32 inside the first window, and in the inputs' dtype between
windows and inside later ones, as by InternEvo's `zigzag_ring_flash_attn_with_sliding_window.py`.

Differences from the original. A rank's own part of dK and dV stays where it is, and between nodes it returns straight
to its owner: one step less in each window and one less between windows than InternEvo, whose gradients go all the way
around. Between nodes, tokens that the other nodes' queries cannot see are left out. Sums are fp32; InternEvo sums dK
and dV of later windows in bf16. InternEvo refuses all masks but the causal one; here every mask works.
"""

from __future__ import annotations

from baselines.ring_baseline import KeyValueRing


class LoongTrainDoubleRing(KeyValueRing):
    """Zigzag shards on a double ring."""

    name = "loongtrain_double_ring"
    system = "InternEvo"
    source = "arXiv:2406.18485"
    sharding = "zigzag"
    schedules = ("double_ring",)
    grad_comm_dtype = "input_after_first"


METHOD = LoongTrainDoubleRing()
