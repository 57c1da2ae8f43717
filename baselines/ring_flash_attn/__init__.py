"""ring-flash-attention as its author ships it: a zigzag ring over FlashAttention-2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.called import UpstreamAttention, one_sequence_reason

if TYPE_CHECKING:
    from engine.settings import TrialSettings


class RingFlashAttention(UpstreamAttention):
    """K and V circulate, unrepeated; their gradients follow in fp32."""

    name = "ring_flash_attn_upstream"
    package = "ring_flash_attn"
    system = "ring-flash-attention"
    source = "github.com/zhuzilin/ring-flash-attention"

    def own_reason(self, settings: TrialSettings) -> str | None:
        return one_sequence_reason(self, settings)


METHOD = RingFlashAttention()
