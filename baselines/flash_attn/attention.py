"""The call of FlashAttention-4 as its documentation shows it, as an attention of one rank."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.called_attention import OutputAlone
from engine.attention.kernels.fa4 import library
from engine.attention.masks import Documents, parse_mask
from engine.settings import TrialSettings


class PlainCall(OutputAlone):
    """The library's function on a GPU, torch's on a CPU."""

    def __init__(self, settings: TrialSettings) -> None:
        self._settings = settings
        mask = parse_mask(settings.mask)
        self._lengths = tuple(mask.lengths_in(settings.seq_len)) if isinstance(mask, Documents) else ()
        self._causal = mask.causal if isinstance(mask, Documents) else settings.mask == "causal"
        self._kernel = ""

    def output(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        self._kernel = "fa4" if q_BLND.is_cuda else "cpu"
        return (self._by_library if q_BLND.is_cuda else self._one_by_one)(q_BLND, k_BLKD, v_BLKD)

    def resolved(self) -> dict[str, str]:
        return {"kernel": self._kernel, "mask": self._settings.mask} if self._kernel else {}

    def _by_library(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        if not self._lengths:
            return _first(library().flash_attn_func(q_BLND, k_BLKD, v_BLKD, causal=self._causal))
        batch, longest = q_BLND.shape[0], max(self._lengths)
        bounds = _bounds(self._lengths * batch, q_BLND.device)
        out = library().flash_attn_varlen_func(
            *(each.flatten(0, 1) for each in (q_BLND, k_BLKD, v_BLKD)),
            cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest, causal=self._causal,
        )  # fmt: skip
        return _first(out).unflatten(0, (batch, -1))

    def _one_by_one(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        heads_first = (each.transpose(1, 2) for each in (q_BLND, k_BLKD, v_BLKD))
        lengths = self._lengths or (q_BLND.shape[1],)
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=self._causal, enable_gqa=q.shape[1] != k.shape[1])
            for q, k, v in zip(*(each.split(lengths, dim=2) for each in heads_first), strict=True)
        ]
        return torch.cat(outs, dim=2).transpose(1, 2)


@lru_cache(maxsize=1)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Cumulative lengths: sent once, not in each step that is timed."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def _first(returned: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Versions of the library differ in whether they return the LSE as well."""
    return returned[0] if isinstance(returned, tuple) else returned
