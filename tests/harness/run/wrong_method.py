"""Methods that a user might bring: a ring that is right, and three that compute something else."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.burst import Burst

RIGHT, NO_TILE, SCALED, SHIFTED = "my_ring", "no_tile", "scaled_dk", "shifted"


class OwnMethod(Burst):
    def __init__(self, name: str = RIGHT) -> None:
        self.name = self.system = name

    def attention(self, cp, settings):
        return OwnAttention(cp, settings)


class OwnAttention:
    """Every rank's queries over the gathered keys. Its mistakes are on the last rank, but for the scaled gradient."""

    def __init__(self, cp, settings) -> None:
        self.cp, self.kind = cp, settings.method
        positions_L, keys_S = cp.positions(settings.seq_len), torch.arange(settings.seq_len)
        in_trouble = cp.rank == cp.size - 1
        shift = 1 if self.kind == SHIFTED and in_trouble else 0
        self.visible = keys_S <= positions_L[:, None] + shift
        if self.kind == NO_TILE and in_trouble:
            late = positions_L >= positions_L.median()
            self.visible &= ~(late[:, None] & (keys_S < settings.seq_len // (2 * cp.size)))

    def __call__(self, q_BLND, k_BLKD, v_BLKD, *, saved=None):
        if self.kind == SCALED:
            k_BLKD = ScaledGradient.apply(k_BLKD)
        q, k, v = (one.transpose(1, 2) for one in (q_BLND, self.cp.unshard(k_BLKD), self.cp.unshard(v_BLKD)))
        return scaled_dot_product_attention(q, k, v, attn_mask=self.visible).transpose(1, 2), torch.empty(0)

    def keep(self, out_BLND, lse_BNL, tail):
        return None

    def resolved(self):
        return {"kernel": "sdpa"}


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.02 * gradient


METHOD = OwnMethod()
