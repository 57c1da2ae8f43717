"""Kernel `reference`: tile attention in plain torch, any device, band and float dtype. The reference of all others.

Scores are formed for a block of queries at a time, in fp32 or, for float64 inputs, in float64: memory grows with the
number of keys, not with queries x keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.geometry.tiles import Band, VarlenGroup, Visible, row_blocks
from engine.attention.kernels import (
    BackwardInputs,
    Gradients,
    Kernel,
    KernelProblem,
    heads_first,
    repeat_heads,
    sum_heads,
)
from engine.attention.kernels.sequences import backward_each, forward_each

_BLOCK_ROWS = 128  # queries whose scores are held at once, against the keys that they see


def visible_pairs(band: Band, rows: int, columns: int, device: torch.device) -> Tensor:
    """Boolean rows x columns: which keys of the tile each query sees."""
    offset = torch.arange(columns, device=device) - torch.arange(rows, device=device)[:, None]
    visible = torch.ones_like(offset, dtype=torch.bool)
    if band.lo is not None:
        visible &= offset >= band.lo
    if band.hi is not None:
        visible &= offset <= band.hi
    return visible


def _visible(scores_BNLM: Tensor, band: Band) -> Tensor:
    """Scores with -inf where the band hides a key."""
    rows, columns = scores_BNLM.shape[2:]
    return scores_BNLM.masked_fill(~visible_pairs(band, rows, columns, scores_BNLM.device), -torch.inf)


@dataclass(frozen=True)
class ReferenceKernel(Kernel):
    """Dense attention of one tile, written as the formula reads."""

    name = "reference"
    writes_input_dtype = False

    def refuse(self, problem: KernelProblem) -> str | None:
        return None

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, visible: Visible, scale: float
    ) -> tuple[Tensor, Tensor]:
        if isinstance(visible, VarlenGroup):
            return forward_each(self, q_BLND, k_BMKD, v_BMKD, visible, scale)
        heads = q_BLND.shape[2]
        q_BNLD, k_BNMD, v_BNMD = (
            heads_first(q_BLND),
            heads_first(repeat_heads(k_BMKD, heads)),
            heads_first(repeat_heads(v_BMKD, heads)),
        )
        lse_BNL = q_BNLD.new_empty(q_BNLD.shape[:3])
        out_BNLD = q_BNLD.new_empty(*lse_BNL.shape, v_BNMD.shape[-1])
        for tile in row_blocks(visible, q_BLND.shape[1], k_BMKD.shape[1], _BLOCK_ROWS):
            rows, keys = tile.q, tile.k
            scores_BNLM = _visible(self._scores(q_BNLD[:, :, rows], k_BNMD[:, :, keys], scale), tile.band)
            lse_BNL[:, :, rows] = scores_BNLM.logsumexp(dim=-1)
            out_BNLD[:, :, rows] = (scores_BNLM - lse_BNL[:, :, rows, None]).exp() @ v_BNMD[:, :, keys]
        return out_BNLD.transpose(1, 2), lse_BNL

    def backward(self, given: BackwardInputs, visible: Visible, scale: float, deterministic: bool) -> Gradients:
        if isinstance(visible, VarlenGroup):
            return backward_each(given, visible, lambda one, band: self.backward(one, band, scale, deterministic))
        q_BLND, dout_BLND, lse_BNL, delta_BNL, k_BMKD, v_BMKD = given
        heads, kv_heads = q_BLND.shape[2], k_BMKD.shape[2]
        q_BNLD, dout_BNLD = heads_first(q_BLND), heads_first(dout_BLND)
        k_BNMD, v_BNMD = heads_first(repeat_heads(k_BMKD, heads)), heads_first(repeat_heads(v_BMKD, heads))
        dq_BNLD, dk_BNMD, dv_BNMD = torch.empty_like(q_BNLD), torch.zeros_like(k_BNMD), torch.zeros_like(v_BNMD)
        for tile in row_blocks(visible, q_BLND.shape[1], k_BMKD.shape[1], _BLOCK_ROWS):
            rows, keys = tile.q, tile.k
            q, dout, k, v = q_BNLD[:, :, rows], dout_BNLD[:, :, rows], k_BNMD[:, :, keys], v_BNMD[:, :, keys]
            scores_BNLM = self._scores(q, k, scale)
            p_BNLM = (_visible(scores_BNLM, tile.band) - lse_BNL[:, :, rows, None]).exp()
            dp_BNLM = dout @ v.transpose(-1, -2)
            ds_BNLM = p_BNLM * (dp_BNLM - delta_BNL[:, :, rows, None]) * scale
            if self.softcap is not None:  # tanh' = 1 - tanh^2
                ds_BNLM *= 1 - (scores_BNLM / self.softcap).square()
            dq_BNLD[:, :, rows] = ds_BNLM @ k
            dk_BNMD[:, :, keys] += ds_BNLM.transpose(-1, -2) @ q
            dv_BNMD[:, :, keys] += p_BNLM.transpose(-1, -2) @ dout
        dq_BLND, dk_BMND, dv_BMND = (gradient.transpose(1, 2) for gradient in (dq_BNLD, dk_BNMD, dv_BNMD))
        return dq_BLND, sum_heads(dk_BMND, kv_heads), sum_heads(dv_BMND, kv_heads)

    def _scores(self, q_BNLD: Tensor, k_BNMD: Tensor, scale: float) -> Tensor:
        scores_BNLM = q_BNLD @ k_BNMD.transpose(-1, -2) * scale
        return scores_BNLM if self.softcap is None else self.softcap * (scores_BNLM / self.softcap).tanh()


KERNEL = ReferenceKernel()
