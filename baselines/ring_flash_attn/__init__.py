"""ring-flash-attention as its author ships it: a zigzag ring over the flash-attn that its environment has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.called import InWorker

if TYPE_CHECKING:
    from engine.settings import TrialSettings


class RingFlashAttention(InWorker):
    """K and V circulate, unrepeated; their gradients follow in fp32."""

    name = "ring_flash_attn_upstream"
    package = "ring_flash_attn"
    system = "ring-flash-attention"
    source = "github.com/zhuzilin/ring-flash-attention"
    schedules = ("ring",)

    def arrangement(self, settings: TrialSettings) -> str:
        return "zigzag ring"


METHOD = RingFlashAttention()
