"""DeepSpeed-Ulysses, native: all-to-all from sequence shards to head shards and back (arXiv:2309.14509).

K and V heads fewer than ranks are repeated before the all-to-all, as by DeepSpeed's `UlyssesSPAttentionHF` (ALST,
arXiv:2506.13996). Its `DistributedAttention`, of the paper, refuses them.

Differences from the original. One all-to-all takes q, k and v together, where DeepSpeed runs three, and with
`sp_stream` each beside the next projection; LSE and delta are exchanged in place of saving O a second time. RoPE comes
before the all-to-all. `DistributedAttention` also divides query heads unevenly where K and V have as many heads; here
that is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.ring_baseline import fixed_settings_unsupported_reason
from engine.attention.geometry.layout import split_unsupported_reason
from engine.attention.resolve import Choices, trial_choices
from engine.method import EngineCommand

if TYPE_CHECKING:
    from torch import Tensor

    from engine.attention.algorithms.saved import AttentionFn, SavedOutput
    from engine.attention.bound import BoundAttention
    from engine.attention.context import ContextParallel
    from engine.attention.masks import Mask
    from engine.settings import TrialSettings


class Ulysses(EngineCommand):
    """Each rank attends over the whole sequence with its share of the heads."""

    name = "ulysses"
    system = "Megatron-DeepSpeed"
    source = "arXiv:2309.14509"
    grad_comm_dtype = "fp32"  # of no effect: every gradient is whole when it is sent, and has the inputs' dtype

    def refuse(self, settings: TrialSettings) -> str | None:
        if settings.tp_size > 1:
            return f"ulysses runs without tensor parallelism, found tp_size {settings.tp_size}; set tp_size to 1"
        model, cp_size = settings.model, settings.cp_size
        found = f"heads of model {model.name} and cp_size {cp_size}"
        if model.heads % cp_size:
            return (
                f"ulysses needs query heads divisible by cp_size, found {model.heads} {found}; choose a cp_size that "
                f"divides {model.heads}"
            )
        if model.kv_heads % cp_size and cp_size % model.kv_heads:
            return (
                f"ulysses needs KV heads divisible by cp_size, or cp_size by KV heads, found {model.kv_heads} {found}; "
                f"choose a cp_size that divides {model.kv_heads} or is a multiple of it"
            )
        fixed = {"layout": "contiguous", "schedule": "ulysses", "backward": None, "exchange": None}
        return fixed_settings_unsupported_reason(settings, fixed) or split_unsupported_reason(
            "contiguous", settings.row_tokens, cp_size
        )

    def layout(self, settings: TrialSettings) -> str:
        return "contiguous"

    def choices(self, settings: TrialSettings) -> Choices:
        # One all-to-all of all heads before attention and one after, as published.
        return trial_choices(settings)._replace(
            schedule="ulysses", backward="auto", exchange="direct", num_head_chunks=1
        )

    def kv_heads(self, settings: TrialSettings) -> int:
        # Fewer than ranks are repeated (`RepeatingHeads`), so that what divides by no rank is one head for each.
        return max(settings.model.kv_heads, settings.cp_size)

    def attention(self, cp: ContextParallel, settings: TrialSettings, mask: str | None = None) -> AttentionFn:
        from engine.attention.bound import BoundAttention

        attend = BoundAttention(cp, settings, self.choices(settings), mask)
        return attend if settings.model.kv_heads % cp.size == 0 else RepeatingHeads(attend, cp.size)


class RepeatingHeads:
    """An `AttentionFn`: another one, given K and V with as many heads as there are ranks. Source:
    DeepSpeed's `UlyssesSPAttentionHF`, where each rank then attends with one of them."""

    def __init__(self, attend: BoundAttention, ranks: int) -> None:
        self._attend, self._ranks = attend, ranks
        self.keep, self.resolved, self.computed_sent = attend.keep, attend.resolved, attend.computed_sent

    def under(self, mask: Mask, cp: ContextParallel) -> RepeatingHeads:
        return RepeatingHeads(self._attend.under(mask, cp), self._ranks)

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
        assert expand_NXC is None, "a latent has as many KV heads as query heads"
        k_BLND, v_BLND = repeated(k_BLKD, self._ranks), repeated(v_BLKD, self._ranks)
        return self._attend(q_BLND, k_BLND, v_BLND, sinks_N=sinks_N, saved=saved)


def repeated(kv_BLKD: Tensor, heads: int) -> Tensor:
    """K or V with `heads` heads, a multiple of its own: each one so many times, next to each other."""
    times = heads // kv_BLKD.shape[2]
    return kv_BLKD.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3)


METHOD = Ulysses()
