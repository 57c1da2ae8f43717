"""Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) as a module: queries, shared key and latent of a layer.

A latent of few numbers stands for K and V of all heads, and `engine.attention.algorithms.latent` expands it where it is
used, so no K and V of all heads are formed here. Queries may come from a latent of their own. Only the last dims of a
head are rotated, and all heads share those of K.

Shape letters as in `engine.models.decoder`, with R rotated dims, C latent, X dims of a head that the latent gives.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.models.decoder import Attention, Rotary
from engine.models.matrices import Linear
from engine.ops.copies import computed
from engine.ops.elementwise import rotate
from engine.ops.norm import RMSNorm
from engine.rope import parse_rope
from engine.shape import ModelShape

LATENT_NORM_EPS = 1e-6  # of the norms of latents in every DeepSeek model, whatever that of the other norms


class LatentAttention(Attention):
    """The projections around latent attention, by DeepSeek's names: `_a` gives a latent, `_b` takes one."""

    def __init__(self, shape: ModelShape) -> None:
        nn.Module.__init__(self)  # it has none of the matrices of `Attention`
        self.heads, self.head_dim, self.plain = shape.heads, shape.head_dim, False
        self.rope_dim, self.latent, self.interleaved = shape.rope_dim, shape.kv_latent, shape.rope_interleaved
        self.score_factor = parse_rope(shape.rope_scaling).score_factor
        queries, hidden = shape.heads * shape.head_dim, shape.hidden
        self.sinks = nn.Parameter(torch.empty(shape.heads)) if shape.sinks else None
        self.q_a: Linear | None = None
        if shape.q_latent:
            self.q_a = Linear(hidden, shape.q_latent, shape.qkv_bias)
            self.q_a_norm = RMSNorm(shape.q_latent, eps=LATENT_NORM_EPS)
            self.q_b = Linear(shape.q_latent, queries)
        else:
            self.q = Linear(hidden, queries)
        self.kv_a = Linear(hidden, shape.kv_latent + shape.rope_dim, shape.qkv_bias)
        self.kv_a_norm = RMSNorm(shape.kv_latent, eps=LATENT_NORM_EPS)
        self.kv_b = Linear(shape.kv_latent, shape.heads * shape.expanded_dims)
        self.output = Linear(shape.heads * shape.output_dim, hidden, shape.output_bias)
        self.post_norm = None if shape.norms == "before" else RMSNorm(hidden, eps=shape.norm_eps)

    def projections(self) -> tuple[nn.Module | None, ...]:
        """All but `kv_b`, which attention itself is called with."""
        own = (self.q,) if self.q_a is None else (self.q_a, self.q_a_norm, self.q_b)
        return *own, self.kv_a, self.kv_a_norm

    def given(self) -> dict[str, Tensor]:
        return super().given() | {"expand_NXC": computed(self.kv_b.weight).unflatten(0, (self.heads, -1))}

    def project(self, x_BLE: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """q_BLND, the shared key [B, L, 1, R] and the latent [B, L, 1, C] of these tokens."""
        q_BLF = self.q(x_BLE) if self.q_a is None else self.q_b(self.q_a_norm(self.q_a(x_BLE)))
        q_BLND = q_BLF.unflatten(-1, (self.heads, self.head_dim))
        if self.score_factor != 1:
            q_BLND = q_BLND * self.score_factor
        plain_BLND, rotated_BLNR = q_BLND.split((self.head_dim - self.rope_dim, self.rope_dim), -1)
        q_BLND = torch.cat((plain_BLND, self._rotated(rotated_BLNR, rotary)), -1)
        latent_BLC, shared_BLR = self.kv_a(x_BLE).split((self.latent, self.rope_dim), -1)
        shared_BL1R = self._rotated(shared_BLR.unsqueeze(2), rotary)
        return q_BLND, shared_BL1R, self.kv_a_norm(latent_BLC).unsqueeze(2)

    def _rotated(self, dims_BLNR: Tensor, rotary: Rotary) -> Tensor:
        """Pairs of neighbours are put into halves first: an order of dims that q and k share changes no score."""
        if self.interleaved:
            dims_BLNR = torch.cat((dims_BLNR[..., 0::2], dims_BLNR[..., 1::2]), -1)
        return rotate(dims_BLNR, rotary)
