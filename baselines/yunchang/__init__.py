"""yunchang (USP) as its authors ship it: an all-to-all over some of the ranks and a ring over the others.

`schedule` sets the split: `ring`, `ulysses`, or `usp`, whose all-to-alls have the ranks of a node, or half the ranks of
a single one (`baselines.called.head_ranks`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from baselines.called import InWorker, ShardParts, head_ranks, heads_reason
from engine.attention.geometry.layout import Layout, Zigzag

if TYPE_CHECKING:
    from engine.settings import TrialSettings


class Yunchang(InWorker):
    """Zigzag shards over the flash-attn that its environment has; ranks of one all-to-all hold parts of one shard."""

    name = "yunchang_upstream"
    package = "yunchang"
    system = "yunchang"
    source = "arXiv:2405.07719"
    schedules = ("usp", "ulysses", "ring")

    def own_reason(self, settings: TrialSettings) -> str | None:
        return heads_reason(self, settings, self.schedule_of(settings))

    def request(self, settings: TrialSettings, source: Path) -> dict[str, object]:
        return super().request(settings, source) | {"head_ranks": head_ranks(settings, self.schedule_of(settings))}

    def shards(self, settings: TrialSettings) -> Layout:
        return ShardParts(Zigzag(), head_ranks(settings, self.schedule_of(settings)))

    def arrangement(self, settings: TrialSettings) -> str:
        across = head_ranks(settings, self.schedule_of(settings))
        return f"ulysses {across} x ring {settings.cp_size // across}"


METHOD = Yunchang()
