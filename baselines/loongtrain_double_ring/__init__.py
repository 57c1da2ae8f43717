"""LoongTrain's double ring, native: rings inside the windows and one across them send K, V and their gradients.

Source: LoongTrain (arXiv:2406.18485), part of InternEvo. There a window has a size of its own; here it is the node,
whose links are the fastest. dK and dV are sent in fp32 inside the first window, and in the inputs' dtype between
windows and inside later ones, as by InternEvo's `zigzag_ring_flash_attn_with_sliding_window.py`.
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
