"""TransformerEngine's context-parallel attention; run by its interpreter (baselines/programs/attention.py)."""

import torch
import torch.distributed as dist


def prepare(request, group):
    from transformer_engine.pytorch import DotProductAttention

    attention = DotProductAttention(
        request["heads"],
        request["head_dim"],
        num_gqa_groups=request["kv_heads"],
        qkv_format="bshd",
        attn_mask_type="causal",
    )
    size = dist.get_world_size(group)
    if size > 1:
        attention.set_context_parallel_group(group, list(range(size)), torch.cuda.Stream(), "p2p")
    return lambda q, k, v: attention(q, k, v, attn_mask_type="causal").unflatten(-1, q.shape[2:])
