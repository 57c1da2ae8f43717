"""A method of your own in 40 lines: every rank gathers K and V and attends with the queries that it holds.

Copy it to baselines/my_gather/__init__.py; docs/own-method.md goes on from there.
"""

from engine.method import EngineCommand


class Gather(EngineCommand):
    name, system, source = "my_gather", "mine", "the paper or repository of your idea"

    def refuse(self, settings):
        """One sentence why this trial cannot run, or None. No torch is imported yet."""
        if settings.tp_size > 1 or not {*settings.masks} <= {"causal", "full"} or settings.model.sinks:
            return "my_gather attends causally or fully, without tensor parallelism and sinks; change these settings"
        return None

    def layout(self, settings):
        return "zigzag" if settings.mask == "causal" else "contiguous"  # zigzag: equal work for every rank

    def attention(self, cp, settings, mask=None):
        return GatheredAttention(cp, settings.seq_len, causal=(mask or settings.mask) == "causal")


class GatheredAttention:
    def __init__(self, cp, seq_len, causal):
        import torch

        self.cp, self.visible = cp, None
        if causal:
            keys_S, queries_L = torch.arange(seq_len), cp.positions(seq_len)
            self.visible = keys_S <= queries_L[:, None]

    def __call__(self, q_BLND, k_BLKD, v_BLKD, *, sinks_N=None, saved=None):
        from torch.nn.functional import scaled_dot_product_attention

        k_BSKD, v_BSKD = self.cp.unshard(k_BLKD), self.cp.unshard(v_BLKD)  # backward sums over ranks and cuts
        mask = None if self.visible is None else self.visible.to(q_BLND.device)
        q, k, v = (one.transpose(1, 2) for one in (q_BLND, k_BSKD, v_BSKD))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2), None

    def keep(self, out_BLND, lse_BNL, tail):
        return None  # nothing is kept between forward and backward but what autograd keeps

    def resolved(self):
        return {"kernel": "sdpa"}


METHOD = Gather()
