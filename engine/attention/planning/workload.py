"""One rank's part of a problem, as the cost model reads it: from the mask, the layout and sizes that all ranks share.

No rank's own number enters it, so that every rank estimates, and chooses, the same.
"""

from __future__ import annotations

from engine.attention.geometry.layout import Layout
from engine.attention.geometry.ring import RingTraffic
from engine.attention.masks import Mask
from engine.attention.planning.comm_plan import traffic_left
from engine.attention.planning.cost_model import Workload


def workload_of(
    mask: Mask,
    layout: Layout,
    *,
    cp_size: int,
    node_size: int,
    seq_len: int,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    input_bytes: int,
    gradient_bytes: int,
    recompute: bool = False,
    counts_traffic: bool = True,
) -> Workload:
    """The workload of attention over `seq_len` tokens in all.

    `input_bytes` and `gradient_bytes` are per element, of Q, K and V and of a gradient between ranks. Without
    `counts_traffic` a ring counts with all its steps and bytes, whatever the mask leaves.
    """
    query_elements = batch * (seq_len // cp_size) * heads * head_dim
    return Workload(
        cp_size=cp_size,
        node_size=node_size,
        heads=heads,
        kv_heads=kv_heads,
        query_bytes=query_elements * input_bytes,
        gradient_factor=gradient_bytes / input_bytes,
        forward_flops=4.0 * batch * heads * head_dim * mask.area(seq_len) / cp_size,
        rows=batch * (seq_len // cp_size),
        left=traffic_left(mask, layout, cp_size, node_size, seq_len) if counts_traffic else RingTraffic(),
        recompute=recompute,
    )
