"""yunchang (USP) as its authors ship it: an all-to-all over some of the ranks and a ring over the others.

`schedule` sets the split: `ring`, `ulysses`, or `usp`, which gives as many ranks to the heads as divide them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from baselines.called import UpstreamAttention, one_sequence_reason
from baselines.install.places import Place

if TYPE_CHECKING:
    from engine.settings import TrialSettings


class Yunchang(UpstreamAttention):
    """Zigzag shards over FlashAttention-2."""

    name = "yunchang_upstream"
    package = "yunchang"
    system = "yunchang"
    source = "arXiv:2405.07719"
    honours = ("schedule",)

    def own_reason(self, settings: TrialSettings) -> str | None:
        heads = math.gcd(settings.model.heads, settings.model.kv_heads)
        if settings.schedule not in ("auto", "ring", "usp", "ulysses"):
            return f"{self.name} runs schedule ring, usp or ulysses, found {settings.schedule}; set it to one of them"
        if heads % head_ranks(settings):
            return (
                f"{self.name} needs heads divisible by its head ranks, found {settings.model.kv_heads} KV heads of "
                f"model {settings.model.name} and {head_ranks(settings)} ranks; choose schedule ring or usp"
            )
        return one_sequence_reason(self, settings)

    def request(self, settings: TrialSettings, place: Place) -> dict[str, object]:
        return super().request(settings, place) | {"head_ranks": head_ranks(settings)}


def head_ranks(settings: TrialSettings) -> int:
    """Ranks of the all-to-all."""
    if settings.schedule == "ulysses":
        return settings.cp_size
    return (
        1 if settings.schedule == "ring" else math.gcd(settings.model.kv_heads, settings.model.heads, settings.cp_size)
    )


METHOD = Yunchang()
