"""TransformerEngine's context-parallel attention; run by its interpreter (baselines/called_attention.py)."""

import sys

import torch
import torch.distributed as dist

CHOICE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


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
        ranks, comm_type = dist.get_process_group_ranks(group), request["comm_type"]
        if comm_type == "a2a+p2p":
            levels = two_levels(ranks, request["head_ranks"])
            group = [own for own, _ in map(dist.new_subgroups_by_enumeration, levels)]
        attention.set_context_parallel_group(group, ranks, torch.cuda.Stream(), comm_type)
    return lambda q, k, v: attention(q, k, v, attn_mask_type="causal").unflatten(-1, q.shape[2:])


def kernel():
    """What the last call chose, by the names of `kernel`; "" before the first."""
    chosen = getattr(sys.modules.get(CHOICE), "_attention_backends", {})
    if chosen.get("use_fused_attention"):
        return "cudnn"
    return "fa2" if chosen.get("use_flash_attention") else "torch" if chosen.get("use_unfused_attention") else ""


def two_levels(ranks, inner):
    """The ranks of each all-to-all, consecutive ones, and those of each ring across them."""
    groups = [ranks[first : first + inner] for first in range(0, len(ranks), inner)]
    return groups, [list(each) for each in zip(*groups, strict=True)]
