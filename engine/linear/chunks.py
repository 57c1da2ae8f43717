"""Chunks of tokens and their decays, which the chunked forms of all recurrences share.

A state decays by exp(d_t) before token t, and is 0 where a document starts. Inside a chunk token i sees token j <= i of
its document through exp(d_j+1 + ... + d_i). A document's start only removes pairs: no decay is infinite, so that
differences of sums stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from engine.linear.runs import COPIES, Runs
from engine.linear.volume import CHUNK
from engine.ops.autograd import accumulation_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Decays:
    """Factors of a sequence's chunks, for every value head."""

    pairs_BVcTT: Tensor  # of token j in what token i sees; 0 for later tokens and other documents
    enter_BVcT1: Tensor  # of the state before the chunk, in what a token sees
    leave_BVcT1: Tensor  # of a token, in the state after the chunk
    whole_BVc11: Tensor  # of the state before the chunk, in the state after it


def chunk_tokens(tokens: int) -> int:
    """Tokens of a chunk of a sequence."""
    return min(CHUNK, max(1, 1 << (tokens - 1).bit_length()))


def in_chunks(x_BLVD: Tensor) -> Tensor:
    """[B, V, c, T, D] in the accumulation dtype; the last chunk is filled with zeros."""
    tokens = x_BLVD.shape[1]
    size = chunk_tokens(tokens)
    wide = x_BLVD.to(accumulation_dtype(x_BLVD.dtype)).transpose(1, 2)
    return torch.nn.functional.pad(wide, (0, 0, 0, -tokens % size)).unflatten(2, (-1, size))


def in_sequence(x_BVcTD: Tensor, tokens: int) -> Tensor:
    """The reverse: [B, L, V, D]."""
    return x_BVcTD.flatten(2, 3)[:, :, :tokens].transpose(1, 2)


@lru_cache(maxsize=COPIES)
def numbers_on(runs: Runs, device: torch.device) -> Tensor:
    """`Runs.numbers` on a device: layers share one copy."""
    return torch.from_numpy(runs.numbers).to(device)


def decays_of(decay_BLV: Tensor, runs: Runs) -> Decays:
    """From the logarithm of every token's decay, which is at most 0."""
    total_BVcT = in_chunks(decay_BLV[..., None])[..., 0].cumsum(-1)
    size = total_BVcT.shape[-1]
    number_L = numbers_on(runs, decay_BLV.device)
    # Tokens that fill the last chunk belong to the last document; the first state to the first.
    number_cT = torch.cat([number_L, number_L[-1:].expand(-len(number_L) % size)]).unflatten(0, (-1, size))
    before_c = torch.cat([number_L[:1], number_cT[:-1, -1]])
    lower_TT = torch.ones(size, size, dtype=torch.bool, device=decay_BLV.device).tril()
    seen_cTT = (number_cT[:, :, None] == number_cT[:, None, :]) & lower_TT
    between = (total_BVcT[..., :, None] - total_BVcT[..., None, :]).masked_fill(~seen_cTT, -torch.inf)
    last_BVc1 = total_BVcT[..., -1:]
    ends_c1 = number_cT[:, -1:]
    return Decays(
        pairs_BVcTT=between.exp(),
        enter_BVcT1=(total_BVcT.exp() * (number_cT == before_c[:, None]))[..., None],
        leave_BVcT1=((last_BVc1 - total_BVcT).exp() * (number_cT == ends_c1))[..., None],
        whole_BVc11=(last_BVc1.exp() * (before_c[:, None] == ends_c1))[..., None],
    )


def heads_of(x_BLHN: Tensor, value_heads: int) -> Tensor:
    """Queries or keys, repeated for the value heads that share them: [B, L, V, N]."""
    return x_BLHN.repeat_interleave(value_heads // x_BLHN.shape[2], 2)


def states_between(
    decays: Decays, initial_BVNP: Tensor | None, write_BVcTN: Tensor, read_BVcTN: Tensor | None, values_BVcTP: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the state from chunk to chunk: the states before every chunk, each chunk's values, and the last state.

    A chunk's values are `values` less what `read` reads of the state before it (the delta rule), and are written by the
    keys `write`, which hold the decay to the chunk's end.
    """
    batch, heads, chunks, _, value_dim = values_BVcTP.shape
    shape = (batch, heads, write_BVcTN.shape[-1], value_dim)
    state_BVNP = values_BVcTP.new_zeros(shape) if initial_BVNP is None else initial_BVNP.to(values_BVcTP.dtype)
    before, written = [], []
    for index in range(chunks):
        before.append(state_BVNP)
        value_BVTP = values_BVcTP[:, :, index]
        if read_BVcTN is not None:
            value_BVTP = value_BVTP - read_BVcTN[:, :, index] @ state_BVNP
        written.append(value_BVTP)
        state_BVNP = decays.whole_BVc11[:, :, index] * state_BVNP + write_BVcTN[:, :, index].mT @ value_BVTP
    return torch.stack(before, 2), torch.stack(written, 2), state_BVNP
