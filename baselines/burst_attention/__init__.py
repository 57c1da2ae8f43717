"""The original Burst-Attention library at the commit of the paper's artifact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.called import UpstreamAttention, one_sequence_reason

if TYPE_CHECKING:
    from engine.settings import TrialSettings


class BurstAttentionLibrary(UpstreamAttention):
    """A zigzag ring whose backward circulates the query side."""

    name = "burst_attention_upstream"
    package = "burst_attention"
    system = "Burst-Attention"
    source = "arXiv:2509.19836"
    attends = "fa2"  # flash "cuda" in call.py

    def own_reason(self, settings: TrialSettings) -> str | None:
        model = settings.model
        if model.kv_heads != model.heads:
            return (
                f"{self.name} maps grouped heads wrongly, found {model.kv_heads} KV heads of model {model.name}; "
                "choose a model without grouped heads"
            )
        return one_sequence_reason(self, settings)


METHOD = BurstAttentionLibrary()
