"""DeepSpeed's UlyssesSPAttentionHF around torch's attention, called as `call.py` of a system is (attention.py)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def core(module, q, k, v, attention_mask=None, **more):
    """Causal attention, [batch, heads, tokens, head_dim] to [batch, tokens, heads, head_dim]."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous(), None


def prepare(request, group):
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.comm.init_distributed()  # takes over the group that is there
    size, rank, length = dist.get_world_size(group), dist.get_rank(group), request["seq_len"]
    attention = UlyssesSPAttentionHF(
        attn=core,
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
