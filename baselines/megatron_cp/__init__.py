"""Megatron-LM's context parallelism, native: zigzag shards, and the four communication types that it has.

Source: Megatron Core's context parallelism (NVIDIA/Megatron-LM, `cp_comm_type`), which TransformerEngine runs
(NVIDIA/TransformerEngine, `context_parallel.py`). Its types by the names of our schedules:

- `p2p`, the default: schedule `ring`. K and V circulate, and dK and dV behind them, all in the inputs' dtype. The
  steps of a forward alternate over two streams.
- `all_gather`: schedule `all_gather`. K and V are gathered, and the tiles of the rank's queries alternate over two
  streams.
- `a2a`: schedule `ulysses`, an all-to-all of tokens for heads.
- `a2a+p2p`: schedule `usp`, an all-to-all inside a node and a ring across nodes.

Differences from the original. Partial outputs are merged four at a time; TransformerEngine holds all of them to the
end. dQ, dK and dV are summed in fp32; TransformerEngine sums them in bf16. With `all_gather` its backward uses two
streams, ours one, and gradients are reduced by an all-to-all and one fp32 sum in place of a reduce-scatter in bf16: the
same bytes. With `a2a` and `a2a+p2p` LSE and delta are exchanged in place of saving O a second time: 8 bytes per token
and head, beside 8 x head_dim x (1 + K/N) of bf16 tensors. With `a2a+p2p` tokens that the next node's queries cannot see
are left out. TransformerEngine refuses sliding windows under `p2p` and `a2a+p2p`; here every mask works.
"""

from __future__ import annotations

from baselines.ring_baseline import KeyValueRing


class MegatronContextParallel(KeyValueRing):
    """Load-balanced attention by the communication type that `schedule` names."""

    name = "megatron_cp"
    system = "Megatron-LM"
    source = "github.com/NVIDIA/Megatron-LM"
    sharding = "zigzag"
    schedules = ("ring", "all_gather", "ulysses", "usp")
    grad_comm_dtype = "input"
    forward_streams = 2


METHOD = MegatronContextParallel()
