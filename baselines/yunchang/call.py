"""yunchang's USP: an all-to-all over some ranks and a zigzag ring over the others; run by its interpreter."""

import torch.distributed as dist


def prepare(request, group):
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    size = dist.get_world_size(group)
    head_ranks = request["head_ranks"]
    set_seq_parallel_pg(head_ranks, size // head_ranks, dist.get_rank(group), size)
    attention = LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.FA)
    return lambda q, k, v: attention(q, k, v, causal=True)
