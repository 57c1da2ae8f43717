"""The attention of every native method, ours and the baselines': `burst_attention` with a trial's settings bound."""

from __future__ import annotations

from torch import Tensor

from engine.attention.context import ContextParallel
from engine.attention.masks import parse_mask
from engine.attention.op import AttentionPlan, plan_attention, run_attention
from engine.settings import TrialSettings


class BoundAttention:
    """An `engine.method.AttentionFn`. The choices are made at the first call and kept for the shapes of that call."""

    def __init__(
        self, cp: ContextParallel, settings: TrialSettings, *, schedule: str, backward: str, exchange: str
    ) -> None:
        self._cp, self._settings = cp, settings
        self._schedule, self._backward, self._exchange = schedule, backward, exchange
        self._mask = parse_mask(settings.mask)
        self._plans: dict[object, AttentionPlan] = {}

    def __call__(
        self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, stored: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        key = (q_BLND.shape, k_BLKD.shape, q_BLND.dtype, q_BLND.device)
        if key not in self._plans:
            self._plans[key] = plan_attention(
                q_BLND,
                k_BLKD,
                mask=self._mask,
                cp=self._cp,
                kernel=self._settings.kernel,
                schedule=self._schedule,
                backward=self._backward,
                exchange=self._exchange,
                deterministic=self._settings.deterministic,
                gradient_wire=self._settings.gradient_wire,
            )
        out_BLND, lse_BNL = run_attention(self._plans[key], q_BLND, k_BLKD, v_BLKD, stored=stored, return_lse=True)
        return out_BLND, lse_BNL

    def chosen(self) -> dict[str, str]:
        return next(iter(self._plans.values())).chosen() if self._plans else {}
