"""LoongTrain's double ring alone, from the copy of InternEvo in the paper's artifact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.called import UpstreamAttention, one_sequence_reason
from baselines.install.places import Place

if TYPE_CHECKING:
    from engine.settings import TrialSettings


class LoongTrain(UpstreamAttention):
    """Zigzag shards; the inner ring has a quarter of the ranks, as in the artifact."""

    name = "loongtrain_upstream"
    package = "loongtrain"
    system = "LoongTrain's double ring"
    source = "arXiv:2406.18485"
    honours = ("schedule",)

    def own_reason(self, settings: TrialSettings) -> str | None:
        if settings.schedule not in ("auto", "double_ring"):
            return f"{self.name} is a double ring, found schedule {settings.schedule}; set schedule to auto"
        if settings.cp_size % window(settings):
            return (
                f"{self.name} has rings of {window(settings)} ranks, found cp_size {settings.cp_size}; choose another"
            )
        return one_sequence_reason(self, settings)

    def request(self, settings: TrialSettings, place: Place) -> dict[str, object]:
        return super().request(settings, place) | {"window": window(settings)}


def window(settings: TrialSettings) -> int:
    """Ranks of an inner ring: a quarter, and at least two where there are two."""
    return max(min(2, settings.cp_size), settings.cp_size // 4)


METHOD = LoongTrain()
