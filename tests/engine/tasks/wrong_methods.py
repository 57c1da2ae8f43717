"""A method for tests of checks: BurstAttention that computes something else, as the seed of its trial says."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from engine.attention.algorithms.saved import AttentionFn
from engine.attention.context import ContextParallel
from engine.burst import Burst
from engine.settings import TrialSettings

RIGHT, TILE_DROPPED, DK_TIMES_1_02, POSITIONS_OFF_BY_ONE, NOT_A_NUMBER, CHECK_RAISES, CHECK_REFUSED = range(7)
DK_LOST = 7
DK_OF_LAST_HEAD = 8


class Wrong(Burst):
    def attention(self, cp: ContextParallel, settings: TrialSettings) -> AttentionFn:
        kind, last = settings.seed % 10, cp.rank == cp.size - 1
        if kind == TILE_DROPPED:  # of the last quarter's queries and the first quarter's keys
            mask = f"block_sparse:{settings.seq_len // 4}:1111/1111/1111/0111:causal"
            settings = dataclasses.replace(settings, mask=mask)
        if kind == POSITIONS_OFF_BY_ONE and last:
            positions = cp.positions
            cp.positions = lambda seq_len: positions(seq_len) + 1
        checked = settings.steps.warmup == 0  # the check's own problem; the trials here warm up
        if kind == CHECK_RAISES and last and checked:
            raise MemoryError("planned")
        if kind == CHECK_REFUSED and checked:
            raise ValueError("refused as planned")
        attend = super().attention(cp, settings)
        if kind == DK_LOST:
            return WithoutKeyGradient(attend)
        last_head = torch.ones(settings.model.kv_heads, 1)
        last_head[-1] = 1.5
        factors = {DK_TIMES_1_02: 1.02, NOT_A_NUMBER: float("nan"), DK_OF_LAST_HEAD: last_head}
        return WrongGradient(attend, factors[kind]) if kind in factors else attend


class WrongGradient:
    """Attention whose dK is multiplied by a factor, of all or of each head [K, 1]."""

    def __init__(self, attend: AttentionFn, factor: float | Tensor) -> None:
        self.attend, self.factor = attend, factor
        self.keep, self.resolved = attend.keep, attend.resolved

    def __call__(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, **saved: Any) -> tuple[Tensor, Tensor]:
        return self.attend(q_BLND, _Multiply.apply(k_BLKD, self.factor), v_BLKD, **saved)


class WithoutKeyGradient(WrongGradient):
    """Attention in which no gradient reaches the keys."""

    def __init__(self, attend: AttentionFn) -> None:
        super().__init__(attend, 0.0)

    def __call__(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, **saved: Any) -> tuple[Tensor, Tensor]:
        return self.attend(q_BLND, k_BLKD.detach(), v_BLKD, **saved)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k_BLKD: Tensor, factor: float | Tensor) -> Tensor:
        ctx.factor = factor
        return k_BLKD.view_as(k_BLKD)

    @staticmethod
    def backward(ctx: Any, dk_BLKD: Tensor) -> tuple[Tensor, None]:
        return (dk_BLKD * ctx.factor).to(dk_BLKD.dtype), None


METHOD = Wrong()
