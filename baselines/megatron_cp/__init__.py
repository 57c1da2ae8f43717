"""Megatron-LM's context parallelism, native: zigzag shards on a flat ring, K/V and their gradients circulate.

Source: Megatron Core's context parallelism (NVIDIA/Megatron-LM, `cp_comm_type` p2p), which TransformerEngine runs.
"""

from __future__ import annotations

from baselines.ring_baseline import KeyValueRing


class MegatronContextParallel(KeyValueRing):
    """Load-balanced ring attention with point-to-point transfers."""

    name = "megatron_cp"
    system = "Megatron-LM"
    source = "github.com/NVIDIA/Megatron-LM"
    sharding = "zigzag"


METHOD = MegatronContextParallel()
