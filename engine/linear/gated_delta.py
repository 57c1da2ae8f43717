"""The gated delta rule (arXiv:2412.06464), chunked, in torch.

With q and k of unit length, the state S [N, P] of a value head and its output at token t are

    S_t = exp(d_t) S_(t-1) + beta_t k_t (v_t - exp(d_t) S_(t-1)^T k_t)^T        o_t = S_t^T q_t / sqrt(N)

so that a shard maps the state before it affinely: S -> A S + B with a matrix A [N, N]. In a chunk the values that are
written solve a triangular system (the WY form of arXiv:2406.06484), with decays as in the paper above.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.linear.chunks import decays_of, heads_of, in_chunks, in_sequence, states_between
from engine.linear.runs import Runs
from engine.linear.scan import StateScan
from engine.ops.autograd import accumulation_dtype

EPSILON = 1e-6  # added to the squared length of queries and keys


class DeltaRule(Protocol):
    """The rule on one rank: out_BLVP, and the state [B, V, N, P] after the last run, in the accumulation dtype.

    q_BLHN and k_BLHN have any length and H key heads, of which each serves V / H value heads; decay_BLV is the
    logarithm d. `initial_BVNP` is the state before the first run; other runs begin with 0. Differentiable in all
    tensors.
    """

    def __call__(
        self,
        q_BLHN: Tensor,
        k_BLHN: Tensor,
        v_BLVP: Tensor,
        decay_BLV: Tensor,
        beta_BLV: Tensor,
        runs: Runs,
        initial_BVNP: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


def chunked_delta_rule(
    q_BLHN: Tensor,
    k_BLHN: Tensor,
    v_BLVP: Tensor,
    decay_BLV: Tensor,
    beta_BLV: Tensor,
    runs: Runs,
    initial_BVNP: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A `DeltaRule` of matrix products."""
    heads, tokens = v_BLVP.shape[2], v_BLVP.shape[1]
    q, k = (in_chunks(heads_of(_unit(x_BLHN), heads)) for x_BLHN in (q_BLHN, k_BLHN))
    v, beta = in_chunks(v_BLVP), in_chunks(beta_BLV[..., None])
    decays = decays_of(decay_BLV, runs)
    # The values u that are written: u_i = beta_i (v_i - what the state before the chunk and the u_j before i give).
    system = (beta * k) @ k.mT * decays.pairs_BVcTT
    solved = torch.linalg.solve_triangular(
        system, torch.cat([beta * v, beta * k * decays.enter_BVcT1], -1), upper=False, unitriangular=True
    )
    values, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    before, written, state_BVNP = states_between(decays, initial_BVNP, k * decays.leave_BVcT1, read, values)
    out = (q * decays.enter_BVcT1) @ before + (q @ k.mT * decays.pairs_BVcTT) @ written
    return in_sequence(out * q.shape[-1] ** -0.5, tokens).to(v_BLVP.dtype), state_BVNP


def gated_delta(
    q_BLHN: Tensor,
    k_BLHN: Tensor,
    v_BLVP: Tensor,
    decay_BLV: Tensor,
    beta_BLV: Tensor,
    runs: Runs,
    scan: StateScan | None,
    rule: DeltaRule = chunked_delta_rule,
) -> Tensor:
    """Out [B, L, V, P] of this rank's tokens in a sequence over the ranks of `scan`; None: this rank has all of it.

    One call of the rule gives a shard's map: columns of a state do not meet, so those of the identity, beside values of
    0, become A and how much each output reads of each row of the state before.
    """
    if scan is None:
        return rule(q_BLHN, k_BLHN, v_BLVP, decay_BLV, beta_BLV, runs)[0]
    batch, tokens, heads, value_dim = v_BLVP.shape
    width = k_BLHN.shape[-1]
    state_dtype = accumulation_dtype(v_BLVP.dtype)
    identity = torch.eye(width, dtype=state_dtype, device=v_BLVP.device).expand(batch, heads, width, width)
    initial = torch.cat([identity.new_zeros(batch, heads, width, value_dim), identity * runs.continues], -1)
    values = torch.cat([v_BLVP, v_BLVP.new_zeros(batch, tokens, heads, width)], -1)
    out, state = rule(q_BLHN, k_BLHN, values, decay_BLV, beta_BLV, runs, initial)
    own_BLVP, read_BLVN = out.split([value_dim, width], -1)
    before_BVNP = scan(state[..., value_dim:], state[..., :value_dim])
    # A state in 16 bits would lose what it has gathered over the ranks.
    seen_BLVP = torch.einsum("blvn,bvnp->blvp", read_BLVN.to(state_dtype), before_BVNP)
    return (own_BLVP + seen_BLVP).to(own_BLVP.dtype)


def _unit(x: Tensor) -> Tensor:
    """Rows of length 1, in the accumulation dtype."""
    x = x.to(accumulation_dtype(x.dtype))
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)
