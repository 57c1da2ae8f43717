"""Both recurrences and the convolution token by token, document by document: the reference of `engine.linear`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def delta_rule(q_BSHN: Tensor, k_BSHN: Tensor, v_BSVP: Tensor, decay_BSV: Tensor, beta_BSV: Tensor) -> Tensor:
    """[B, S, V, P] of rows that are one document each."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q_BSHN, k_BSHN))
    q, k = (_for_values(x, v_BSVP) for x in (q, k))
    state_BVNP, out = v_BSVP.new_zeros(*v_BSVP[:, 0].shape[:2], q.shape[-1], v_BSVP.shape[-1]), []
    for t in range(v_BSVP.shape[1]):
        state_BVNP = state_BVNP * decay_BSV[:, t].exp()[..., None, None]
        known_BVP = torch.einsum("bvnp,bvn->bvp", state_BVNP, k[:, t])
        written_BVP = beta_BSV[:, t, :, None] * (v_BSVP[:, t] - known_BVP)
        state_BVNP = state_BVNP + torch.einsum("bvn,bvp->bvnp", k[:, t], written_BVP)
        out.append(torch.einsum("bvnp,bvn->bvp", state_BVNP, q[:, t]) / q.shape[-1] ** 0.5)
    return torch.stack(out, 1)


def state_space(q_BSHN: Tensor, k_BSHN: Tensor, v_BSVP: Tensor, decay_BSV: Tensor) -> Tensor:
    """Likewise."""
    q, k = (_for_values(x, v_BSVP) for x in (q_BSHN, k_BSHN))
    state_BVNP, out = v_BSVP.new_zeros(*v_BSVP[:, 0].shape[:2], q.shape[-1], v_BSVP.shape[-1]), []
    for t in range(v_BSVP.shape[1]):
        written_BVNP = torch.einsum("bvn,bvp->bvnp", k[:, t], v_BSVP[:, t])
        state_BVNP = state_BVNP * decay_BSV[:, t].exp()[..., None, None] + written_BVNP
        out.append(torch.einsum("bvnp,bvn->bvp", state_BVNP, q[:, t]))
    return torch.stack(out, 1)


def convolution(x_BSC: Tensor, weight_CT: Tensor, bias_C: Tensor) -> Tensor:
    """[B, S, C] of rows that are one document each."""
    taps, out = weight_CT.shape[1], []
    for t in range(x_BSC.shape[1]):
        seen = range(max(0, t - taps + 1), t + 1)
        out.append(bias_C + sum(weight_CT[:, taps - 1 - (t - s)] * x_BSC[:, s] for s in seen))
    return torch.stack(out, 1)


def of_documents(form: Callable[..., Tensor], lengths: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
    """`form` of every document of rows [B, S, ...], put together again."""
    parts = zip(*(tensor.split(list(lengths), 1) for tensor in tensors), strict=True)
    return torch.cat([form(*part) for part in parts], 1)


def _for_values(x_BSHN: Tensor, v_BSVP: Tensor) -> Tensor:
    """Key heads repeated for the value heads that share them."""
    return x_BSHN.repeat_interleave(v_BSVP.shape[2] // x_BSHN.shape[2], 2)
