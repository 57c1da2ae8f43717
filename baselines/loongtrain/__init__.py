"""LoongTrain's double ring alone, from the copy of InternEvo in the paper's artifact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from baselines.called import InWorker

if TYPE_CHECKING:
    from engine.settings import TrialSettings


class LoongTrain(InWorker):
    """Zigzag shards; the inner ring has a quarter of the ranks, as in the artifact, or those of an emulated node."""

    name = "loongtrain_upstream"
    package = "loongtrain"
    system = "LoongTrain's double ring"
    source = "arXiv:2406.18485"
    schedules = ("double_ring",)

    def own_reason(self, settings: TrialSettings) -> str | None:
        if settings.cp_size % window(settings):
            return (
                f"{self.name} has rings of {window(settings)} ranks, found cp_size {settings.cp_size}; choose another"
            )
        return None

    def request(self, settings: TrialSettings, source: Path) -> dict[str, object]:
        return super().request(settings, source) | {"window": window(settings)}

    def arrangement(self, settings: TrialSettings) -> str:
        return f"windows of {window(settings)} ranks"


def window(settings: TrialSettings) -> int:
    """Ranks of an inner ring: those of an emulated node; else a quarter, and at least two where there are two."""
    if settings.emulate_nodes > 1:
        return settings.cp_size // settings.emulate_nodes
    return max(min(2, settings.cp_size), settings.cp_size // 4)


METHOD = LoongTrain()
