"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): K and V are sent as a latent and expanded where they
arrive.

K and V of all heads follow from few numbers of a token, 576 in DeepSeek-V3 in place of 128 heads x (192 + 128): a
latent, and a key that all heads share and that alone is rotated. Head n has

    K[n] = (expand_NXC[n, :D - R] latent, shared key),   V[n] = expand_NXC[n, D - R:] latent

so whoever has a chunk's latent and the matrix forms its K and V. Latent and shared key have the form of V and K of one
head, [B, L, 1, C] and [B, L, 1, R], and every schedule sends them as it sends K and V of grouped heads. An `Expansion`
stands where a received chunk becomes input of a kernel, and where the kernels' dK and dV become gradients that are
returned: sums over heads, as small as what was sent.

- A ring that sends the query side in backward expands its own chunk once and sends no latent. dK and dV of a chunk are
  whole on its owner, which contracts them once.
- A ring that sends the key side expands each chunk and contracts its dK and dV, and returns 576 numbers a token. That
  is far less than Q, dO and dQ of 128 heads, so `auto` takes it.
- Ulysses sends every rank the latent of all tokens; a rank expands its own heads.

An expansion is one matrix product of a chunk, 2 C X FLOPs a token and head, beside 2 (D + Dv) for each key of each
query: at 8K tokens a rank a twentieth of forward. By the cost model's speeds of H200 it takes a quarter of the time in
which NVLink would send the K and V that it forms, so there is no choice to send them instead.

The gradient of the matrix is the sum of what each rank's chunks give, as that of any replicated parameter.

Shape letters: B batch, M tokens of a chunk, N query heads, D head dim of Q and K, R of the shared key, C latent, X dims
that come from the latent: those of K, then those of V.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.accumulate.accumulators import GradAccumulator
from engine.attention.comm.exchange import RemoteChunk
from engine.attention.geometry.tiles import Call
from engine.ops.autograd import accumulation_dtype


class Expansion:
    """The matrix of one call, for some heads, and the sum of its gradient over the call's backward."""

    def __init__(self, expand_NXC: Tensor, key_dims: int, gradient_NXC: Tensor | None = None) -> None:
        """`key_dims`: dims of K that come from the latent, D - R."""
        self._expand_NXC, self._key_dims, self._gradient_NXC = expand_NXC, key_dims, gradient_NXC

    @classmethod
    def of(cls, q_BLND: Tensor, shared_BL1R: Tensor, expand_NXC: Tensor) -> Expansion:
        """That of a call with these tensors."""
        return cls(expand_NXC, q_BLND.shape[-1] - shared_BL1R.shape[-1])

    def of_heads(self, heads: slice) -> Expansion:
        """That of some heads, whose gradient is part of this one's."""
        return Expansion(self._expand_NXC[heads], self._key_dims, self.gradient()[heads])

    def gradient(self) -> Tensor:
        """dexpand_NXC so far, in the dtype of accumulation."""
        if self._gradient_NXC is None:
            like = self._expand_NXC
            self._gradient_NXC = torch.zeros_like(like, dtype=accumulation_dtype(like.dtype))
        return self._gradient_NXC

    def keys(self, shared_BM1R: Tensor, latent_BM1C: Tensor) -> tuple[Tensor, Tensor]:
        """k_BMND and v_BMNW of these tokens."""
        heads, split = self._expand_NXC.shape[0], self._key_dims
        k_BMNX, v_BMNW = (
            F.linear(latent_BM1C.squeeze(2), part.flatten(0, 1)).unflatten(-1, (heads, -1))
            for part in (self._expand_NXC[:, :split], self._expand_NXC[:, split:])
        )
        return torch.cat((k_BMNX, shared_BM1R.expand(-1, -1, heads, -1)), -1), v_BMNW

    def keys_of(self, chunk: RemoteChunk, calls: Sequence[Call]) -> RemoteChunk:
        """K and V of the tokens of a chunk that some calls read; nothing where there are none."""
        if not calls:
            return RemoteChunk((), ())
        tokens = touched(calls)
        return RemoteChunk(self.keys(*chunk.tokens(tokens)), chunk.token_dims, tokens.start)

    def contracted(self, dk_BMND: Tensor, dv_BMNW: Tensor, latent_BM1C: Tensor) -> tuple[Tensor, Tensor]:
        """dshared_BM1R and dlatent_BM1C of tokens whose latent is given, in the dtype of `dk_BMND`. Adds what they
        give to the matrix's gradient."""
        dtype, split = dk_BMND.dtype, self._key_dims
        dshared_BM1R = dk_BMND[..., split:].sum(2, keepdim=True, dtype=accumulation_dtype(dtype)).to(dtype)
        latent_TC, sums_NXC = latent_BM1C.to(dtype).flatten(0, 2), self.gradient()
        # Of the dims of K and of V by themselves: side by side they would be another copy of both.
        (dk_TF, k_NXC), (dv_TF, v_NXC) = (
            (formed_BMNX.flatten(2).flatten(0, 1), self._expand_NXC[:, dims].to(dtype))
            for formed_BMNX, dims in ((dk_BMND[..., :split], slice(0, split)), (dv_BMNW, slice(split, None)))
        )
        dlatent_TC = torch.addmm(dk_TF @ k_NXC.flatten(0, 1), dv_TF, v_NXC.flatten(0, 1))
        sums_NXC[:, :split] += (dk_TF.t() @ latent_TC).view(k_NXC.shape)
        sums_NXC[:, split:] += (dv_TF.t() @ latent_TC).view(v_NXC.shape)
        return dshared_BM1R, dlatent_TC.view(latent_BM1C.shape)


class ExpandedChunk:
    """A received chunk in backward: K and V of the tokens that some calls, at least one, read, and the sums of their
    gradients."""

    def __init__(
        self, expansion: Expansion, chunk: RemoteChunk, calls: Sequence[Call], part_dtype: torch.dtype
    ) -> None:
        self._expansion, self._chunk, self._dtype = expansion, chunk, part_dtype
        self._tokens = touched(calls)
        self.keys = expansion.keys_of(chunk, calls)
        shard = [tensor[:, :1].expand(-1, self._tokens.stop, -1, -1) for tensor in self.keys.tensors]
        self.gradients = tuple(GradAccumulator(tensor, part_dtype) for tensor in shard)  # of K and V

    def contract_into(self, gradients: Sequence[GradAccumulator]) -> None:
        """Add the gradients of what was received to these."""
        tokens = self._tokens
        dk_BMND, dv_BMNW = (total.over(tokens, self._dtype, unreduced=True) for total in self.gradients)
        _, latent_BM1C = self._chunk.tokens(tokens)
        for gradient, part in zip(gradients, self._expansion.contracted(dk_BMND, dv_BMNW, latent_BM1C), strict=True):
            gradient.add(tokens, part)


def touched(calls: Sequence[Call]) -> slice:
    """The keys from the first to the last one that some calls, at least one, read."""
    return slice(min(call.k.start for call in calls), max(call.k.stop for call in calls))
