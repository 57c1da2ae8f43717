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


def positions(request, rank, size):
    """Zigzag over the rings; ranks of one all-to-all hold consecutive parts of their ring's tokens."""
    head_ranks = request["head_ranks"]
    rings, chunk = size // head_ranks, request["seq_len"] * head_ranks // (2 * size)
    place, part = divmod(rank, head_ranks)
    held = [first + token for first in (place * chunk, (2 * rings - 1 - place) * chunk) for token in range(chunk)]
    share = len(held) // head_ranks
    return held[part * share : (part + 1) * share]
