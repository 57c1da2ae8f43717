"""The attention of every native method, ours and the baselines': `burst_attention` with a trial's settings bound."""

from __future__ import annotations

import copy

from torch import Tensor

from engine.attention.algorithms.saved import AttentionPlan, SavedOutput, save_suffix
from engine.attention.comm_volume import SentBytes
from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import tail_cut
from engine.attention.masks import Mask, kept_share, parse_mask, recompute_share
from engine.attention.prepared import PreparedAttention
from engine.attention.resolve import Choices
from engine.settings import TrialSettings


class BoundAttention:
    """An `AttentionFn`. It makes its choices at the first call with new shapes and keeps the plan."""

    def __init__(self, cp: ContextParallel, settings: TrialSettings, choices: Choices, mask: str | None = None) -> None:
        """`choices`: of the method, as `engine.method.PlannedMethod.choices` gives them; `mask`: one of
        `settings.masks`, the first by default."""
        self._cp, self._settings, self._choices = cp, settings, choices
        self._mask = parse_mask(mask or settings.masks[0])
        self._prepared: dict[object, PreparedAttention] = {}
        self._last: list[AttentionPlan] = []  # the plan made last, of this attention or of that of a batch

    def under(self, mask: Mask, cp: ContextParallel) -> BoundAttention:
        """The same attention for one batch: its documents take the place of the settings' mask, and `cp` are the same
        ranks in its layout."""
        other = copy.copy(self)
        other._mask, other._cp, other._prepared = mask, cp, {}
        return other

    def __call__(
        self,
        q_BLND: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        *,
        sinks_N: Tensor | None = None,
        saved: SavedOutput | None = None,
        expand_NXC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        attend = self.prepared(q_BLND, k_BLKD, v_BLKD, expand_NXC)
        out_BLND, lse_BNL = attend(q_BLND, k_BLKD, v_BLKD, sinks_N=sinks_N, saved=saved, expand_NXC=expand_NXC)
        return out_BLND, lse_BNL

    def prepared(
        self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor | None = None, expand_NXC: Tensor | None = None
    ) -> PreparedAttention:
        """Attention for tensors like these, with every choice made; their values are not read. V is as K when None."""
        v_BLKD = k_BLKD if v_BLKD is None else v_BLKD
        key = (q_BLND.shape, k_BLKD.shape, v_BLKD.shape, q_BLND.dtype, q_BLND.device)
        if key not in self._prepared:
            self._prepared[key] = PreparedAttention(
                q_BLND, k_BLKD, v_BLKD, expand_NXC, "BSHD", self._mask, self._cp, self._choices, return_lse=True
            )
            self._last[:] = [self._prepared[key].plan]
        return self._prepared[key]

    def keep(self, out_BLND: Tensor, lse_BNL: Tensor, tail: float) -> SavedOutput | None:
        return save_suffix(out_BLND, lse_BNL, self._cp, tail)

    def resolved(self) -> dict[str, str]:
        plan = self._last_plan()
        if plan is None:
            return {}
        return plan.resolved() | {"grad_comm_dtype": self._choices.grad_comm_dtype} | self._tail_shares(plan)

    def computed_sent(self) -> SentBytes | None:
        """Bytes this rank sends in one forward and backward, computed from the plan; None before the first call."""
        plan = self._last_plan()
        if plan is None:
            return None
        call = plan.choice.sent(plan.cp.rank, gathered=not self._choices.recompute)
        return call.forward + call.backward

    def _last_plan(self) -> AttentionPlan | None:
        return self._last[0] if self._last else None  # warm-up may use shorter sequences

    def _tail_shares(self, plan: AttentionPlan) -> dict[str, str]:
        """Outputs that checkpointing saves on the fullest rank, and forward work that it repeats on the busiest, as
        fractions of one rank's."""
        checkpoint, seq_len = self._settings.checkpoint, self._settings.row_tokens
        if self._settings.task != "train" or not checkpoint.layers_again(self._settings.model.layers):
            return {}
        cut, division = tail_cut(checkpoint.tail, seq_len, self._cp.size), plan.choice.division
        again = recompute_share(plan.mask, division.layout, seq_len, division.ring.cp_size, cut)
        return {
            "kept_share": f"{kept_share(plan.cp.layout, seq_len, self._cp.size, cut):.4f}",
            "recompute_share": f"{again:.4f}",
        }
