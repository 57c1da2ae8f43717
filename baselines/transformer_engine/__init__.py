"""TransformerEngine's context parallelism as its authors ship it: what Megatron-LM calls, alone.

`schedule` sets its `cp_comm_type`: `ring` is p2p, `all_gather` and `ulysses` (a2a) are what they are called there, and
`usp` is a2a+p2p, an all-to-all of heads inside a node and a ring across nodes (`baselines.called.head_ranks`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from baselines.called import InWorker, head_ranks, heads_reason

if TYPE_CHECKING:
    from engine.settings import TrialSettings

COMM_TYPES = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a", "usp": "a2a+p2p"}


class TransformerEngine(InWorker):
    """Zigzag shards of all ranks, whatever is sent; cuDNN's attention."""

    name = "transformer_engine_upstream"
    package = "transformer_engine"
    system = "TransformerEngine"
    source = "github.com/NVIDIA/TransformerEngine"
    kernels = ("cudnn",)
    schedules = tuple(COMM_TYPES)

    def own_reason(self, settings: TrialSettings) -> str | None:
        return heads_reason(self, settings, self.schedule_of(settings))

    def request(self, settings: TrialSettings, source: Path) -> dict[str, object]:
        schedule = self.schedule_of(settings)
        across = head_ranks(settings, schedule)
        return super().request(settings, source) | {"comm_type": COMM_TYPES[schedule], "head_ranks": across}

    def arrangement(self, settings: TrialSettings) -> str:
        schedule = self.schedule_of(settings)
        if schedule != "usp":
            return COMM_TYPES[schedule]
        across = head_ranks(settings, schedule)
        return f"a2a {across} + p2p {settings.cp_size // across}"


METHOD = TransformerEngine()
