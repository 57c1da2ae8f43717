"""LoongTrain with head and context parallelism, native: an all-to-all of heads and a ring, in both placements.

Sources: LoongTrain's 2D-attention (arXiv:2406.18485, section 4.4), part of InternEvo; the same split as USP
(arXiv:2405.07719). Head-first placement, the default, has the all-to-all inside a node and the ring across nodes
(schedule `usp`); context-first has the ring inside a node (`usp_transposed`). On one node head-first placement has no
ring, and context-first no all-to-all. dK and dV are sent as by `loongtrain_double_ring`, and its differences from the
original are those named there.
"""

from __future__ import annotations

from baselines.ring_baseline import KeyValueRing


class LoongTrainUSP(KeyValueRing):
    """Zigzag shards; heads are exchanged along one of two axes, K, V and their gradients circulate along the other."""

    name = "loongtrain_usp"
    system = "InternEvo"
    source = "arXiv:2406.18485"
    sharding = "zigzag"
    schedules = ("usp", "usp_transposed")
    grad_comm_dtype = "input_after_first"


METHOD = LoongTrainUSP()
