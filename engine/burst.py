"""Method `burst`: BurstAttention on the engine's model and trainer. The settings are the paper's ablation switches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.attention.geometry.layout import split_unsupported_reason
from engine.attention.masks import parse_mask
from engine.attention.resolve import Choices, trial_choices, trial_layout
from engine.method import EngineCommand

if TYPE_CHECKING:
    from engine.attention.algorithms.saved import AttentionFn
    from engine.attention.context import ContextParallel
    from engine.attention.geometry.layout import Layout
    from engine.linear.shard import LinearShard, Recurrence
    from engine.settings import TrialSettings


class Burst(EngineCommand):
    """Query-side backward ring; layout, schedule, backward and kernel as the settings say."""

    name = "burst"
    system = "BurstEngine"
    source = "arXiv:2509.19836"

    def refuse(self, settings: TrialSettings) -> str | None:
        if settings.tp_size > 1:
            return f"burst has no tensor parallelism, found tp_size {settings.tp_size}; set tp_size to 1"
        return parse_mask(settings.mask).unsupported_reason(settings.seq_len) or split_unsupported_reason(
            self.layout(settings), settings.row_tokens, settings.cp_size
        )

    def layout(self, settings: TrialSettings) -> str | Layout:
        return trial_layout(settings)

    def choices(self, settings: TrialSettings) -> Choices:
        return trial_choices(settings)

    def attention(self, cp: ContextParallel, settings: TrialSettings, mask: str | None = None) -> AttentionFn:
        from engine.attention.bound import BoundAttention

        return BoundAttention(cp, settings, self.choices(settings), mask)

    def recurrence(self, shard: LinearShard) -> Recurrence:
        return shard.recurrence


METHOD = Burst()
