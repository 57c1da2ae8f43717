"""The attention of every native method, ours and the baselines': `burst_attention` with a trial's settings bound."""

from __future__ import annotations

from torch import Tensor

from engine.attention.algorithms.saved import AttentionPlan, SavedOutput, save_suffix
from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import tail_cut
from engine.attention.masks import kept_share, parse_mask
from engine.attention.op import run_attention
from engine.attention.resolve import plan_attention
from engine.settings import TrialSettings


class BoundAttention:
    """An `engine.method.AttentionFn`. The choices are made at the first call and kept for the shapes of that call."""

    def __init__(
        self,
        cp: ContextParallel,
        settings: TrialSettings,
        *,
        schedule: str,
        backward: str,
        exchange: str,
        num_head_chunks: int | None = None,
    ) -> None:
        self._cp, self._settings = cp, settings
        self._schedule, self._backward, self._exchange = schedule, backward, exchange
        self._head_parts = num_head_chunks
        self._mask = parse_mask(settings.mask)
        checkpoint = settings.checkpoint
        # A group that holds has a layer's own recomputation replay what the group's has computed, whatever the tail.
        held = checkpoint.every > 1 and checkpoint.replay == "hold"
        self._replayed = settings.task == "train" and (held or checkpoint.every * checkpoint.tail > 0)
        self._plans: dict[object, AttentionPlan] = {}

    def __call__(
        self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, saved: SavedOutput | None = None
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
                grad_comm_dtype=self._settings.grad_comm_dtype,
                num_head_chunks=self._head_parts,
                recompute=self._replayed,
                lse_gradient=False,  # an LSE is kept for a replay here, nothing is learnt from it
            )
        out_BLND, lse_BNL = run_attention(
            self._plans[key], q_BLND, k_BLKD, v_BLKD, saved=saved, recompute=self._replayed, return_lse=True
        )
        return out_BLND, lse_BNL

    def keep(self, out_BLND: Tensor, lse_BNL: Tensor, tail: float) -> SavedOutput | None:
        return save_suffix(out_BLND, lse_BNL, self._cp, tail)

    def resolved(self) -> dict[str, str]:
        plan = self._last_plan()
        return {} if plan is None else plan.resolved() | self._tail_shares(plan)

    def computed_sent_bytes(self) -> int | None:
        """What this rank sends in one forward and backward by the plan's arithmetic; None before the first call."""
        plan = self._last_plan()
        return None if plan is None else plan.sent_bytes(gathered=not self._replayed).total

    def _last_plan(self) -> AttentionPlan | None:
        return next(reversed(self._plans.values()), None)  # warm-up may have had shorter sequences

    def _tail_shares(self, plan: AttentionPlan) -> dict[str, str]:
        """What checkpointing leaves the fullest and the busiest rank, as fractions of a rank's outputs and forward."""
        checkpoint, seq_len = self._settings.checkpoint, self._settings.seq_len
        if self._settings.task != "train" or checkpoint.every == 0:
            return {}
        cut = tail_cut(checkpoint.tail, seq_len, self._cp.size)
        return {
            "kept_share": f"{kept_share(self._cp.layout, seq_len, self._cp.size, cut):.4f}",
            "recompute_share": f"{plan.recompute_share(cut):.4f}",
        }
