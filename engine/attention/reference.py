"""Dense attention of a whole sequence on one device, through autograd: the reference of every combination."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.geometry.layout import Segment
from engine.attention.kernels.reference import visible_pairs
from engine.attention.masks import Mask


def visibility(mask: Mask, seq_len: int, device: torch.device | None = None) -> Tensor:
    """Boolean S x S: which keys each query sees."""
    whole = (Segment(0, seq_len),)
    visible = torch.zeros(seq_len, seq_len, dtype=torch.bool, device=device)
    for tile in mask.tiles(whole, whole):
        visible[tile.q, tile.k] |= visible_pairs(tile.band, tile.rows, tile.columns, visible.device)
    return visible


def dense_attention(
    q_BSND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    mask: Mask,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out_BSND, lse_BNS) of the whole problem, differentiable in q, k, v and the sinks by plain autograd.

    Scores are held whole (B x N x S x S) in the inputs' dtype: pass float64 for a reference. Rows that see no key give
    out 0 and lse -inf, or the sink's logit where there are sinks.
    """
    groups = q_BSND.shape[2] // k_BSKD.shape[2]
    scale = q_BSND.shape[-1] ** -0.5 if scale is None else scale
    k_BSND, v_BSND = (t.repeat_interleave(groups, dim=2) for t in (k_BSKD, v_BSKD))
    scores_BNSS = torch.einsum("bqnd,bknd->bnqk", q_BSND, k_BSND) * scale
    if softcap is not None:
        scores_BNSS = softcap * (scores_BNSS / softcap).tanh()
    visible_SS = visibility(mask, q_BSND.shape[1], q_BSND.device)
    if sinks_N is not None:  # one more key, whose value is 0
        batch, heads, rows, _ = scores_BNSS.shape
        sinks_BNS1 = sinks_N.to(scores_BNSS.dtype)[:, None, None].expand(batch, heads, rows, 1)
        scores_BNST = torch.cat((scores_BNSS.masked_fill(~visible_SS, -torch.inf), sinks_BNS1), dim=-1)
        p_BNSS = scores_BNST.softmax(dim=-1)[..., :-1]
        return torch.einsum("bnqk,bknd->bqnd", p_BNSS, v_BSND), scores_BNST.logsumexp(dim=-1)
    blind_S = ~visible_SS.any(dim=1)
    scores_BNSS = scores_BNSS.masked_fill(~visible_SS, -torch.inf).masked_fill(blind_S[:, None], 0.0)
    p_BNSS = scores_BNSS.softmax(dim=-1).masked_fill(blind_S[:, None], 0.0)
    lse_BNS = scores_BNSS.logsumexp(dim=-1).masked_fill(blind_S, -torch.inf)
    return torch.einsum("bnqk,bknd->bqnd", p_BNSS, v_BSND), lse_BNS


def dense_gradients(
    q_BSND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    dout_BSND: Tensor,
    mask: Mask,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
    dlse_BNS: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) of the whole problem in float64, with lse [B, N, S] after out where `return_lse`, and dsinks
    at the end where there are sinks. `dlse_BNS` is the LSE's own gradient. One KV head at a time bounds the S x S
    scores."""
    group = q_BSND.shape[2] // k_BSKD.shape[2]
    parts = []
    for head in range(k_BSKD.shape[2]):
        queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
        q, k, v = (
            tensor.detach()[:, :, heads].double().requires_grad_()
            for tensor, heads in ((q_BSND, queries), (k_BSKD, keys), (v_BSKD, keys))
        )
        sinks = None if sinks_N is None else sinks_N.detach()[queries].double().requires_grad_()
        out, lse = dense_attention(q, k, v, mask, scale, softcap=softcap, sinks_N=sinks)
        leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
        outputs, gradients = [out], [dout_BSND[:, :, queries].double()]
        if dlse_BNS is not None:
            outputs, gradients = [out, lse], [*gradients, dlse_BNS[:, queries].double()]
        results = [out.detach(), lse.detach()] if return_lse else [out.detach()]
        parts.append((*results, *torch.autograd.grad(outputs, leaves, gradients)))
    heads_dim = {4: 2, 3: 1, 1: 0}  # of q and its kind, of lse, of the sinks
    return tuple(torch.cat(tensors, dim=heads_dim[tensors[0].ndim]) for tensors in zip(*parts, strict=True))
