"""The recurrence of Mamba-2 (arXiv:2405.21060), chunked, in torch.

The state S [N, P] of a value head and its output at token t are

    S_t = exp(d_t) S_(t-1) + k_t v_t^T        o_t = S_t^T q_t

with q and k the paper's C and B, v the input times its time step, d the time step times A. A shard maps the state
before it by one number for each head.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.linear.chunks import decays_of, heads_of, in_chunks, in_sequence, numbers_on, states_between
from engine.linear.runs import Runs
from engine.linear.scan import StateScan
from engine.ops.autograd import accumulation_dtype


class StateSpace(Protocol):
    """The recurrence on one rank, from a state of 0: as `engine.linear.gated_delta.DeltaRule`, without beta."""

    def __call__(
        self, q_BLHN: Tensor, k_BLHN: Tensor, v_BLVP: Tensor, decay_BLV: Tensor, runs: Runs
    ) -> tuple[Tensor, Tensor]: ...


def chunked_state_space(
    q_BLHN: Tensor, k_BLHN: Tensor, v_BLVP: Tensor, decay_BLV: Tensor, runs: Runs
) -> tuple[Tensor, Tensor]:
    """A `StateSpace` of matrix products."""
    heads, tokens = v_BLVP.shape[2], v_BLVP.shape[1]
    q, k = (in_chunks(heads_of(x_BLHN, heads)) for x_BLHN in (q_BLHN, k_BLHN))
    v, decays = in_chunks(v_BLVP), decays_of(decay_BLV, runs)
    before, _, state_BVNP = states_between(decays, None, k * decays.leave_BVcT1, None, v)
    out = (q * decays.enter_BVcT1) @ before + (q @ k.mT * decays.pairs_BVcTT) @ v
    return in_sequence(out, tokens).to(v_BLVP.dtype), state_BVNP


def state_space(
    q_BLHN: Tensor,
    k_BLHN: Tensor,
    v_BLVP: Tensor,
    decay_BLV: Tensor,
    runs: Runs,
    scan: StateScan | None,
    recurrence: StateSpace = chunked_state_space,
) -> Tensor:
    """Out [B, L, V, P] of this rank's tokens in a sequence over the ranks of `scan`; None: this rank has all of it."""
    own_BLVP, state_BVNP = recurrence(q_BLHN, k_BLHN, v_BLVP, decay_BLV, runs)
    if scan is None:
        return own_BLVP
    dtype = accumulation_dtype(decay_BLV.dtype)
    first_L = (numbers_on(runs, decay_BLV.device) == 0) & runs.continues
    passed_BLV = decay_BLV.to(dtype).cumsum(1).exp() * first_L[:, None]  # what a token sees of the state before
    before_BVNP = scan(passed_BLV[:, -1, :, None, None], state_BVNP)
    # Every key head reads the states of all its value heads: its queries, repeated for them, would be saved as well.
    before_BHGNP = before_BVNP.unflatten(1, (q_BLHN.shape[2], -1))
    seen_BLVP = torch.einsum("blhn,bhgnp->blhgp", q_BLHN.to(dtype), before_BHGNP).flatten(2, 3)
    return (own_BLVP + seen_BLVP * passed_BLV[..., None]).to(own_BLVP.dtype)
