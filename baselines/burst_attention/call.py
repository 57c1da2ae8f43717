"""The original Burst-Attention's ring; run by its interpreter (baselines/programs/attention.py)."""


def prepare(request, group):
    from burst_attn import burst_attn_func

    scale = request["head_dim"] ** -0.5
    return lambda q, k, v: burst_attn_func(q, k, v, scale, "cuda", True, True, False, group, None)
