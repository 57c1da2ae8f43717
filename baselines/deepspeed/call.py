"""DeepSpeed's attention around torch's, over all ranks: DistributedAttention, or UlyssesSPAttentionHF where `attention`
names it; run by its interpreter (baselines/programs/attention.py)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def causal(q, k, v):
    """[batch, heads, tokens, head_dim] to [batch, tokens, heads, head_dim]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


class Local(torch.nn.Module):
    """Attention over the whole sequence with some of the heads, [batch, tokens, heads, head_dim]."""

    def forward(self, q, k, v, *arguments, **more):
        return causal(*(each.transpose(1, 2) for each in (q, k, v)))


def prepare(request, group):
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.comm.init_distributed()  # takes over the group that is there
    if request.get("attention") == "UlyssesSPAttentionHF":
        return of_transformers(request, group)
    attention = DistributedAttention(Local(), group, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: attention(q, k, v, batch_dim_idx=0)


def of_transformers(request, group):
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    size, rank, length = dist.get_world_size(group), dist.get_rank(group), request["seq_len"]
    attention = UlyssesSPAttentionHF(
        attn=lambda module, q, k, v, *arguments, **more: (causal(q, k, v).contiguous(), None),
        seq_length_is_variable=False,
        local_seq_length=length // size,
        global_seq_length=length,
        batch_size=request["batch_size"],
        attn_head_count=request["heads"],
        kv_head_count=request["kv_heads"],
        num_hidden_layers=1,
        process_group=group,
        attn_head_size=request["head_dim"],
    )
    module = torch.nn.Module()  # attention asks its module whether it trains
    own = torch.arange(length // size * rank, length // size * (rank + 1)).expand(request["batch_size"], -1)

    def attend(q, k, v):
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out, _ = attention(module, q, k, v, None, position_ids=own)
        return out.reshape(*own.shape, request["heads"], request["head_dim"])

    return attend
