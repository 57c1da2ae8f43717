"""DeepSpeed's DistributedAttention around torch's attention; run by its interpreter
(baselines/programs/attention.py)."""

import torch
import torch.nn.functional as F
from deepspeed.sequence.layer import DistributedAttention


class Local(torch.nn.Module):
    """Causal attention over the whole sequence with some of the heads, [batch, tokens, heads, head_dim]."""

    def forward(self, q, k, v, *arguments, **more):
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def prepare(request, group):
    import deepspeed.comm

    deepspeed.comm.init_distributed()  # takes over the group that is there
    attention = DistributedAttention(Local(), group, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: attention(q, k, v, batch_dim_idx=0)
