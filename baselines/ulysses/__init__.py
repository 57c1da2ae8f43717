"""DeepSpeed-Ulysses, native: all-to-all from sequence shards to head shards and back (arXiv:2309.14509)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.ring_baseline import fixed_settings_unsupported_reason
from engine.attention.geometry.layout import split_unsupported_reason
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

    def refuse(self, settings: TrialSettings) -> str | None:
        if settings.tp_size > 1:
            return f"ulysses runs without tensor parallelism, found tp_size {settings.tp_size}; set tp_size to 1"
        model, cp_size = settings.model, settings.cp_size
        for label, heads in (("query", model.heads), ("KV", model.kv_heads)):
            if heads % cp_size:
                return (
                    f"ulysses needs {label} heads divisible by cp_size, found {heads} heads of model {model.name} and "
                    f"cp_size {cp_size}; choose a cp_size that divides {heads}"
                )
        fixed = {"layout": "contiguous", "schedule": "ulysses", "backward": None, "exchange": None}
        return fixed_settings_unsupported_reason(settings, fixed) or split_unsupported_reason(
            "contiguous", settings.seq_len, cp_size
        )

    def layout(self, settings: TrialSettings) -> str:
        return "contiguous"

    def attention(self, cp: ContextParallel, settings: TrialSettings) -> AttentionFn:
        from engine.attention.bound import BoundAttention

        # One all-to-all of all heads before attention and one after, as published.
        return BoundAttention(cp, settings, schedule="ulysses", backward="auto", exchange="direct", num_head_chunks=1)


METHOD = Ulysses()
