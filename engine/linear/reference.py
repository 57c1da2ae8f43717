"""The recurrences and the short convolution, token by token on one device: what every faster form is compared with.

Shape letters as in `engine.linear`, with S the whole sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.linear.gated_delta import EPSILON


def recurrence(
    q_BSHN: Tensor,
    k_BSHN: Tensor,
    v_BSVP: Tensor,
    decay_BSV: Tensor,
    beta_BSV: Tensor | None,
    lengths: Sequence[int] = (),
) -> Tensor:
    """The output [B, S, V, P] of the gated delta rule (`engine.linear.gated_delta`), or without beta of Mamba-2
    (`engine.linear.mamba2`), over documents of these lengths; (): one document.

    The state is in the dtype of `decay_BSV`, what is written to it and read from it in that of v.
    """
    q_BSHN, k_BSHN = q_BSHN.to(decay_BSV.dtype), k_BSHN.to(decay_BSV.dtype)
    if beta_BSV is not None:
        q_BSHN, k_BSHN = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (q_BSHN, k_BSHN))
        q_BSHN = q_BSHN * q_BSHN.shape[-1] ** -0.5
    shared = v_BSVP.shape[2] // k_BSHN.shape[2]
    q_BSVN, k_BSVN = (x.repeat_interleave(shared, 2) for x in (q_BSHN, k_BSHN))
    keep_BSV, starts = decay_BSV.exp(), set(itertools.accumulate(lengths))
    state_BVNP = keep_BSV.new_zeros((*q_BSVN[:, 0].shape, v_BSVP.shape[-1]))
    rows = []
    for token in range(v_BSVP.shape[1]):
        if token in starts:
            state_BVNP = torch.zeros_like(state_BVNP)
        state_BVNP = state_BVNP * keep_BSV[:, token, :, None, None]
        key_BVN, value_BVP = k_BSVN[:, token], v_BSVP[:, token]
        if beta_BSV is not None:
            known_BVP = torch.einsum("bvn,bvnp->bvp", key_BVN, state_BVNP)
            value_BVP = (beta_BSV[:, token, :, None] * (value_BVP - known_BVP)).to(v_BSVP.dtype)
        state_BVNP = state_BVNP + key_BVN[..., None] * value_BVP[..., None, :]
        rows.append(torch.einsum("bvn,bvnp->bvp", q_BSVN[:, token], state_BVNP).to(v_BSVP.dtype))
    return torch.stack(rows, 1)


def convolution(x_BSC: Tensor, weight_CT: Tensor, bias_C: Tensor, lengths: Sequence[int] = ()) -> Tensor:
    """The activated output [B, S, C] of `engine.linear.convolution`, over documents of these lengths."""
    last, starts, begin = weight_CT.shape[1] - 1, set(itertools.accumulate(lengths)), 0
    rows = []
    for token in range(x_BSC.shape[1]):
        begin = token if token in starts else begin
        seen = range(max(begin, token - last), token + 1)
        rows.append(bias_C + sum(weight_CT[:, last - (token - each)] * x_BSC[:, each] for each in seen))
    return torch.nn.functional.silu(torch.stack(rows, 1))
