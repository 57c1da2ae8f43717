"""DeepSpeed-Ulysses, native: all-to-all from sequence shards to head shards and back (arXiv:2309.14509).

K and V heads fewer than ranks are repeated before the all-to-all, as by DeepSpeed's `UlyssesSPAttentionHF` (ALST,
arXiv:2506.13996). Its `DistributedAttention`, of the paper, does not: `repeat_kv_heads: false` refuses them as well.

Differences from the original. One all-to-all takes q, k and v together, where DeepSpeed runs three; LSE and delta are
exchanged in place of saving O a second time. With `overlap_projections: true` there are three, each begun when its
tensor is formed, as with DeepSpeed's `sp_stream`, and neither LSE nor delta is sent; in backward they begin together
and are waited for one by one. RoPE comes before the all-to-all. `DistributedAttention` also divides query heads
unevenly where K and V have as many heads; here that is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.ring_baseline import fixed_settings_unsupported_reason
from engine.attention.geometry.layout import split_unsupported_reason
from engine.attention.resolve import Choices, trial_choices
from engine.method import EngineCommand

if TYPE_CHECKING:
    from engine.attention.context import ContextParallel
    from engine.method import AttentionFn
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
        if model.kv_heads % cp_size and not settings.repeat_kv_heads:
            return (
                f"ulysses without repeat_kv_heads needs KV heads divisible by cp_size, found {model.kv_heads} {found}; "
                f"choose a cp_size that divides {model.kv_heads}, or set repeat_kv_heads to true"
            )
        if model.kv_heads % cp_size and cp_size % model.kv_heads:
            return (
                f"ulysses needs KV heads divisible by cp_size, or cp_size by KV heads, found {model.kv_heads} {found}; "
                f"choose a cp_size that divides {model.kv_heads} or is a multiple of it"
            )
        fixed = {"layout": "contiguous", "schedule": "ulysses", "backward": None, "exchange": None}
        return (
            fixed_settings_unsupported_reason(settings, fixed)
            or split_unsupported_reason("contiguous", settings.seq_len, cp_size)
            or self._overlap_unsupported_reason(settings)
        )

    def _overlap_unsupported_reason(self, settings: TrialSettings) -> str | None:
        """Why the all-to-alls of q, k and v cannot run beside the projections, or None."""
        if not settings.overlap_projections:
            return None
        if settings.projection_tiles > 1:
            return (
                "overlap_projections sends q, k and v as soon as each is formed, found projection_tiles "
                f"{settings.projection_tiles}; set projection_tiles to 1"
            )
        if settings.task == "train" and settings.checkpoint.layers_again(settings.model.layers):
            return (
                "overlap_projections keeps what the all-to-alls received, found layers that are computed again; set "
                "checkpoint.every to 0"
            )
        return None

    def layout(self, settings: TrialSettings) -> str:
        return "contiguous"

    def choices(self, settings: TrialSettings) -> Choices:
        # One all-to-all of all heads before attention and one after, as published.
        return trial_choices(settings)._replace(
            schedule="ulysses", backward="auto", exchange="direct", num_head_chunks=1
        )

    def attention(self, cp: ContextParallel, settings: TrialSettings) -> AttentionFn:
        from baselines.ulysses.attention import OverlappedUlysses, RepeatingHeads
        from engine.attention.bound import BoundAttention

        if settings.overlap_projections and cp.size > 1:
            return OverlappedUlysses(cp, settings)
        attend = BoundAttention(cp, settings, self.choices(settings))
        return attend if settings.model.kv_heads % cp.size == 0 else RepeatingHeads(attend, cp.size)


METHOD = Ulysses()
