"""The call of FlashAttention-4 as its documentation shows it, as an attention of one rank."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.algorithms.saved import SavedOutput
from engine.attention.kernels.fa4 import keep_compiled
from engine.attention.masks import Documents, parse_mask
from engine.settings import TrialSettings


class PlainCall:
    """An `AttentionFn` of one rank that keeps nothing. Its LSE is empty: the library's call is made without it."""

    def __init__(self, settings: TrialSettings) -> None:
        self._settings = settings
        mask = parse_mask(settings.mask)
        regions = mask.regions(settings.seq_len) if isinstance(mask, Documents) else None
        self._lengths = None if regions is None else (regions[:, 1] - regions[:, 0]).tolist()
        self._causal = mask.causal if isinstance(mask, Documents) else settings.mask == "causal"
        self._kernel = ""

    def __call__(
        self,
        q_BLND: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        *,
        sinks_N: Tensor | None = None,
        saved: SavedOutput | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert sinks_N is None, "the method refuses models with sinks"
        assert saved is None, "the method refuses the training that would save outputs"
        if q_BLND.device.type == "cpu":
            self._kernel = "cpu"
            return self._one_by_one(q_BLND, k_BLKD, v_BLKD), q_BLND.new_empty(0)
        self._kernel = "fa4"
        return self._by_library(q_BLND, k_BLKD, v_BLKD), q_BLND.new_empty(0)

    def keep(self, out_BLND: Tensor, lse_BNL: Tensor, tail: float) -> SavedOutput | None:
        return None

    def resolved(self) -> dict[str, str]:
        return {"kernel": self._kernel, "mask": self._settings.mask} if self._kernel else {}

    def _by_library(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        whole, packed = self._library
        if self._lengths is None:
            return _first(whole(q_BLND, k_BLKD, v_BLKD, causal=self._causal))
        batch, longest = q_BLND.shape[0], max(self._lengths)
        bounds = self._bounds(batch, q_BLND.device)
        out = packed(
            *(each.flatten(0, 1) for each in (q_BLND, k_BLKD, v_BLKD)),
            cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest, causal=self._causal,
        )  # fmt: skip
        return _first(out).unflatten(0, (batch, -1))

    @cached_property
    def _library(self):  # type: ignore[no-untyped-def]  # of a package that may be absent
        import os

        keep_compiled(os.environ)
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

        return flash_attn_func, flash_attn_varlen_func

    def _bounds(self, batch: int, device: torch.device) -> Tensor:
        if self._sent is None or self._sent[0] != batch:
            assert self._lengths is not None
            sums = torch.tensor([0, *self._lengths * batch]).cumsum(0)
            self._sent = (batch, sums.to(device, torch.int32))
        return self._sent[1]

    _sent: tuple[int, Tensor] | None = None  # cumulative lengths of a batch, made once

    def _one_by_one(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        heads_first = (each.transpose(1, 2) for each in (q_BLND, k_BLKD, v_BLKD))
        lengths = self._lengths or [q_BLND.shape[1]]
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=self._causal, enable_gqa=q.shape[1] != k.shape[1])
            for q, k, v in zip(*(each.split(lengths, dim=2) for each in heads_first), strict=True)
        ]
        return torch.cat(outs, dim=2).transpose(1, 2)


def _first(returned: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Versions of the library differ in whether they return the LSE as well."""
    return returned[0] if isinstance(returned, tuple) else returned
